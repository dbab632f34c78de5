"""cuDF's spilling, which a process decides on with its first cuDF object."""

import threading

from cudf.core.buffer.spill_manager import SpillManager
from processes import printed

MADE = """
import json
import dask_image_ingest as dii
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.image_dtype import IMAGE
import pyarrow as pa
backend = get_backend("cudf")
meta = backend.meta({"txt": pa.string(), "width": pa.int32(), "image": IMAGE})
meta[["image", "txt"]].head(0)
from cudf.core.buffer import spill_manager
print(json.dumps(spill_manager._global_manager_uninitialized))
"""


def test_reading_before_a_cluster_is_started_does_not_decide_on_spilling():
    assert printed(MADE) is True


TAKEN = """
import json, threading
import numpy as np
import cudf, host_memory as host
from cudf.core.buffer.buffer import Buffer
from cudf.core.buffer.spill_manager import get_global_manager
from cudf.core.buffer.spillable_buffer import SpillableBuffer
from dask_image_ingest.cluster import local as cluster

def received():
    # As a worker that spills sends it, when it lies in host memory.
    header = {"frame_count": 1, "owner-type-serialized-name": "SpillableBufferOwner"}
    try:
        return type(SpillableBuffer.deserialize(header, [memoryview(b"abc")])).__name__
    except ValueError as error:
        return str(error)

host.frame({"a": host.column(np.arange(3))})  # decides
cudf.set_option("spill", True)                # as LocalCUDACluster does
cudf.set_option("spill_on_demand", False)     # which asks a GPU for its memory
before = received()
cluster._enable_spilling()
manager = get_global_manager()
cluster._enable_spilling()
print(json.dumps([before, received(), get_global_manager() is manager]))
"""


def test_a_process_that_made_cudf_objects_before_can_take_those_of_workers_that_spill():
    before, after, kept = printed(TAKEN)
    assert "global spill manager" in before, "cuDF does it by itself now"
    assert after == "SpillableBuffer"
    assert kept


def test_a_limit_of_cudf_itself_would_spill_whatever_is_made():
    """Why start_cluster gives none: this fails when cuDF has mended it."""
    manager = SpillManager(device_memory_limit=10**9)
    buffer = Buffer()
    manager.add(buffer)
    assert buffer.is_spilled


def test_without_a_limit_nothing_is_spilled_until_memory_is_out():
    manager = SpillManager(device_memory_limit=None)
    buffer = Buffer()
    manager.add(buffer)
    assert not buffer.is_spilled
    assert manager._out_of_memory_handle(50)  # as RMM calls it
    assert buffer.is_spilled


class Buffer:
    """What the manager asks of a buffer."""

    size, exposed, is_spilled, spillable, last_accessed = 100, False, False, True, 0.0

    def __init__(self):
        self.lock = threading.Lock()

    def spill(self, target):
        self.is_spilled = target == "cpu"
