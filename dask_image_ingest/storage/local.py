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

# Bytes that are read by one call: enough that calls cost nothing, few enough to begin at once.
_PIECE = 8 << 20
_THREADS = 2


class ReadAhead:
    """Bytes from ``start`` on, as many as ``buffer`` has.

    What can't be read is not there, and an error for whoever reads it by themselves.
    """

    def __init__(self, number: int, start: int, buffer: memoryview) -> None:
        self.start, self.stop = start, start + len(buffer)
        self._number = number
        self._buffer = buffer
        self._shown = buffer.toreadonly()
        self._ready = start
        threads = request_threads(_THREADS)
        self._pieces: list[Future[bool]] = [
            threads.submit(self._read, at) for at in range(0, len(buffer), _PIECE)
        ]

    def part(self, start: int, stop: int) -> memoryview | None:
        """The bytes of a range, once they have been read; None if they are not among these."""
        if start < self.start or stop > self.stop or (stop > self._ready and not self._wait(stop)):
            return None
        return self._shown[start - self.start : stop - self.start]

    @property
    def ready(self) -> memoryview:
        """The bytes that were waited for so far."""
        return self._shown[: self._ready - self.start]

    def close(self) -> None:
        """Stop the threads."""
        wait([piece for piece in self._pieces if not piece.cancel()])

    def _wait(self, stop: int) -> bool:
        while self._ready < stop:
            at = self._ready - self.start
            number = at // _PIECE
            if self._pieces[number].cancel():
                # Where all threads are busy, whoever waits reads it.
                done: Future[bool] = Future()
                done.set_result(self._read(number * _PIECE))
                self._pieces[number] = done
            if not self._pieces[number].result():
                return False
            self._ready = min(self.start + (number + 1) * _PIECE, self.stop)
        return True

    def _read(self, at: int) -> bool:
        room: Any = self._buffer[at : at + _PIECE]
        try:
            while len(room):
                count = os.preadv(self._number, [room], self.start + at)
                if not count:
                    return False
                room, at = room[count:], at + count
        except OSError:
            return False
        return True


class LocalReader(ByteReader):
    """Reader of a local shard, by reads: a mapped file that is cut short would kill the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ahead: ReadAhead | None = None
        self._file = translate_errors(path, open, path, "rb", buffering=0, opener=_without_waiting)
        self._number = self._file.fileno()
        try:
            refuse_special(path, os.fstat(self._number).st_mode)
            self._size = translate_errors(path, self._file.seek, 0, os.SEEK_END)
            self._version = size, changed_at = self._state()
            self.shard = Shard(path, size, str(changed_at))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes | memoryview:
        # Called for every header of every member, so with few calls of its own.
        start, stop, _ = part.indices(self._size)
        if start >= stop:
            return b""
        if self._ahead is not None and (ready := self._ahead.part(start, stop)) is not None:
            return ready
        try:
            data = os.pread(self._number, stop - start, start)
        except OSError as error:
            raise ShardError(f"{self._path} cannot be read: {error}") from error
        return data if len(data) == stop - start else self._rest(data, start, stop)

    def prefetch_into(self, start: int, stop: int, memory: Memory) -> None:
        """Read a range by other threads; the last one replaces the one before."""
        if stop <= start or self.has_ahead(start, stop) or (buffer := memory(stop - start)) is None:
            return
        self._end_ahead()
        self._ahead = ReadAhead(self._number, start, memoryview(buffer)[: stop - start])

    def in_memory(self) -> memoryview:
        ahead = self._ahead
        return memoryview(b"") if ahead is None or ahead.start else ahead.ready

    def has_ahead(self, start: int, stop: int) -> bool:
        """True if a range is read by other threads."""
        return self._ahead is not None and self._ahead.start <= start <= stop <= self._ahead.stop

    def close(self) -> None:
        """Close the file, whose number another one may get."""
        self._end_ahead()
        self._number = -1
        self._file.close()

    def is_version(self, listed: Shard) -> bool:
        """True for the version that was listed."""
        return self._version == (listed.size, int(listed.version))

    def refuse_changes(self) -> None:
        """Raise if what was read may be of two versions.

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
        found = translate_errors(self._path, os.fstat, self._number)
        return found.st_size, found.st_mtime_ns

    def _rest(self, data: bytes, start: int, stop: int) -> bytes:
        """The rest of a read, of which one call gives 2 GiB at most."""
        parts, at = [data], start + len(data)
        while at < stop:
            parts.append(translate_errors(self._path, os.pread, self._number, stop - at, at))
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


def _without_waiting(path: str, flags: int) -> int:
    # Whoever opens a named pipe waits for its writer otherwise.
    return os.open(path, flags | os.O_NONBLOCK)
