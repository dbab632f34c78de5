"""Memory of pixels: a pool of large blocks, some of them shared with other processes."""

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

_SEAL = 16

# Else a client that keeps many partitions has an open file for each, 128 of a worker at most.
_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Linux 5.14. All pages at once, where each would cost a fault.
_MADV_POPULATE_READ = 22


class SharedBlock(mmap.mmap):
    """Memory of this process that others can map who know its file and its seal.

    Attributes
    ----------
    file : int
        The number of its file among those that this process has open.
    seal : bytes
        What tells its present use from any other.
    in_fork : bool
        Whether a fork of this process may look at what it holds, so that it has no other use.
    """

    file: int
    seal: bytes
    in_fork: bool
    _process: int

    def __new__(cls, nbytes: int) -> SharedBlock:
        """Memory of so many bytes.

        Raises
        ------
        OSError
            Where the system has no such memory, or no more of it.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this Python knows no files in memory")
        file = os.memfd_create("pixels")
        try:
            # The seal lies behind what is mapped.
            os.ftruncate(file, nbytes + _SEAL)
            block = super().__new__(cls, file, nbytes)
        except BaseException:
            os.close(file)
            raise
        weakref.finalize(block, os.close, file).atexit = False
        block.file = file
        block.in_fork = False
        block._process = os.getpid()
        if not block.claim():
            raise OSError("files in memory can't be locked here")
        return block

    def claim(self) -> bool:
        """Begin another use, unless a process still maps what the last one left here."""
        # A fork has this memory too, and it is the first process that gives it away.
        if self.in_fork or self._process != os.getpid():
            return False
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody who knows the old seal gets in after this.
            self.seal = os.urandom(_SEAL)
            os.pwrite(self.file, self.seal, len(self))
            fcntl.flock(self.file, fcntl.LOCK_UN)
        except OSError:
            return False
        return True


def map_block(process: int, file: int, nbytes: int, seal: bytes) -> np.ndarray:
    """The first bytes of another process's block, for as long as the array or a view of it lives.

    Raises
    ------
    OSError
        If the block is in another use by now, or can't be reached.
    """
    # Without waiting: by now the number may be that of a pipe.
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        size = os.fstat(opened).st_size
        if size < nbytes + _SEAL or os.pread(opened, _SEAL, size - _SEAL) != seal:
            raise FileNotFoundError(f"process {process} has let go of these pixels")
        # Whoever writes to it all the same, as by a tensor, writes to a copy of their own.
        mapped = mmap.mmap(opened, nbytes, access=mmap.ACCESS_COPY, **_NO_DESCRIPTOR)
    finally:
        # The lock is the mapping's as well, which before Python 3.13 also has a descriptor.
        os.close(opened)
    with contextlib.suppress(OSError):
        mapped.madvise(_MADV_POPULATE_READ)
    array = np.frombuffer(mapped, np.uint8)
    array.flags.writeable = False
    return array


@functools.cache
def this_machine() -> str:
    """Identity shared by processes that find each other in ``/proc``; None without one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


#: Seconds for which unused memory is kept.
KEPT_SECONDS = 10.0

# Memory is reserved with some room, since partitions are of about one size and not of the same, and
# may serve one that needs less. What is reserved and never written to costs nothing.
_ROOM = 1.125
_LEAST_USE = 0.6

#: Bytes of a block that is worth mapping; smaller ones are sent.
LEAST_SHARED = 1 << 20

# Blocks that others can map, two open files each; those that are persisted may be thousands.
_SHARED_BLOCKS = 128


