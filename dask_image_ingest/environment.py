"""Versions of installed packages, for bug reports and for comparing workers with the client."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from dask_image_ingest.errors import ClusterError

#: Key of this package in :func:`environment`.
PACKAGE = "dask-image-ingest"

_DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")
_CUDF = ("cudf-cu13", "cudf-cu12", "cudf")


class Versions(dict[str, str | None]):
    """Versions by name, None if not installed. The repr has one line for each."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {version or '-'}" for name, version in self.items())


def versions() -> Versions:
    """Versions of this package and of those that it uses, for bug reports.

    Returns
    -------
    Versions
        A dict by name, printed with one line for each.

    Examples
    --------
    >>> "dask" in versions()
    True
    """
    packages = {name: v for name, v in environment().items() if name not in ("host", "cores")}
    return Versions({"platform": platform.platform(), **packages})


def own_version() -> str:
    """Version of this package in this process."""
    version: str = importlib.import_module(__package__).__version__
    return version


def refuse_other_version(version: str) -> None:
    """Refuse a task that was planned with another version of this package."""
    if version != own_version():
        raise ClusterError(
            f"a task of {PACKAGE} {version} has come to a process that has {own_version()}: "
            "install the same version everywhere, and start workers again"
        )


def environment() -> dict[str, Any]:
    """Host name, cores, and versions of Python and packages; None if not installed."""
    names = ("dask", "distributed", "pandas", "numpy", "pyarrow", "fsspec", "pillow")
    return {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        PACKAGE: own_version(),
        "dali": _dali_version(),
        **{name: _version(name) for name in names},
        "cudf": _version(*_CUDF),
    }


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _dali_version() -> str | None:
    try:
        found = importlib.util.find_spec("nvidia.dali")
    except ImportError:
        return None
    return None if found is None else _version(*_DALI) or "unknown"
