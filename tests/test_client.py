"""What a report of a bug should begin with."""

import importlib
import platform
from importlib.metadata import version

import dask_image_ingest as dii
from dask_image_ingest.client import environment


def test_versions_are_those_that_are_installed():
    told = dii.versions()
    assert told["dask-image-ingest"] == dii.__version__
    assert told["python"] == platform.python_version()
    for name in ("dask", "distributed", "pandas", "pyarrow", "pillow"):
        assert told[name] == version(name)


def test_versions_print_one_a_line():
    told = dii.versions()
    lines = [line.split() for line in repr(told).splitlines()]
    assert {line[0]: line[1] for line in lines} == {
        name: version or "-" for name, version in told.items()
    }


def test_a_worker_that_imports_meanwhile_has_its_versions_all_the_same(monkeypatch):
    def interrupted():
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(importlib, "invalidate_caches", interrupted)
    assert environment()["dask-image-ingest"] == dii.__version__
