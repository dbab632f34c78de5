"""Memory for pixels: a pool of large blocks, shared with other processes where possible.

A shared block is a memfd, which another process opens through ``/proc/<pid>/fd``. Random bytes at
its end, the seal, change with the content: with the wrong seal, the block is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dask_image_ingest.client import worker_memory

_SEAL_BYTES = 16

# Don't keep a file open per mapping: a client with many partitions may have 128 per worker.
_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Linux 5.14: map all pages at once, instead of by a fault each.
_MADV_POPULATE_READ = 22


class SharedBlock(mmap.mmap):
    """Memory of this process that others can map if they know its file and its seal.

    Attributes
    ----------
    file : int
        File descriptor in this process.
    seal : bytes
        Identifies the current content; changes with each `claim`.
    in_fork : bool
        A fork of this process may read the content, so the block must not be reused.
    """

    file: int
    seal: bytes
    in_fork: bool
    _process: int

    def __new__(cls, nbytes: int) -> SharedBlock:
        """Allocate a block."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this Python has no os.memfd_create")
        file = os.memfd_create("pixels")
        try:
            # The seal is in the file behind the mapped part.
            os.ftruncate(file, nbytes + _SEAL_BYTES)
            block = super().__new__(cls, file, nbytes)
        except BaseException:
            os.close(file)
            raise
        weakref.finalize(block, os.close, file).atexit = False
        block.file = file
        block.in_fork = False
        block._process = os.getpid()
        if not block.claim():
            raise OSError("a memfd can't be locked here")
        return block

    def claim(self) -> bool:
        """Reuse the block for new content; False if another process still maps the old one."""
        # A fork has this memory too, but only the process that allocated it may reuse it.
        if self.in_fork or self._process != os.getpid():
            return False
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # From now on the old seal is refused.
            self.seal = os.urandom(_SEAL_BYTES)
            os.pwrite(self.file, self.seal, len(self))
            fcntl.flock(self.file, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def lend(self) -> int:
        """A descriptor to send, and to close: `claim` fails while it is open or mapped anywhere."""
        # Opened again: the lock belongs to this opening and its copies, the last of which ends it.
        file = os.open(f"/proc/self/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file


def map_block(process: int, file: int, nbytes: int, seal: bytes) -> np.ndarray:
    """Map the first bytes of another process's block: read-only, until the last view is gone.

    Raises
    ------
    OSError
        If the block has other content by now, or can't be reached.
    """
    # Non-blocking, as the descriptor may belong to a pipe by now.
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        size = os.fstat(opened).st_size
        end = size - _SEAL_BYTES
        if end < nbytes or os.pread(opened, _SEAL_BYTES, end) != seal:
            raise FileNotFoundError(f"process {process} has released these pixels")
        # Copy on write, for those who write through a tensor in spite of the read-only flag.
        mapped = mmap.mmap(opened, nbytes, access=mmap.ACCESS_COPY, **_NO_DESCRIPTOR)
    finally:
        # The mapping keeps the shared lock; before Python 3.13 it also has its own descriptor.
        os.close(opened)
    with contextlib.suppress(OSError):
        mapped.madvise(_MADV_POPULATE_READ)
    array = np.frombuffer(mapped, np.uint8)
    array.flags.writeable = False
    return array


@functools.cache
def this_machine() -> str:
    """Id shared by processes that see each other in the same ``/proc``; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


#: Seconds after which unused memory is released.
KEPT_SECONDS = 10.0

# Blocks are larger than requested, as partitions differ slightly in size; pages that are never
# written to cost nothing. A block is reused only if the request fills at least this share of it.
_OVERALLOCATION = 1.125
_MIN_USE = 0.6

#: Smallest block that is mapped by other processes; smaller ones are sent.
MIN_SHARED_BYTES = 1 << 20

# Most shared blocks, each with two open files: a worker may persist thousands of partitions.
_MAX_SHARED_BLOCKS = 128

# Share of a worker's memory that may be kept unused.
_KEPT_SHARE = 1 / 8


class PixelMemory:
    """Pool of memory blocks, each of which returns when the last array over it is gone."""

    def __init__(self) -> None:
        self._unused: list[tuple[float, mmap.mmap]] = []  # with the time of their return
        # Shared blocks by address.
        self._shared: weakref.WeakValueDictionary[int, SharedBlock] = weakref.WeakValueDictionary()
        # Reentrant, as the garbage collector may return a block inside any of these methods.
        self._lock = threading.RLock()
        # Thread that releases unused blocks; ends when there are none.
        self._releaser: threading.Thread | None = None

    def take(self, nbytes: int, keep: int | None = None) -> np.ndarray:
        """Uninitialized uint8 array of at least ``nbytes``.

        When the array and its views are gone, its memory is kept for reuse, unless more than
        ``keep`` bytes would then be unused in all (default: an eighth of a worker's memory).
        """
        keep = int(worker_memory() * _KEPT_SHARE) if keep is None else keep
        block = self._reuse(nbytes) or self._allocate(int(nbytes * _OVERALLOCATION) + 1)
        array = np.frombuffer(block, np.uint8)
        weakref.finalize(array, self._give_back, block, keep).atexit = False
        return array

    def shared_block(self, address: int) -> SharedBlock | None:
        """Shared block that begins at this address; None if there is none."""
        return self._shared.get(address)

    @property
    def unused(self) -> int:
        """Bytes that are kept for reuse."""
        with self._lock:
            return sum(len(block) for _, block in self._unused)

    def release(self, seconds: float = 0) -> None:
        """Free blocks that have been unused for so many seconds."""
        with self._lock:
            limit = time.monotonic() - seconds
            self._unused = [(since, block) for since, block in self._unused if since > limit]

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        """The smallest unused block that fits and is not much too large; None if there is none."""
        with self._lock:
            candidates = [
                (len(block), position)
                for position, (_, block) in enumerate(self._unused)
                if len(block) * _MIN_USE <= nbytes <= len(block)
            ]
            for _, position in sorted(candidates):
                block = self._unused[position][1]
                if not isinstance(block, SharedBlock) or block.claim():
                    del self._unused[position]
                    return block
            return None

    def _allocate(self, nbytes: int) -> mmap.mmap:
        if nbytes > MIN_SHARED_BYTES and len(self._shared) < _MAX_SHARED_BLOCKS:
            try:
                block = SharedBlock(nbytes)
            except OSError:
                pass
            else:
                with self._lock:
                    self._shared[np.frombuffer(block, np.uint8).ctypes.data] = block
                return block
        return mmap.mmap(-1, nbytes, flags=_FLAGS)

    def _give_back(self, block: mmap.mmap, keep: int) -> None:
        with self._lock:
            if self.unused + len(block) > keep:
                return
            self._unused.append((time.monotonic(), block))
            # Not by _releaser alone: an interrupt may have kept it from being started.
            if self._releaser is not None and self._releaser.is_alive():
                return
            releaser = threading.Thread(target=self._release_in_time, daemon=True)
            self._releaser = releaser
        # Without the lock: the new thread may run the garbage collector first, and come here.
        with suppress(RuntimeError):  # no new threads at the end of a process
            releaser.start()

    def forking(self) -> None:
        """Before a fork: lock the pool."""
        self._lock.acquire()

    def forked(self) -> None:
        """After a fork, in the parent: never reuse used shared blocks, which the fork may read."""
        try:
            unused = {id(block) for _, block in self._unused}
            for block in list(self._shared.values()):
                block.in_fork |= id(block) not in unused
        finally:
            self._lock.release()

    def begin_in_fork(self) -> None:
        """After a fork, in the child: start empty, with a new lock and no thread."""
        self._lock = threading.RLock()
        self._unused = []
        self._releaser = None

    def _release_in_time(self) -> None:
        while True:
            time.sleep(KEPT_SECONDS / 2)
            with self._lock:
                self.release(KEPT_SECONDS)
                if not self._unused:
                    self._releaser = None
                    return


#: The pool of this process.
pixel_memory = PixelMemory()
os.register_at_fork(
    before=pixel_memory.forking,
    after_in_parent=pixel_memory.forked,
    after_in_child=pixel_memory.begin_in_fork,
)

# Plain pages. NumPy requests huge pages for large arrays, which are slow to get if free memory is
# fragmented, or in a virtual machine.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
