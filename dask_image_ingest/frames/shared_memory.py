"""Memory that another process on this machine can map, and that is not written to while it does.

Files in memory (``memfd_create``) have no name that could stay behind, and their pages live as long
as any process maps them. Another process opens one through ``/proc`` and holds a lock on it, which
goes with its mapping or with the process itself. Each use of a block has a seal of its own, so that
whoever comes too late finds that out.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

_SEAL = 16

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
        mapped = mmap.mmap(opened, nbytes, access=mmap.ACCESS_COPY)
    finally:
        # The mapping has a duplicate of the file, and so the lock.
        os.close(opened)
    with contextlib.suppress(OSError):
        mapped.madvise(_MADV_POPULATE_READ)
    array = np.frombuffer(mapped, np.uint8)
    array.flags.writeable = False
    return array


@functools.cache
def this_machine() -> str:
    """What two processes have in common that can find each other in ``/proc``; or nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