class PixelMemory:
    """Blocks of memory of this process that come back when the last array over them is gone."""

    def __init__(self) -> None:
        self._unused: list[tuple[float, mmap.mmap]] = []
        self._sharing = False
        self._shared: weakref.WeakValueDictionary[int, SharedBlock] = weakref.WeakValueDictionary()
        # The garbage collector may give a block back in the middle of any of these methods.
        self._lock = threading.RLock()
        self._releaser: threading.Thread | None = None

    def take(self, nbytes: int, keep: int) -> np.ndarray:
        """An array of ``nbytes`` at least, of any content.

        When nothing refers to the array or to a view of it any more, its memory is kept for another
        one, if no more than ``keep`` bytes are then kept in all.
        """
        block = self._reuse(nbytes) or self._new(int(nbytes * _ROOM) + 1)
        array = np.frombuffer(block, np.uint8)
        weakref.finalize(array, self._give_back, block, keep).atexit = False
        return array

    def share(self) -> None:
        """Have other processes map the memory of the arrays that are taken from now on."""
        with self._lock:
            if not self._sharing:
                self._sharing = True
                self.release()

    def shared_block(self, address: int) -> SharedBlock | None:
        """The block that begins at this address, if others can map it."""
        return self._shared.get(address)

    @property
    def unused(self) -> int:
        """Bytes that are kept for the next array."""
        with self._lock:
            return sum(len(block) for _, block in self._unused)

    def release(self, seconds: float = 0) -> None:
        """Give the system what was not used for so many seconds."""
        with self._lock:
            before = time.monotonic() - seconds
            self._unused = [(since, block) for since, block in self._unused if since > before]

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        """The smallest block that fits; one that is much larger would be wasted on the array."""
        with self._lock:
            fitting = [
                (len(block), place)
                for place, (_, block) in enumerate(self._unused)
                if len(block) * _LEAST_USE <= nbytes <= len(block)
            ]
            for _, place in sorted(fitting):
                block = self._unused[place][1]
                if not isinstance(block, SharedBlock) or block.claim():
                    del self._unused[place]
                    return block
            return None

    def _new(self, nbytes: int) -> mmap.mmap:
        if self._may_share(nbytes):
            try:
                block = SharedBlock(nbytes)
            except OSError:
                pass
            else:
                with self._lock:
                    self._shared[np.frombuffer(block, np.uint8).ctypes.data] = block
                return block
        return mmap.mmap(-1, nbytes, flags=_FLAGS)

    def _may_share(self, nbytes: int) -> bool:
        return self._sharing and nbytes > LEAST_SHARED and len(self._shared) < _SHARED_BLOCKS

    def _give_back(self, block: mmap.mmap, keep: int) -> None:
        with self._lock:
            if self.unused + len(block) > keep:
                return
            if self._may_share(len(block)) and not isinstance(block, SharedBlock):
                return
            self._unused.append((time.monotonic(), block))
            # Judged by the thread itself: whoever was to start it may have been interrupted.
            if self._releaser is not None and self._releaser.is_alive():
                return
            releaser = threading.Thread(target=self._release_in_time, daemon=True)
            self._releaser = releaser
        # Not under the lock: the garbage collector may run first in the new thread, and come here.
        with suppress(RuntimeError):  # no more threads, as at the end of a process
            releaser.start()

    def forking(self) -> None:
        """Let no block change hands while this process forks."""
        self._lock.acquire()

    def forked(self) -> None:
        """Leave to the fork what it may look at: blocks that can be mapped are its memory too."""
        try:
            unused = {id(block) for _, block in self._unused}
            for block in list(self._shared.values()):
                block.in_fork |= id(block) not in unused
        finally:
            self._lock.release()

    def begin_in_fork(self) -> None:
        """Begin anew in a fork, which has no thread of its parent, and a held lock."""
        self._lock = threading.RLock()
        self._unused = []
        self._sharing, self._releaser = False, None

    def _release_in_time(self) -> None:
        while True:
            time.sleep(KEPT_SECONDS / 2)
            with self._lock:
                self.release(KEPT_SECONDS)
                if not self._unused:
                    self._releaser = None
                    return


#: This process's.
pixel_memory = PixelMemory()
os.register_at_fork(
    before=pixel_memory.forking,
    after_in_parent=pixel_memory.forked,
    after_in_child=pixel_memory.begin_in_fork,
)

# NumPy asks for huge pages for its own large arrays, which take long to come by where free memory
# is in pieces or with the host.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
