"""What ``start_cluster`` asks of dask-cuda."""

import pytest
from processes import printed

import dask_image_ingest as dii
from dask_image_ingest.cluster import local as cluster

LOOK_AROUND = """
import json, os, warnings
import dask_image_ingest as dii

def look_around():
    import sys
    import cudf
    from cudf.core.buffer import spill_manager
    from dask.sizeof import sizeof
    from dask_image_ingest.cluster import prepare as warm
    from dask_image_ingest.decode.dali import decode_threads

    return {
        "warmed": len(warm._warming),
        "threads": decode_threads(),
        "spill": cudf.get_option("spill"),
        "limit": cudf.get_option("spill_device_limit"),
        "undecided": spill_manager._global_manager_uninitialized,
        "sizes": sizeof.dispatch(cudf.DataFrame).__module__,
        "loaded": "dask_image_ingest.frames.cudf.backend" in sys.modules,
        "accessor": cudf.DataFrame.images.__name__,
        "process": os.getpid(),
    }

if __name__ == "__main__":
    with dii.start_cluster(
        1,
        gpu=True,
        decode_threads=3,
        rmm_pool_size=None,
        device_memory_limit=None,
        CUDA_VISIBLE_DEVICES="0",
        dashboard_address=None,
    ) as client:
        (found,) = client.run(look_around).values()
    found["process"] = found["process"] != os.getpid()
    print(json.dumps(found))
"""


def test_a_worker_is_ready_before_its_first_task():
    # A switch for dask-cuda's own tests: its workers then start without a GPU.
    assert printed(LOOK_AROUND, DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC="1") == {
        "warmed": 1,
        "threads": 3,
        "spill": True,
        # None: with a limit of its own, cuDF spills whatever is made.
        "limit": None,
        "undecided": True,
        "sizes": "dask_cudf.backends",
        "loaded": True,
        "accessor": "FrameImages",
        "process": True,
    }


def pool(**settings):
    made = cluster._pool({"rmm_pool_size": 0.5, "device_memory_limit": 0.7} | settings)
    return made["rmm_pool_size"], made["rmm_maximum_pool_size"]


def test_the_pool_may_grow_to_the_limit_and_no_further():
    assert pool() == (0.5, 0.7)
    assert pool(rmm_maximum_pool_size="20 GB", rmm_pool_size="2 GB") == ("2 GB", "20 GB")
    assert pool(device_memory_limit="default") == (0.5, 0.8)
    assert pool(device_memory_limit="auto") == (0.5, None)
    assert pool(device_memory_limit=0) == (0.5, None)
    assert pool(device_memory_limit=None) == (0.5, None)
    # RMM takes no maximum without a pool, and dask-cuda no pool with CUDA's own.
    assert pool(rmm_pool_size=None) == (None, None)
    assert pool(rmm_async=True) == (None, 0.7)


@pytest.mark.parametrize(
    "settings",
    [
        {"rmm_pool_size": 0.9},
        {"rmm_pool_size": 0.5, "rmm_maximum_pool_size": 0.4},
        {"rmm_pool_size": "8 GB", "device_memory_limit": "500 MB"},
        {"rmm_pool_size": 0.9, "device_memory_limit": "20 GB"},
    ],
)
def test_a_pool_above_its_limit_is_refused_before_workers_start(settings, monkeypatch):
    monkeypatch.setattr("dask_cuda.utils.get_device_total_memory", lambda index=0: 24 * 10**9)
    monkeypatch.setattr("dask_cuda.utils.has_device_memory_resource", lambda index=0: True)
    with pytest.raises(dii.ArgumentError, match="rmm_pool_size"):
        dii.start_cluster(1, gpu=True, dashboard_address=None, **settings)
