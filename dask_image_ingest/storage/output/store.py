"""Protocol of output folders: files appear complete, or not at all.

`LocalStore` and `RemoteStore` implement it. Stores are pickled to workers.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from typing import Any, Protocol

import pyarrow as pa

from dask_image_ingest.errors import DaskImageIngestError, ExportError
from dask_image_ingest.texts import error_text

#: Subfolder for unfinished files, which readers of shards skip.
STAGING = "_staging"


#: Raises if the caller must not write any more.
Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class WriteAdvice:
    """Advice in errors of writing: how to retry, and what to do if a folder is read-only."""

    retry_hint: str
    elsewhere: str = "choose another folder"


EXPORT_ADVICE = WriteAdvice("run it again, to_webdataset() with resume=True")
CHECKPOINT_ADVICE = WriteAdvice("run it again, checkpoint() goes on where it stopped")
PARQUET_ADVICE = WriteAdvice("run it again, to_parquet_images() with overwrite=True")
HASHES_ADVICE = WriteAdvice("run it again")
INDEX_ADVICE = WriteAdvice(
    "run it again, write_index() goes on where it stopped",
    "pass folder= to have the indexes elsewhere",
)

PAGE_ADVICE = WriteAdvice("write the page again", "choose another folder for the page")


class OutputStore(Protocol):
    """An output folder. Names of files are relative paths, with slashes."""

    @property
    def advice(self) -> WriteAdvice:
        """Advice for errors."""

    @property
    def url(self) -> str:
        """Path or URL of the folder."""

    def locate(self, name: str) -> str:
        """The path or URL of a file in it."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file atomically unless it exists; True if it was written."""

    def put(self, name: str, content: bytes, check: Check | None = None) -> None:
        """Write a small file atomically; replaces an existing one."""

    @property
    def can_append(self) -> bool:
        """True if files can be appended to."""

    def append(self, name: str, content: bytes) -> None:
        """Append to a file, which is created if there is none; survives a kill of the process."""

    def scratch(self, name: str = "") -> AbstractContextManager[BufferedRandom]:
        """A temporary file for a file of this name, deleted on exit unless committed."""

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        """Move a complete scratch file to its final name; calls ``check`` right before."""

    def move(self, name: str, to: str) -> None:
        """Give a file another name; replaces an existing one."""

    def fsync(self) -> None:
        """Make committed files durable: they survive a crash of the machine."""

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None if it does not exist."""

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for random access."""

    def size(self, name: str) -> int | None:
        """Size of a file; None if it does not exist."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Name → size of the files in it, or in a subfolder."""

    def names(self) -> list[str]:
        """All files in it and below, but for unfinished ones; links, not where they lead."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""

    def remove_staging(self) -> None:
        """Remove the folder of unfinished files."""

    def remove_empty_staging(self) -> None:
        """Remove the folder of unfinished files, unless another process is writing there."""


def parsed(content: bytes | None) -> dict[str, Any]:
    """A small file's JSON object; empty if there is no file, or anything else in it."""
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def translate_write_errors(
    where: str, advice: WriteAdvice, anything: bool = False, done: str = "written"
) -> Iterator[None]:
    """Translate errors of an output folder into `ExportError` with advice.

    Parameters
    ----------
    where
        The file or folder, for the message.
    advice
        How to go on, for the message.
    anything
        Translate every exception, not only ``OSError``: remote file systems have their own.
    done
        What cannot be done with the file or folder, for the message.

    Raises
    ------
    ExportError
    """
    try:
        yield
    except (DaskImageIngestError, MemoryError):
        raise
    except OSError as error:
        raise ExportError(f"{where} cannot be {done}: {_advice(error, advice)}") from error
    except Exception as error:
        if not anything:
            raise
        raise ExportError(
            f"{where} cannot be {done}: {error_text(error)}. {_how_to_resume(advice)}"
        ) from error


def _advice(error: OSError, advice: WriteAdvice) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{reason}. What is finished stays; make room, and {advice.retry_hint}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        elsewhere = advice.elsewhere[0].upper() + advice.elsewhere[1:]
        return f"{reason}. {elsewhere}, or get the right to write to this one"
    return f"{reason}. {_how_to_resume(advice)}"


def _how_to_resume(advice: WriteAdvice) -> str:
    return f"What is finished stays; once the cause is gone, {advice.retry_hint}"
