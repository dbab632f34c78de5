"""``versions``: what a report of a bug should begin with."""

from __future__ import annotations

import platform

from dask_image_ingest.cluster.environment import environment


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
