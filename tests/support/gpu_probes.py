"""What the GPU tests ask of a worker: functions that run there and send plain values back."""

import contextlib
import ctypes
import functools
import glob
import site
import sys
import threading
from collections import Counter
from unittest import mock

import dask
import numpy as np
import pandas as pd
import psutil
from contract import address, on_host, to_arrow

import dask_image_ingest as dii

# The kinds of copies, as cupti_activity.h numbers them.
COPY_KINDS = {1: "host to device", 2: "device to host", 8: "device to device"}


def read(paths, backend, **options):
    """Some shards as a table of metadata, and their images on the host."""
    frame = compute(dii.read_webdataset_images(paths, backend=backend, **options))
    arrays = [None if array is None else on_host(array) for array in frame.images.arrays()]
    return to_arrow(frame.drop(columns="image")), arrays


def compute(collection):
    """A partition in this process."""
    with dask.config.set(scheduler="synchronous"):
        return collection.compute()


def where_the_pixels_are(path):
    """The addresses of a partition's views, and of the buffer of its image column."""
    frame = compute(dii.read_webdataset_images(path, backend="cudf"))
    arrays = [array for array in frame.images.arrays() if array is not None]
    column, _ = frame["image"].to_pylibcudf()
    buffer = column.child(0).list_view().child().data()
    return {
        "library": type(arrays[0]).__module__.partition(".")[0],
        "views": [(address(array), array.nbytes) for array in arrays],
        "buffer": (buffer.ptr, buffer.size),
    }


def copies_of_a_read(path):
    """Bytes that a read of one shard copies, by kind, next to a copy of known size."""
    import cupy

    ddf = dii.read_webdataset_images(path, backend="cudf")
    compute(ddf)  # builds the pipeline, and whatever else is built once
    with counted_copies() as control:
        cupy.ones(2**20, cupy.uint8).get()
    with counted_copies() as copied:
        frame = compute(ddf)
    pixels = sum(array.nbytes for array in frame.images.arrays() if array is not None)
    return {"control": control, "read": copied, "pixels": pixels, "rows": len(frame)}


def count_pixels(part):
    """How many bytes of pixels each key of a partition has, as a pandas frame."""
    keys = part["__key__"]
    keys = keys.to_pandas() if hasattr(keys, "to_pandas") else keys
    sizes = [0 if array is None else int(array.size) for array in part.images.arrays()]
    return pd.DataFrame({"key": keys.to_numpy(str), "size": np.array(sizes, np.int64)})


COUNTED = pd.DataFrame({"key": np.array([], str), "size": np.array([], np.int64)})


def sent_bytes(part):
    """How many bytes a partition is sent as, as a pandas frame of one row."""
    from distributed.protocol import serialize

    _, frames = serialize(part, on_error="raise")
    return pd.DataFrame({"bytes": [sum(getattr(f, "nbytes", None) or len(f) for f in frames)]})


SENT = pd.DataFrame({"bytes": np.array([], np.int64)})


def peak_of_a_late_decode(path):
    """Bytes of RMM's memory at the peak of a late decode, and of the pixels that it gave."""
    import rmm.statistics

    table = compute(dii.read_webdataset_images(path, backend="cudf").drop(columns="image"))
    dii.decode_images(table)  # builds the pipeline
    with rmm.statistics.statistics():
        before = rmm.statistics.get_statistics().current_bytes
        frame = dii.decode_images(table)
        peak = rmm.statistics.get_statistics().peak_bytes - before
    pixels = sum(array.nbytes for array in frame.images.arrays() if array is not None)
    return {"peak": peak, "pixels": pixels}


def copies_beside_a_backlog(path):
    """Whether a second of work on the default stream was still going on after each batch's copy."""
    import cupy

    from dask_image_ingest.frames.cudf.pixels import DevicePixels

    begin, append, busy = DevicePixels.__init__, DevicePixels.append, []

    def begin_and_queue(self, nbytes):
        begin(self, nbytes)
        queue_work(cupy.cuda.Stream.null, 1)

    def append_and_look(self, images):
        append(self, images)
        busy.append(not cupy.cuda.Stream.null.done)

    ddf = dii.read_webdataset_images(path, backend="cudf")
    compute(ddf)  # builds the pipeline
    with mock.patch.multiple(DevicePixels, __init__=begin_and_queue, append=append_and_look):
        compute(ddf)
    return busy


def queue_work(stream, seconds):
    """Keep a stream busy for a while."""
    import cupy

    with stream:
        _spin()((1,), (1,), (cupy.int64(seconds * 1e9),))


SPIN = """
__device__ long long now() {
    long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}
extern "C" __global__ void spin(long long nanoseconds) {
    long long start = now();
    while (now() - start < nanoseconds) {}
}
"""


@functools.cache
def _spin():
    import cupy

    return cupy.RawKernel(SPIN, "spin")


