"""Memory of the device: bytes of the host, counted by what happens to them."""

import ctypes
import gc
import sys
from collections import Counter
from contextlib import contextmanager

import numpy as np

from simulated.counts import COUNTS, count, lock
from simulated.streams import Stream, current

#: What memory holds that nobody has written to, or that was freed.
POISON = 0xA5

# Larger blocks go back to the host when they are freed.
_LARGEST_KEPT = 64 << 20

_live = _peak = 0


class Memory:
    """Bytes on the device, counted while they live; also the buffer that RMM gives.

    They are allocated and freed in the order of a stream, as by a pool of RMM's: what was freed
    goes to the next on that stream that asks for so much, and may be written to until the stream
    is that far.
    """

    device_id = 0

    def __init__(self, nbytes, stream=None):
        self.size = self.nbytes = nbytes
        self._stream = stream or current()
        self._block = _taken(nbytes, self._stream)
        self.host = self._block[:nbytes]
        self.ptr = self.host.ctypes.data if nbytes else 0
        global _live, _peak
        with lock:
            COUNTS["allocated"] += self.size
            _live += self.size
            _peak = max(_peak, _live)

    def __del__(self):
        global _live
        block = getattr(self, "_block", None)
        if block is None or sys.is_finalizing():
            return
        with lock:
            _live -= self.size
            if 0 < block.nbytes <= _LARGEST_KEPT:
                self._stream.queue(lambda: block.fill(POISON))
                self._stream.freed[block.nbytes].append(block)

    @property
    def __cuda_array_interface__(self):
        return interface(self.ptr, self.size)


def _taken(nbytes, stream):
    """The block that the stream has freed last, or a new one."""
    size = max(256, 1 << (nbytes - 1).bit_length()) if nbytes else 0
    with lock:
        freed = stream.freed[size]
        return freed.pop() if freed else np.full(size, POISON, np.uint8)


class Span:
    """Part of the device's memory, and who keeps it."""

    def __init__(self, ptr, size, owner):
        self.ptr, self.size, self.nbytes, self.owner = ptr, size, size, owner

    @property
    def __cuda_array_interface__(self):
        return interface(self.ptr, self.size)


def interface(ptr, size):
    """What tells other libraries of so many bytes."""
    return {"data": (ptr, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3}


def allocated(host):
    """The values of a host array on the device, as a span."""
    host = np.ascontiguousarray(host)
    memory = Memory(host.nbytes, Stream.null)
    Stream.null.catch_up()
    memory.host[:] = host.reshape(-1).view(np.uint8)
    return Span(memory.ptr, memory.size, memory)


def to_host(nbytes):
    """Count a copy to the host, for which the host waits."""
    count("to_host", nbytes)
    count("copied_to_host")
    count("waits")


@contextmanager
def counted():
    """What is counted inside, and ``peak``: most bytes that were there at once beyond those before.

    A kernel's own scratch memory is not among them.
    """
    global _peak
    gc.collect()
    before, start = COUNTS.copy(), _live
    _peak = _live
    inside = Counter()
    try:
        yield inside
    finally:
        inside.update(COUNTS - before)
        inside["peak"] = _peak - start


def view(ptr, nbytes):
    """The bytes at an address."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), np.uint8)


def read(ptr, nbytes):
    """The bytes at an address, when the default stream is that far."""
    Stream.null.catch_up()
    return view(ptr, nbytes)


class DeviceBuffer(Memory):
    """RMM's buffer."""

    def __init__(self, *, ptr=0, size=0, stream=None, mr=None):
        super().__init__(size, Stream.null)
        if ptr:
            self.host[:] = read(ptr, size)

    @staticmethod
    def to_device(data, stream=None, mr=None):
        made = DeviceBuffer(size=len(data))
        Stream.null.catch_up()
        made.host[:] = np.frombuffer(data, np.uint8)
        count("to_device", made.size)
        return made


def copy_ptr_to_host(ptr, host, stream=None):
    """RMM's copy."""
    to = np.frombuffer(host, np.uint8)
    to[:] = read(ptr, len(to))
    to_host(len(to))


class Pool:
    """RMM's resource of a pool of CUDA's."""

    def __init__(self, initial_pool_size=None, release_threshold=None):
        self.release_threshold = release_threshold


def install_resources(mr):
    """Have RMM's resource of the current device be one that was set, at first its own default."""
    current = [mr.CudaMemoryResource()]
    mr.CudaAsyncMemoryResource = Pool
    mr.get_current_device_resource = lambda: current[-1]
    mr.set_current_device_resource = current.append
