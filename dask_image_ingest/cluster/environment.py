"""The packages of a process of a cluster, told without importing any of them."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle


def environment() -> dict[str, Any]:
    """The host and its cores, and versions of Python and packages; None for what is not there.

    Runs in processes that lack this package: what it needs is imported inside, and is Python's own.
    """
    import importlib
    import importlib.metadata
    import importlib.util
    import os
    import platform
    import re

    def version(*names: str) -> str | None:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def source_version() -> str | None:
        # Of the files that an import would find, which need not be those of a distribution.
        try:
            spec = importlib.util.find_spec("dask_image_ingest")
            text = spec.loader.get_source("dask_image_ingest")  # type: ignore[union-attr]
        except (ImportError, AttributeError, ValueError):
            return None
        found = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
        return found[1] if found else None

    def dali_version() -> str | None:
        try:
            found = importlib.util.find_spec("nvidia.dali")
        except ImportError:
            return None
        known = version("nvidia-dali-cuda130", "nvidia-dali-cuda120")
        return None if found is None else known or "unknown"

    importlib.invalidate_caches()
    return {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "dask-image-ingest": source_version(),
        "dali": dali_version(),
        "dask": version("dask"),
        "distributed": version("distributed"),
        "pandas": version("pandas"),
        "pyarrow": version("pyarrow"),
        "pillow": version("pillow"),
        "cudf": version("cudf-cu13", "cudf-cu12", "cudf"),
    }


class Portable:
    """A function of this package, pickled by value for processes that do not have it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, where it need not travel."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (_by_value(self._function),)


@functools.cache
def _by_value(function: Callable[..., Any]) -> bytes:
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
