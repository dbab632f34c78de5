"""Protocol of output folders: each name in one is a complete file, or does not exist.

`LocalStore` and `RemoteStore` implement it. Stores are pickled to workers.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from typing import Protocol

import pyarrow as pa

from dask_image_ingest.errors import DaskImageIngestError, ExportError

#: Subfolder for unfinished files, which readers of shards skip.
STAGING = "_staging"


Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class WriteAdvice:
    """Advice for the user in errors of writing."""

    retry_hint: str
    elsewhere: str = "choose another folder"


EXPORT_ADVICE = WriteAdvice("run it again, to_webdataset() with resume=True")
CHECKPOINT_ADVICE = WriteAdvice("run it again, checkpoint() goes on where it stopped")
INDEX_ADVICE = WriteAdvice(
    "run it again, write_index() goes on where it stopped",
    "pass folder= to have the indexes elsewhere",
)


class OutputStore(Protocol):
    """An output folder. Names in it are relative, with slashes."""

    @property
    def advice(self) -> WriteAdvice:
        """Advice for errors."""

    @property
    def url(self) -> str:
        """Path or URL of the folder."""

    def locate(self, name: str) -> str:
        """The path or URL of a file in it."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file, whole, unless there is one; say whether there was none."""

    def put(self, name: str, content: bytes, check: Check | None = None) -> None:
        """Write a small file, whole, in the place of any that there is."""

    def scratch(self) -> AbstractContextManager[BufferedRandom]:
        """A file to write to and to read again, gone in the end unless committed."""

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        """Rename a complete scratch file to its final name.

        ``check`` is called right before, and raises if it must not.
        """

    def fsync(self) -> None:
        """Make committed files durable: they outlive a crash of the machine."""

    def read(self, name: str) -> bytes | None:
        """A small file, None if there is none."""

    def open(self, name: str) -> pa.NativeFile:
        """A file to read parts of."""

    def size(self, name: str) -> int | None:
        """Size of a file; None if there is none."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The files in it, or in a folder of it, and their sizes."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there don't matter."""

    def remove_staging(self) -> None:
        """Remove what is not finished."""

    def remove_empty_staging(self) -> None:
        """Remove the folder for what is not finished, if nothing is in it."""


@contextmanager
def translate_write_errors(
    where: str, advice: WriteAdvice, anything: bool = False
) -> Iterator[None]:
    """Translate errors of writing into `ExportError` with advice.

    Parameters
    ----------
    where
        What could not be written.
    advice
        The advice of these errors.
    anything
        Translate every exception: each remote file system has some of its own.

    Raises
    ------
    ExportError
    """
    try:
        yield
    except (DaskImageIngestError, MemoryError):
        raise
    except OSError as error:
        raise ExportError(f"{where} cannot be written: {_advice(error, advice)}") from error
    except Exception as error:
        if not anything:
            raise
        raise ExportError(
            f"{where} cannot be written: {type(error).__name__}: {error}. {_go_on(advice)}"
        ) from error


def _advice(error: OSError, advice: WriteAdvice) -> str:
    said = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{said}. What is finished stays; make room, and {advice.retry_hint}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        elsewhere = advice.elsewhere[0].upper() + advice.elsewhere[1:]
        return f"{said}. {elsewhere}, or get the right to write to this one"
    return f"{said}. {_go_on(advice)}"


def _go_on(advice: WriteAdvice) -> str:
    return f"What is finished stays; once the cause is gone, {advice.retry_hint}"