def apart(path, load):
    """How far the pictures of a shard of one photograph over and over are apart, at most."""
    with dask.config.set({"image-ingest.hw-decoder-load": load}):
        arrays = compute(dii.read_webdataset_images(path, backend="cudf")).images.arrays()
    first = arrays[0].astype("int16")
    return max(int(abs(array.astype("int16") - first).max()) for array in arrays)


def pipelines():
    """How many GPU pipelines of DALI this process has, once it has warmed up."""
    from dask_image_ingest.cluster import prepare as warm
    from dask_image_ingest.decode import dali

    for thread in warm._warming:
        thread.join()
    return sum(each._pipeline is not None for each in dali._all)


def flip(images):
    """A transform."""
    from nvidia.dali import fn

    return fn.flip(images, horizontal=1)


def turn(images):
    """A transform that mixes neighbours, as DALI does unless it is told otherwise."""
    from nvidia.dali import fn

    return fn.rotate(images, angle=30.0, keep_size=True, fill_value=0)


def memory():
    """Bytes in use: on the device by everything, and in this process on the host."""
    import cupy

    cupy.cuda.Device().synchronize()
    free, total = cupy.cuda.runtime.memGetInfo()
    return {"device": total - free, "host": psutil.Process().memory_info().rss}


def spilled_bytes():
    """Bytes of cuDF buffers that lie in host memory now, and what the limit on the others is."""
    from cudf.core.buffer.spill_manager import get_global_manager

    manager = get_global_manager()
    buffers = manager.buffers()
    return {
        "spilled": sum(buffer.size for buffer in buffers if buffer.is_spilled),
        "on device": sum(buffer.size for buffer in buffers if not buffer.is_spilled),
    }


class NoCupti(RuntimeError):
    """There is no CUPTI, which counts copies, on this machine."""


@contextlib.contextmanager
def counted_copies():
    """Count the bytes that this process copies, whichever library does it, by kind of copy.

    CUPTI sees the copies of every library in the process: DALI, libcudf, RMM and CuPy bring CUDA
    runtimes of their own, so that nothing above the driver would.
    """
    import cupy

    cupti = _cupti()
    copied = Counter()
    cupy.cuda.Device().synchronize()
    cupti.flush()
    cupti.copied = copied
    cupti.check(cupti.library.cuptiActivityEnable(_MEMCPY))
    try:
        yield copied
        cupy.cuda.Device().synchronize()
    finally:
        cupti.check(cupti.library.cuptiActivityDisable(_MEMCPY))
        cupti.flush()


_MEMCPY = 1
_FLUSH_FORCED = 1
_MAX_LIMIT_REACHED = 12
_BUFFER_BYTES = 2**20


class _MemcpyRecord(ctypes.Structure):
    """The beginning of CUpti_ActivityMemcpy, the same in every version."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("copy_kind", ctypes.c_uint8),
        ("src_kind", ctypes.c_uint8),
        ("dst_kind", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("bytes", ctypes.c_uint64),
    ]


class _Cupti:
    def __init__(self, library):
        self.library = library
        self.copied = Counter()
        self._buffers = {}
        self._lock = threading.Lock()
        pointer, size = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
        requested = ctypes.CFUNCTYPE(None, pointer, size, size)
        completed = ctypes.CFUNCTYPE(
            None,
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        )
        # Kept, since CUPTI calls them as long as the process lives.
        self._callbacks = requested(self._requested), completed(self._completed)
        self.check(library.cuptiActivityRegisterCallbacks(*self._callbacks))

    def check(self, status):
        if status:
            raise RuntimeError(f"CUPTI failed with status {status} (CUptiResult in cupti_result.h)")

    def flush(self):
        self.check(self.library.cuptiActivityFlushAll(_FLUSH_FORCED))

    def _requested(self, buffer, size, records):
        # CUPTI wants addresses that 8 divides.
        memory = (ctypes.c_uint64 * (_BUFFER_BYTES // 8))()
        with self._lock:
            self._buffers[ctypes.addressof(memory)] = memory
        buffer[0], size[0], records[0] = ctypes.addressof(memory), _BUFFER_BYTES, 0

    def _completed(self, context, stream, buffer, size, valid):
        record = ctypes.c_void_p(None)
        while True:
            status = self.library.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            if status:
                break
            copy = _MemcpyRecord.from_address(record.value)
            if copy.kind == _MEMCPY:
                self.copied[COPY_KINDS.get(copy.copy_kind, "other")] += copy.bytes
        with self._lock:
            self._buffers.pop(buffer, None)


_loaded = None


def _cupti():
    global _loaded
    if _loaded is None:
        places = [*site.getsitepackages(), *sys.path]
        patterns = [f"{place}/nvidia/*/lib/libcupti.so*" for place in places if place]
        patterns.append("/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so*")
        patterns.append("/usr/local/cuda*/lib64/libcupti.so*")
        found = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
        if not found:
            raise NoCupti("libcupti was not found: pip install nvidia-cuda-cupti-cu12 or -cu13")
        _loaded = _Cupti(ctypes.CDLL(found[0]))
    return _loaded
