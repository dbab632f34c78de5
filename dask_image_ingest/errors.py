"""Exceptions, one class for each condition that a caller may want to catch; warnings.

Every class also derives from the built-in exception that plain Python would raise, so that ``except
FileNotFoundError`` works. Each takes a finished message as its only argument, so that it survives
the pickle from a worker to the client. Passwords in URLs are masked, and the name of the worker is
appended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import sys
from collections.abc import Iterator
from types import FrameType

import cloudpickle
from tblib import pickling_support

from dask_image_ingest.url_secrets import error_text, without_secrets

__all__ = [
    "ArgumentError",
    "ClusterError",
    "DaskImageIngestError",
    "ExportError",
    "FunctionError",
    "ImageDecodeError",
    "MissingDependencyError",
    "PartitionTooLargeError",
    "ShardError",
    "ShardNotFoundError",
]

_WORKER = " [worker "  # before the name of a worker in a message

# Packages between a warning and the line of the user that leads to it.
_INNER = {
    *(__name__.partition(".")[0], "dask", "distributed", "tornado"),
    *("asyncio", "concurrent", "contextlib", "functools", "threading"),
}


class DaskImageIngestError(Exception):
    """Base class of all errors that this package raises deliberately."""

    def __init__(self, message: str = "") -> None:
        # It comes with the name of its worker when it is unpickled in another process.
        worker = "" if _WORKER in message else this_worker()
        super().__init__(without_secrets(message) + worker)


class ArgumentError(DaskImageIngestError, ValueError):
    """An argument is invalid, alone or together with another one."""


class OperandError(ArgumentError, TypeError):
    """A column of images or lists does not support an operation; pandas expects a TypeError."""


class MissingDependencyError(DaskImageIngestError, ImportError):
    """An optional package is required and not installed."""


class ClusterError(DaskImageIngestError, RuntimeError):
    """Workers or the scheduler of a cluster can't run tasks of this package."""


class ShardNotFoundError(DaskImageIngestError, FileNotFoundError):
    """A path, pattern or folder matches no shard."""


class ShardError(DaskImageIngestError, ValueError):
    """A shard can't be read, or is not a tar archive."""


class ImageDecodeError(DaskImageIngestError, ValueError):
    """An image can't be decoded, and the read has ``errors="raise"``."""


class FunctionError(DaskImageIngestError, RuntimeError):
    """A user's function failed: a transform, or that of ``map_batches``."""


class ExportError(DaskImageIngestError, OSError):
    """Shards can't be written to their destination, or must not replace what is there."""


# MemoryError comes first, as it has its own __new__: the other way round, the exception can't be
# unpickled.
class PartitionTooLargeError(MemoryError, DaskImageIngestError):
    """The images of one partition decode to more bytes than a partition can hold."""

    __init__ = DaskImageIngestError.__init__


def safe_cause(error: BaseException) -> BaseException:
    """The error; or, if it or a cause of it shows a secret, plain ones with the masked texts."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    safe = None if cause is None else safe_cause(cause)
    text = error_text(error)
    masked = without_secrets(text)
    if safe is cause and masked == text:
        return error
    replaced = Exception(masked).with_traceback(error.__traceback__)
    replaced.__cause__ = safe
    return replaced


@contextlib.contextmanager
def portable_causes() -> Iterator[None]:
    """In a worker or another child process: errors of this package whose causes can be pickled.

    Dask would send another error in place of one that it can't pickle, with its causes.
    """
    try:
        yield
    except DaskImageIngestError as error:
        if this_worker() or multiprocessing.parent_process() is not None:
            error.__cause__ = error.__cause__ and _portable(error.__cause__)
            error.__context__ = None
        raise


def _portable(error: BaseException) -> BaseException:
    """The error, or one with its text if it or what led to it can't be pickled."""
    try:
        pickling_support.install(error)  # as Dask does
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return Exception(error_text(error)).with_traceback(error.__traceback__)
    return error


def this_worker() -> str:
    """Suffix that names the worker of this thread; empty outside a worker."""
    if "distributed.worker" not in sys.modules:
        return ""
    from distributed import get_worker

    try:
        return f"{_WORKER}{get_worker().address} on {platform.node()}]"
    except ValueError:
        return ""


def warn_user(message: str) -> None:
    """Warn at the user's line, if it is of this thread; on a worker also in the client."""
    from distributed.worker import warn

    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warn(without_secrets(message), stacklevel=2 if frame is None else level)


_warned: set[str] = set()


def warn_once(about: str, message: str) -> None:
    """Warn as `warn_user` does, once in a process for all calls with this ``about``."""
    if about not in _warned:
        _warned.add(about)
        warn_user(message)
