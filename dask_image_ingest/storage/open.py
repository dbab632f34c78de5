"""Opening of a shard, now or on first access, and the reader of a local one."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Protocol

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.reader import (
    ByteReader,
    Memory,
    MemoryReader,
    Range,
    request_threads,
    translate_errors,
)
from dask_image_ingest.storage.remote_reader import open_remote
from dask_image_ingest.storage.shard import Shard, changed, is_pipe, local_path
from dask_image_ingest.storage.streams import decompressed, run_pipe

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
            self._size = status.st_size
            # Devices have other numbers on another day; inodes of two new disks are the same.
            self.file_id = f"{os.fstatvfs(self._descriptor).f_fsid:x}-{status.st_ino}"
            self._version = status.st_size, status.st_mtime_ns
            self.shard = Shard.of_file(path, status)
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
        ahead = self._ahead
        if stop <= start or (ahead and ahead.start <= start <= stop <= ahead.stop):
            return
        if (buffer := memory(stop - start)) is None:
            return
        self._end_ahead()
        self._ahead = ReadAhead(self._descriptor, start, memoryview(buffer)[: stop - start])

    def in_memory(self) -> memoryview:
        ahead = self._ahead
        return memoryview(b"") if ahead is None or ahead.start else ahead.ready

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


@contextmanager
def open_shard(
    url: str,
    storage_options: dict[str, Any] | None = None,
    listed: Shard | None = None,
    head_size: int | None = None,
) -> Iterator[ByteReader]:
    """Open a shard for :func:`~dask_image_ingest.tar.index_tar` and ``read_member``.

    Ranges are read, or fetched, when they are sliced. A shard whose first bytes are those of gzip
    or Zstandard is decompressed: into memory up to 256 MiB, the rest into a file in Dask's
    ``temporary-directory``. If the compressed stream is interrupted, the bytes end there, and
    `ByteReader.damage` says why. The output of a ``pipe:`` command is held in memory.

    Parameters
    ----------
    listed
        The shard as it was listed; it must not have changed since.
    head_size
        Bytes of a remote shard to fetch at once; few if only ranges of it will be read. None for
        the setting ``head``.

    Raises
    ------
    ArgumentError
        If it is a command, and commands are not allowed.
    ShardNotFoundError
        If there is no such shard (any more).
    ShardError
        If the shard cannot be read, now or while it is open; if it has changed since it was listed,
        or, on leaving the context, since it was opened.
    """
    with (
        open_file(url, storage_options, listed, head_size) as stored,
        decompressed(stored, url) as content,
    ):
        yield content


@contextmanager
def open_file(
    url: str,
    storage_options: dict[str, Any] | None = None,
    listed: Shard | None = None,
    head_size: int | None = None,
) -> Iterator[ByteReader]:
    """Open a file as `open_shard` does, but never decompress it."""
    if is_pipe(url):
        yield MemoryReader(memoryview(run_pipe(url, storage_options)))
        return
    path = local_path(url)
    if path is None:
        with open_remote(url, storage_options, listed, head_size) as content:
            yield content
        return
    with closing(LocalReader(path)) as file:
        if listed is not None and not file.is_version(listed):
            raise changed(listed, file.shard)
        yield file
        file.refuse_changes()


class OpeningCheck(Protocol):
    """Protocol of a check of a shard, as it is stored, that is made when it is opened.

    Attributes
    ----------
    is_due
        Whether it must be made even if the shard is not needed.
    ranges
        Bytes that it reads, beyond the first ones.
    """

    is_due: bool

    @property
    def ranges(self) -> list[Range]: ...

    def __call__(self, stored: ByteReader) -> None: ...


class LazyReader(ByteReader):
    """Reader that opens its shard on first access; the listed version must be there then.

    ``check`` is made first, and what it raises is raised by every access.
    """

    def __init__(
        self,
        shard: Shard,
        storage_options: dict[str, Any] | None,
        exit_stack: ExitStack,
        check: OpeningCheck | None = None,
    ) -> None:
        self.shard: Shard = shard
        self._storage_options = storage_options
        self._exit_stack = exit_stack
        self._check = check
        #: The reader of the open shard; None before the first access.
        self._opened: ByteReader | None = None
        #: What the check has raised.
        self._refused: Exception | None = None
        self._lock = threading.Lock()

    @property
    def content(self) -> ByteReader:
        """The reader of the open shard."""
        return self.open()

    def open(self, ranges: Sequence[Range] = (), gap: int | None = None) -> ByteReader:
        """Open the shard, if it is not. The bytes to check are requested together with ``ranges``.

        So the check of a remote shard takes no round trip of its own.
        """
        with self._lock:
            if self._refused is not None:
                raise self._refused
            if self._opened is None:
                enter, url = self._exit_stack.enter_context, self.shard.url
                stored = enter(open_file(url, self._storage_options, self.shard))
                try:
                    if self._check is not None:
                        if self._check.ranges:
                            stored.prefetch([*self._check.ranges, *ranges], gap)
                        self._check(stored)
                    self.file_id = stored.file_id
                except Exception as error:
                    self._refused = error
                    raise
                self._opened = enter(decompressed(stored, url))
            return self._opened

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        return self.content[part]

    def prefetch(self, ranges: Iterable[tuple[int, int]], gap: int | None = None) -> None:
        """Prefetch these ranges; the shard is not opened if there are none."""
        ranges = list(ranges)
        if ranges:
            self.open(ranges, gap).prefetch(ranges, gap)

    def prefetch_into(self, start: int, stop: int, memory: Memory) -> None:
        self.content.prefetch_into(start, stop, memory)


@contextmanager
def open_late(
    shard: Shard,
    storage_options: dict[str, Any] | None,
    check: OpeningCheck | None = None,
) -> Iterator[LazyReader]:
    """Open a shard lazily, on first access; the listed version must be there then.

    ``check`` may refuse it then. One that is due is made anyway: of a local shard at once, of a
    remote one on leaving the context, if nothing was read before.
    """
    with ExitStack() as exit_stack:
        reader = LazyReader(shard, storage_options, exit_stack, check)
        if check is not None and check.is_due and local_path(shard.url) is not None:
            reader.open()
        yield reader
        if check is not None and check.is_due:
            reader.open()
