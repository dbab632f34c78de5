"""Memory of the device: bytes of the host, counted by what happens to them."""

import ctypes
import gc
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np

#: Bytes ``allocated``, copied ``to_host`` and ``to_device``, and ``pinned``: shown to others by
#: their address, so that cuDF never spills them again. How often anything is ``copied_to_host``,
#: or the host ``waits`` for the device, as it does for each such copy.
COUNTS = Counter()

_lock = threading.Lock()
_live = _peak = 0


class Memory:
    """Bytes on the device, counted while they live; also the buffer that RMM gives."""

    device_id = 0

    def __init__(self, host):
        self.host = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        self.size = self.nbytes = self.host.nbytes
        self.ptr = self.host.ctypes.data if self.size else 0
        global _live, _peak
        with _lock:
            COUNTS["allocated"] += self.size
            _live += self.size
            _peak = max(_peak, _live)

    def __del__(self):
        global _live
        with _lock:
            _live -= getattr(self, "size", 0)

    @property
    def __cuda_array_interface__(self):
        return interface(self.ptr, self.size)


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
    memory = Memory(np.array(host))
    return Span(memory.ptr, memory.size, memory)


def to_host(nbytes):
    """Count a copy to the host, for which the host waits."""
    count("to_host", nbytes)
    count("copied_to_host")
    count("waits")


def count(what, by=1):
    with _lock:
        COUNTS[what] += by


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


class DeviceBuffer(Memory):
    """RMM's buffer."""

    def __init__(self, *, ptr=0, size=0, stream=None, mr=None):
        super().__init__(view(ptr, size).copy() if ptr else np.empty(size, np.uint8))

    @staticmethod
    def to_device(data, stream=None, mr=None):
        made = DeviceBuffer(size=len(data))
        made.host[:] = np.frombuffer(data, np.uint8)
        count("to_device", made.size)
        return made


def copy_ptr_to_host(ptr, host, stream=None):
    """RMM's copy."""
    to = np.frombuffer(host, np.uint8)
    to[:] = view(ptr, len(to))
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
