"""Journal of ``map_rows`` in a checkpoint: rows that a run after a kill need not ask for."""

from __future__ import annotations

import base64
import contextlib
import functools
import time
import uuid
import zlib
from collections.abc import Iterator
from contextvars import ContextVar

import pyarrow as pa

from dask_image_ingest.storage.output import (
    STAGING,
    OutputStore,
    refuse_ended_run,
    refuse_other_run,
)

# Seconds between files of a journal in an object store, where a file cannot be appended to.
_WRITTEN_EVERY = 5.0

_SUFFIX = ".rows"


class RowJournal:
    """Results of single rows of a partition, in files of the staging folder.

    On a local file system each is appended to one file when it is there. In an object store those
    of some seconds are a file. A line is a row: its key, its outputs as an Arrow message, and a
    checksum. Lines that a kill has cut are skipped. The key is a digest of the function's name and
    arguments; the files belong to one query and partition.
    """

    def __init__(self, output: OutputStore, name: str, run: str) -> None:
        self._output = output
        self._name = name
        self._run = run
        self._pending: list[bytes] = []
        self._written_at = time.monotonic()

    def _files(self) -> list[str]:
        files = self._output.sizes(STAGING)
        return [f"{STAGING}/{file}" for file in files if journal_owner(file) == self._name]

    @functools.cached_property
    def _stored(self) -> dict[str, bytes]:
        """Key → message."""
        stored = {}
        contents = (self._output.read(file) or b"" for file in self._files())
        for line in b"\n".join(contents).split(b"\n"):
            key, _, rest = line.partition(b" ")
            message, _, checksum = rest.partition(b" ")
            with contextlib.suppress(ValueError):
                if zlib.crc32(message) == int(checksum, 16):
                    stored[key.decode()] = base64.b64decode(message, validate=True)
        return stored

    def read(self, key: str, schema: pa.Schema) -> pa.RecordBatch | None:
        """The stored outputs of a row; None if there are none."""
        message = self._stored.get(key)
        if message is None:
            return None
        return pa.ipc.read_record_batch(pa.py_buffer(message), schema)

    def add(self, key: str, outputs: pa.RecordBatch) -> bytes:
        """Add the outputs of a row; returns the lines to `write` now, which are given once."""
        message = base64.b64encode(outputs.serialize())
        # The newline comes first, since a kill may have cut the line before.
        self._pending.append(b"\n%s %s %08x" % (key.encode(), message, zlib.crc32(message)))
        waited = time.monotonic() - self._written_at
        return self.pending() if self._output.can_append or waited >= _WRITTEN_EVERY else b""

    def pending(self) -> bytes:
        """The lines that are not written; they are given once."""
        lines, self._pending = self._pending, []
        self._written_at = time.monotonic()
        return b"".join(lines)

    def write(self, lines: bytes) -> None:
        """Write lines: they survive a kill of the process.

        Raises
        ------
        ExportError
            If another run writes, or this one was stopped; also without lines.
        """
        refuse_other_run(self._output, self._run)
        if lines and self._output.can_append:
            self._output.append(f"{STAGING}/{self._name}{_SUFFIX}", lines)
        elif lines:
            self._output.put(f"{STAGING}/{self._name}.{uuid.uuid4().hex}{_SUFFIX}", lines)
        refuse_ended_run(self._output, self._run)

    def remove(self) -> None:
        """Remove the files: the partition is stored."""
        if "_stored" in vars(self):
            self._output.remove(self._files())


def journal_owner(file: str) -> str | None:
    """The name of the partition that a journal belongs to; None for another file."""
    if not file.endswith(_SUFFIX):
        return None
    name, dot, _ = file.removesuffix(_SUFFIX).partition(".parquet")
    return name + dot


#: The journal of the partition that this task computes.
current_journal: ContextVar[RowJournal | None] = ContextVar("journal", default=None)


@contextlib.contextmanager
def journaled(output: OutputStore, name: str, run: str) -> Iterator[None]:
    """Keep the results of ``map_rows`` in this thread, until the context ends without an error."""
    journal = RowJournal(output, name, run)
    token = current_journal.set(journal)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            journal.write(journal.pending())
        raise
    finally:
        current_journal.reset(token)
    journal.remove()
