"""What the workers of this process's client say of themselves."""

from __future__ import annotations

import os
from typing import Any

_is_fork = False


def is_fork() -> bool:
    """Whether this process is a fork, which has its parent's client but not its event loop.

    Calls of that client would never return.
    """
    return _is_fork


def workers() -> list[dict[str, Any]]:
    """The workers as the scheduler knows them; none without a client."""
    from distributed.client import default_client

    if _is_fork:
        return []
    try:
        return [*default_client().scheduler_info(n_workers=-1)["workers"].values()]
    except ValueError:
        return []


def _forked() -> None:
    global _is_fork
    _is_fork = True


os.register_at_fork(after_in_child=_forked)
