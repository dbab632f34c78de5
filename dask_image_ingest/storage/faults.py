"""Errors of file systems, in words that name the shard."""

from __future__ import annotations

import socket
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.url import local_path

# What happens where no server answers, or none is found.
_UNREACHED = (ConnectionError, socket.gaierror)


def guarded(url: str, read: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``read``, and let its errors name the shard."""
    try:
        return read(*args, **kwargs)
    except MemoryError:
        raise
    except Exception as error:  # each remote file system has exceptions of its own
        # fsspec says of a web address that there is no such file, whatever went wrong.
        hides = isinstance(error, FileNotFoundError) and _is_fault(error.__cause__)
        fault = error.__cause__ if hides else error
        if isinstance(fault, FileNotFoundError):
            raise ShardNotFoundError(
                f"{url} does not exist, or does no longer", path=local_path(url)
            ) from error
        behind = (fault, fault.__cause__ if fault else None)
        unreached = any(isinstance(e, _UNREACHED) for e in behind)
        why = "its server cannot be reached: " if unreached and local_path(url) is None else ""
        raise ShardError(f"{url} cannot be read: {why}{type(fault).__name__}: {fault}") from error


def _is_fault(cause: BaseException | None) -> bool:
    """Whether something else than an answer that there is no such file made for that error."""
    if isinstance(cause, (OSError, TypeError)):
        return not isinstance(cause, FileNotFoundError)
    return getattr(cause, "status", 404) not in (404, 410)
