"""Reader of a local shard."""

from __future__ import annotations

import os
import stat
from concurrent.futures import Future, wait
from typing import Any

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.fsspec_compat import translate_errors
from dask_image_ingest.storage.reader import ByteReader, Memory
from dask_image_ingest.storage.remote.fetch import request_threads
from dask_image_ingest.storage.shard import Shard

# Bytes of one system call: large enough to make its cost negligible, small enough that the first
# bytes are there soon.
_PIECE = 8 << 20
_THREADS = 2


class ReadAhead:
    """Background read of a range of a file into a buffer, in order.

    Bytes that can't be read are treated as not here: an ordinary read of them raises the error.
    """

    def __init__(self, descriptor: int, start: int, buffer: memoryview) -> None:
        self.start, self.stop = start, start + len(buffer)
        self._descriptor = descriptor
        self._buffer = buffer
        self._view = buffer.toreadonly()
        #: All bytes up to this position of the file were read and waited for.
        self._ready = start
        threads = request_threads(_THREADS)
        #: For each piece of the buffer, whether it could be read.
        self._pieces: list[Future[bool]] = [
            threads.submit(self._read, at) for at in range(0, len(buffer), _PIECE)
        ]

    def part(self, start: int, stop: int) -> memoryview | None:
        """Wait for the bytes of a range; None if they are not in the buffer or can't be read."""
        if start < self.start or stop > self.stop or (stop > self._ready and not self._wait(stop)):
            return None
        return self._view[start - self.start : stop - self.start]

    @property
    def ready(self) -> memoryview:
        """The bytes that were waited for so far, from the start on."""
        return self._view[: self._ready - self.start]

    def close(self) -> None:
        """Cancel pending pieces and wait for the running ones."""
        wait([piece for piece in self._pieces if not piece.cancel()])

    def _wait(self, stop: int) -> bool:
        while self._ready < stop:
            number = (self._ready - self.start) // _PIECE
            if self._pieces[number].cancel():
                # Not begun since all threads are busy: read it in this thread.
                done: Future[bool] = Future()
                done.set_result(self._read(number * _PIECE))
                self._pieces[number] = done
            if not self._pieces[number].result():
                return False
            self._ready = min(self.start + (number + 1) * _PIECE, self.stop)
        return True

    def _read(self, at: int) -> bool:
        """Read one piece, which begins at this position of the buffer; False if that fails."""
        unread: Any = self._buffer[at : at + _PIECE]
        try:
            while len(unread):
                count = os.preadv(self._descriptor, [unread], self.start + at)
                if not count:
                    return False
                unread, at = unread[count:], at + count
        except OSError:
            return False
        return True


class LocalReader(ByteReader):
    """Reader of a local shard. No memory map: one of a truncated file kills the process."""

    shard: Shard

    def __init__(self, path: str) -> None:
        self._path = path
        self._ahead: ReadAhead | None = None
        self._file = translate_errors(path, open, path, "rb", buffering=0, opener=_open_nonblocking)
        self._descriptor = self._file.fileno()
        try:
            status = translate_errors(path, os.fstat, self._descriptor)
            refuse_special(path, status.st_mode)
            self._size = translate_errors(path, self._file.seek, 0, os.SEEK_END)
            self._version = size, modified_ns = self._state()
            self.shard = Shard(path, size, str(modified_ns))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes | memoryview:
        # A hot path: called for every header.
        start, stop, _ = part.indices(self._size)
        if start >= stop:
            return b""
        if self._ahead is not None and (ready := self._ahead.part(start, stop)) is not None:
            return ready
        try:
            data = os.pread(self._descriptor, stop - start, start)
        except OSError as error:
            raise ShardError(f"{self._path} cannot be read: {error}") from error
        return data if len(data) == stop - start else self._read_on(data, start, stop)

    def prefetch_into(self, start: int, stop: int, memory: Memory) -> None:
        """Read a range in background threads; replaces the range of an earlier call."""
        if stop <= start or self.has_ahead(start, stop) or (buffer := memory(stop - start)) is None:
            return
        self._end_ahead()
        self._ahead = ReadAhead(self._descriptor, start, memoryview(buffer)[: stop - start])

    def in_memory(self) -> memoryview:
        ahead = self._ahead
        return memoryview(b"") if ahead is None or ahead.start else ahead.ready

    def has_ahead(self, start: int, stop: int) -> bool:
        """True if a range is covered by the background read."""
        return self._ahead is not None and self._ahead.start <= start <= stop <= self._ahead.stop

    def close(self) -> None:
        """Close the file."""
        self._end_ahead()
        self._descriptor = -1  # another file may get this number
        self._file.close()

    def is_version(self, listed: Shard) -> bool:
        """True if this is the listed version."""
        return (self.shard.size, self.shard.version) == (listed.size, listed.version)

    def refuse_changes(self) -> None:
        """Raise if the file has changed since it was opened.

        Raises
        ------
        ShardError
        """
        if self._state() != self._version:
            raise ShardError(
                f"{self._path} has changed while it was read, and what was read may be of two "
                "versions. Read it again when it is complete"
            )

    def _end_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _state(self) -> tuple[int, int]:
        """Size and modification time in nanoseconds."""
        status = translate_errors(self._path, os.fstat, self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _read_on(self, data: bytes, start: int, stop: int) -> bytes:
        """Complete a short read: one call returns at most 2 GiB."""
        parts, at = [data], start + len(data)
        while at < stop:
            parts.append(translate_errors(self._path, os.pread, self._descriptor, stop - at, at))
            at += len(parts[-1])
            if not parts[-1]:
                raise ShardError(
                    f"{self._path} has changed while it was read: it had {self._size} bytes, and "
                    f"no more than {at} are left. Read it again when it is complete"
                )
        return b"".join(parts)


def refuse_special(path: str, mode: int) -> None:
    """Refuse special files, whose bytes may never come.

    Raises
    ------
    ShardError
    """
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ShardError(
            f"{path} is {kind}, and only regular files are shards: save what it gives to a file, "
            "or run the command that writes it (pipe:, with allow_pipes=True)"
        )


def _open_nonblocking(path: str, flags: int) -> int:
    # Otherwise opening a named pipe blocks until it has a writer.
    return os.open(path, flags | os.O_NONBLOCK)
