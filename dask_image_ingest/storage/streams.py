"""Shards that are read as a whole: decompressed, or the output of a command.

Compression is gzip or Zstandard. A small file may decompress to any size: memory holds the first
bytes, a temporary file the rest. A command is a ``pipe:`` URL, as in webdataset.
"""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import dask
import pyarrow as pa

from dask_image_ingest.arguments import StorageOptions, check_flag
from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.storage.reader import ByteReader, MemoryReader
from dask_image_ingest.storage.shard import COMMAND


class SpillFile:
    """An unnamed temporary file, created on first write."""

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0

    def write(self, data: bytes | bytearray) -> int:
        """Append ``data`` and return its offset.

        Raises
        ------
        OSError
            If the disk is full.
        """
        if self._file is None:
            folder = dask.config.get("temporary-directory", None)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        start = self._end
        if not data.lstrip(b"\0"):
            # A hole takes no space: files that decompress to huge sizes are mostly zeros.
            self._end += len(data)
            os.ftruncate(self._file.fileno(), self._end)
            return start
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file.fileno(), view, self._end)
            view = view[written:]
            self._end += written
        return start

    def read(self, start: int, size: int) -> bytes:
        """Read bytes that were written."""
        parts = []
        while size > 0 and (part := os.pread(self._file.fileno(), size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()


# Most bytes of a decompressed shard in memory.
_IN_MEMORY = 256 << 20

# Bytes decompressed at once; a corrupt stream loses at most as many of the valid ones.
_STEP = 1 << 14


@contextmanager
def decompressed(stored: ByteReader, url: str) -> Iterator[ByteReader]:
    """Decompress a shard by its magic bytes; pass an uncompressed one through.

    Raises
    ------
    ShardError
        If the disk has no room for it. The message names ``url``.
    """
    name = _compression(bytes(stored[:4]))
    if name is None:
        yield stored
        return
    stream = _DecompressedReader(name, url)
    try:
        stream.fill(io.BytesIO(stored[:]))
        whole = stream.in_memory()
        yield MemoryReader(whole) if len(whole) == len(stream) and not stream.damage else stream
    finally:
        stream.close()


def _compression(magic: bytes) -> str | None:
    if magic.startswith(b"\x1f\x8b"):
        return "gzip"
    if magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        # The second is a skippable frame, with which parallel compressors begin.
        return "Zstandard"
    return None


class _DecompressedReader(ByteReader):
    """Reader of a decompressed shard: its first bytes in memory, the rest in a file."""

    def __init__(self, name: str, url: str) -> None:
        self._url = url
        self._name = name
        self._size = 0
        self._in_memory = bytearray()
        self._spilled = SpillFile()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._size)
        limit = len(self._in_memory)
        data = bytes(memoryview(self._in_memory)[start:stop])
        if stop <= limit:
            return data
        return data + self._spilled.read(max(start - limit, 0), stop - max(start, limit))

    def fill(self, stored: io.BytesIO) -> None:
        """Decompress the stream up to its end, or up to where it is corrupt (see `damage`)."""
        steps = _steps(self._name, stored)
        while True:
            try:
                step = next(steps, b"")
            except (EOFError, OSError, zlib.error) as error:
                self.damage = (
                    f"the {self._name} stream breaks off after {self._size} decompressed bytes "
                    f"({error})"
                )
                return
            if not step:
                return
            self._append(step)

    def in_memory(self) -> memoryview:
        return memoryview(self._in_memory).toreadonly()

    def close(self) -> None:
        self._spilled.close()

    def _append(self, step: bytes) -> None:
        room = _IN_MEMORY - len(self._in_memory)
        self._in_memory += step[:room]
        if room < len(step):
            try:
                self._spilled.write(step[room:])
            except OSError as error:
                raise ShardError(
                    f"{self._url} decompresses to more than {self._size:,} bytes, for which there "
                    f"is no room: {error}. Set temporary-directory in Dask's configuration to a "
                    "folder of a larger disk"
                ) from error
        self._size += len(step)


def _steps(name: str, stored: io.BytesIO) -> Iterator[bytes]:
    """Decompressed bytes, at most `_STEP` at a time."""
    if name == "gzip":
        return iter(partial(gzip.GzipFile(fileobj=stored).read1, _STEP), b"")
    stream = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    return iter(partial(stream.read, _STEP), b"")


# The storage option that allows commands: storage options get wherever shards are read.
_ALLOWED = "allow_pipes"

# Characters of a command's standard error that an error quotes.
_MOST_QUOTED = 1000

# Seconds between checks whether the command has ended though its output is open, or this process
# is about to end.
_POLL_EVERY = 2


def refuse_pipes(url: str, storage_options: dict[str, Any] | None) -> None:
    """Refuse a command unless the storage options allow commands.

    Raises
    ------
    ArgumentError
    """
    if (storage_options or {}).get(_ALLOWED) is not True:
        raise ArgumentError(
            f"{url!r} is a command, and this package runs commands only if allowed: give the path "
            "or URL that the command reads, or, if you trust the author of this list of paths, "
            "allow_pipes=True (elsewhere storage_options={'allow_pipes': True})"
        )


def with_pipes_allowed(
    storage_options: dict[str, Any] | None, allow: object
) -> dict[str, Any] | None:
    """The storage options plus the argument ``allow_pipes=``."""
    check_flag("allow_pipes", allow)
    allowed = {**(storage_options or {}), _ALLOWED: True}
    return StorageOptions(allowed) if allow else storage_options


def without_pipes_allowed(storage_options: dict[str, Any] | None) -> dict[str, Any]:
    """The storage options without ``allow_pipes``, for a file system."""
    return {k: v for k, v in (storage_options or {}).items() if k != _ALLOWED}


def run_pipe(url: str, storage_options: dict[str, Any] | None) -> bytes:
    """Run a command in the shell, without input, and return its standard output.

    Its process group is killed when this call ends, also by an exception.

    Raises
    ------
    ArgumentError
        If commands are not allowed.
    ShardError
        If its exit status is not 0, even after a whole shard.
    """
    refuse_pipes(url, storage_options)
    command = url.removeprefix(COMMAND)
    with subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            data, errors = _output(process)
        finally:
            _kill(process)
            process.wait()  # Popen's exit does not wait after a KeyboardInterrupt
    if process.returncode:
        status = process.returncode
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        quoted = errors.decode("utf-8", "replace").strip()[-_MOST_QUOTED:]
        raise ShardError(
            f"the command {command!r} has failed ({how}) after {len(data)} bytes; on standard "
            f"error it said: {quoted or 'nothing'}"
        )
    return data


def _output(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Wait for a command; its standard output and standard error.

    Waits for the command, not for the end of its output: a process that it leaves behind in another
    session, such as a persistent ssh connection, may hold the output open for ever.
    """
    while True:
        try:
            return process.communicate(timeout=_POLL_EVERY)
        except subprocess.TimeoutExpired:
            if process.poll() is None and not _is_ending():
                continue
        _kill(process)
        try:
            return process.communicate(timeout=_POLL_EVERY)
        except subprocess.TimeoutExpired as timeout:
            return timeout.output or b"", timeout.stderr or b""


def _is_ending() -> bool:
    """True if the interpreter is shutting down and waits for its threads, one of which is this.

    The command is killed then, else the shutdown would wait for it.
    """
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(int)
        except RuntimeError as error:
            return "shutdown" in str(error)  # other errors: no thread can be started
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a command, including what it left in the background."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
