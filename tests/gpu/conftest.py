"""Decides once whether the GPU tests can run here, and says why not where they can't."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_NEEDED = ("cudf", "cupy", "dask_cuda", "dask_cudf", "nvidia.dali", "pylibcudf", "rmm")
_SIMULATED = "simulated.plugin" in sys.modules


@functools.cache
def why_not(module=""):
    """Why the tests of a module can't run; None where they can."""
    needed = ("cupy",) if module == "test_bare.py" else _NEEDED
    missing = [name for name in needed if not _installed(name)]
    if missing:
        return f"needs {', '.join(missing)}: pip install 'dask-image-ingest[cuda12]' or [cuda13]"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs a GPU, and CUDA finds none: {error}"
    return None if count else "needs a GPU, and CUDA counts none"


def _installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def pytest_report_header(config):
    return f"GPU tests: {f'all skipped, {why_not()}' if why_not() else 'run'}"


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            # What RAPIDS' own packages warn of is not this package's to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if reason := why_not(item.path.name):
                item.add_marker(pytest.mark.skip(reason=reason))
            elif _SIMULATED and item.get_closest_marker("card"):
                item.add_marker(pytest.mark.skip(reason="needs a real GPU"))
