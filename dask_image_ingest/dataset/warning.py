"""Warnings that reach the user, wherever the task runs that has something to say."""

from __future__ import annotations

import warnings

__all__ = ["warn_user"]


def warn_user(message: str) -> None:
    """Warn here, and on a worker of a cluster also in the client that waits for it."""
    try:
        from distributed.worker import get_worker, warn

        get_worker()
    except (ImportError, ValueError):
        warnings.warn(message, stacklevel=3)
    else:
        warn(message)
