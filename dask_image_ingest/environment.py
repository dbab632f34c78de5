"""Versions of installed packages, for bug reports and for comparing workers with the client."""

from __future__ import annotations

import importlib
import inspect
import platform
from collections.abc import Callable
from typing import Any

from dask_image_ingest.errors import ClusterError

#: Key of this package in :func:`environment`.
PACKAGE = "dask-image-ingest"


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
    """Refuse a task that was created by another version of this package.

    Raises
    ------
    ClusterError
    """
    if version != own_version():
        raise ClusterError(
            f"a task of {PACKAGE} {version} has come to a process that has {own_version()}: "
            "install the same version everywhere, and start workers again"
        )


def environment() -> dict[str, Any]:
    """Host name, cores, and versions of Python and packages; None if not installed.

    Sent to processes that may lack this package (`Portable`), so it imports what it needs itself,
    from the standard library only.
    """
    import contextlib
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
        # From the files that an import would find, which may not be a distribution's.
        try:
            spec = importlib.util.find_spec("dask_image_ingest")
            text = spec.loader.get_source("dask_image_ingest")  # type: ignore[union-attr]
        except (ImportError, AttributeError, ValueError):
            return None
        match = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
        return match[1] if match else None

    def dali_version() -> str | None:
        try:
            spec = importlib.util.find_spec("nvidia.dali")
        except ImportError:
            return None
        installed = version("nvidia-dali-cuda130", "nvidia-dali-cuda120")
        return None if spec is None else installed or "unknown"

    with contextlib.suppress(RuntimeError):  # another thread imports at the same time
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
        "numpy": version("numpy"),
        "pyarrow": version("pyarrow"),
        "fsspec": version("fsspec"),
        "pillow": version("pillow"),
        "cudf": version("cudf-cu13", "cudf-cu12", "cudf"),
    }


class Portable:
    """Wrapper that pickles a function as its source, for processes that may lack this package.

    The function must import what it needs itself.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in this process."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        # Source, not bytecode, which differs between versions of Python.
        source = f"from __future__ import annotations\n{inspect.getsource(self._function)}"
        name = self._function.__name__
        return eval, (f"(lambda space: (exec({source!r}, space), space[{name!r}])[1])({{}})",)
