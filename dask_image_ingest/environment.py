"""Installed packages: versions for reports of bugs, and of processes that may lack this package."""

from __future__ import annotations

import importlib
import inspect
import platform
from collections.abc import Callable
from typing import Any

from dask_image_ingest.errors import ClusterError

#: The name of this package among those of :func:`environment`.
PACKAGE = "dask-image-ingest"


class Versions(dict[str, str | None]):
    """Versions by name, shown one a line; None for what is not installed."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {version or '-'}" for name, version in self.items())


def versions() -> Versions:
    """Tell the versions of this package and of those that it uses, for reports of bugs.

    Returns
    -------
    Versions
        A dict by name. It prints itself, one a line.

    Examples
    --------
    >>> "dask" in versions()
    True
    """
    found = {name: told for name, told in environment().items() if name not in ("host", "cores")}
    return Versions({"platform": platform.platform(), **found})


def own_version() -> str:
    """The version of this package in this process."""
    version: str = importlib.import_module(__package__).__version__
    return version


def refuse_other_version(version: str) -> None:
    """Refuse a task that another version of this package has made.

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
    """The host and its cores, and versions of Python and packages; None for what is not there.

    Runs in processes that lack this package: what it needs is imported inside, and is Python's own.
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

    with contextlib.suppress(RuntimeError):  # of another thread that imports meanwhile
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
    """A function that is sent as its source, to processes that lack this package.

    It has to import inside what it needs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, where it need not travel."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        # The source, since code that one Python has compiled is none for another.
        source = f"from __future__ import annotations\n{inspect.getsource(self._function)}"
        name = self._function.__name__
        return eval, (f"(lambda space: (exec({source!r}, space), space[{name!r}])[1])({{}})",)
