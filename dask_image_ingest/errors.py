"""Exceptions, one class for each thing that a caller may want to catch.

Every class also derives from the built-in exception that plain Python would raise, so that ``except
FileNotFoundError`` keeps working. Each takes one finished sentence and nothing else: workers send
their exceptions to the client by pickle, which keeps a message as it is. It has no password of a
URL in it, and names the worker on which it was made.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from dask_image_ingest.passwords import without_passwords

__all__ = [
    "ArgumentError",
    "ClusterError",
    "DaskImageIngestError",
    "ExportError",
    "FunctionError",
    "ImageDecodeError",
    "MissingDependencyError",
    "OperandError",
    "PartitionTooLargeError",
    "ShardError",
    "ShardNotFoundError",
]

_WORKER = " [worker "  # how the name of a worker begins in a message


class DaskImageIngestError(Exception):
    """Base of every error that this package raises on purpose."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(_completed(arg) if isinstance(arg, str) else arg for arg in args))


class ArgumentError(DaskImageIngestError, ValueError):
    """An argument makes no sense, alone or together with another one."""


class OperandError(ArgumentError, TypeError):
    """An operation that a column of images or lists does not have; pandas goes by TypeError."""


class MissingDependencyError(DaskImageIngestError, ImportError):
    """An optional package is needed for this and is not installed."""


class ClusterError(DaskImageIngestError, RuntimeError):
    """Workers or the scheduler of a cluster can't run tasks of this package."""


class ShardNotFoundError(DaskImageIngestError, FileNotFoundError):
    """A path, a pattern or a folder leads to no shard.

    Parameters
    ----------
    path
        The file of this machine that is missing, if it is one. Where the error of a worker arrives,
        it is looked for again.
    """

    def __init__(self, *args: Any, path: str | None = None) -> None:
        super().__init__(*args)
        self.path = path

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        """Say whether the process in which the error arrives sees the file."""
        super().__setstate__(state)
        if self.path and _WORKER in self.args[0] and not this_worker():
            if os.path.exists(self.path):
                seen = "This process sees it: mount its folder at the same place for all workers"
            else:
                seen = "Nor does this process see it"
            self.args = (f"{self.args[0]}. {seen}",)


class ShardError(DaskImageIngestError, ValueError):
    """A shard cannot be read, or is no tar archive."""


class ImageDecodeError(DaskImageIngestError, ValueError):
    """An image cannot be decoded and the reader was told to raise (``errors="raise"``)."""


class FunctionError(DaskImageIngestError, RuntimeError):
    """A function that was passed in has failed: a transform, or that of ``map_batches``."""


class ExportError(DaskImageIngestError, OSError):
    """Shards cannot be written where they should go, or not over what is there already."""


# MemoryError comes first because it makes its instances by itself: the other way round, the
# exception cannot be rebuilt from what a Dask worker sends.
class PartitionTooLargeError(MemoryError, DaskImageIngestError):
    """The images of one partition decode to more bytes than a partition may hold."""

    __init__ = DaskImageIngestError.__init__


def _completed(message: str) -> str:
    """The message without passwords, and with the worker on which it is made."""
    worker = "" if _WORKER in message else this_worker()
    return without_passwords(message) + worker


def this_worker() -> str:
    """The worker that this thread works for; empty in other processes."""
    if "distributed.worker" not in sys.modules:
        return ""
    from distributed import get_worker

    try:
        return f"{_WORKER}{get_worker().address} on {platform.node()}]"
    except ValueError:
        return ""
