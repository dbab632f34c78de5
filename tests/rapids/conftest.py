"""Tests of the cuDF backend that need the RAPIDS wheels but no GPU; they say so where they skip.

cuDF imports without a GPU, and most of what it does in Python works on columns over host memory:
what is built, sliced, sent and counted. What launches a kernel is for ``tests/gpu``.
"""

import importlib.util
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_NEEDED = ("cudf", "cupy", "dask_cuda", "dask_cudf")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(
            f"needs {', '.join(_MISSING)}, though no GPU: pip install 'dask-image-ingest[cuda12]'",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path, parent):
    if _MISSING and _HERE in module_path.parents:
        return _Skipped.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            # What RAPIDS' own packages warn of is not this package's to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def played(monkeypatch):
    """Frames are made in host memory, and go to Arrow from there."""
    import host_memory

    from dask_image_ingest.frames.cudf import columns, convert

    host_memory.play(monkeypatch, columns, convert)
