"""dask-cuda gives its workers their plugins as a set: they are set up in any order."""

import os
from pathlib import Path

import pytest
from processes import printed, python_path

PLAY = """
import json, os, sys
import simulated.plugin
import cudf
import rmm
from dask_cuda import plugins
from dask_cuda.worker_common import worker_plugins
from distributed import Client, LocalCluster

resources = []
rmm.reinitialize = lambda **options: resources.append(options["pool_allocator"])
rmm.mr.set_current_device_resource = lambda resource: resources.append(str(resource))
plugins._setup_rmm_for_cupy = lambda: resources.append("CuPy")


def look_around():
    from cudf.core.buffer import spill_manager
    undecided = spill_manager._global_manager_uninitialized
    cudf.Series([1])
    return {
        "loaded": "dask_image_ingest.frames.cudf.backend" in sys.modules,
        "undecided": undecided,
        "spills": spill_manager.get_global_manager() is not None,
        "resources": resources,
    }


if __name__ == "__main__":
    cudf.set_option("spill", False)  # as it is without the simulation
    made = worker_plugins(
        device_index=0,
        rmm_initial_pool_size=2**20,
        rmm_maximum_pool_size=2**21,
        rmm_managed_memory=False,
        rmm_async_alloc=False,
        rmm_release_threshold=None,
        rmm_log_directory=None,
        rmm_track_allocations=False,
        rmm_allocator_external_lib_list=["cupy"],
        pre_import=["dask_image_ingest.frames.cudf.backend"],
        enable_cudf_spill=True,
        cudf_spill_stats=0,
    )
    by_name = {type(plugin).__name__: plugin for plugin in made}
    ordered = tuple(by_name[name] for name in os.environ["ORDER"].split())
    with (
        LocalCluster(
            1, processes=False, plugins=ordered, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        print(json.dumps(client.submit(look_around).result()))
"""


@pytest.mark.parametrize("order", ["PreImport CUDFSetup RMMSetup", "RMMSetup CUDFSetup PreImport"])
def test_the_backend_may_be_imported_before_the_pool_is_made_or_after_it(order):
    path = os.pathsep.join([python_path(), str(Path(__file__).parent)])
    assert printed(PLAY, ORDER=order, PYTHONPATH=path) == {
        "loaded": True,
        # The import makes no cuDF object: with the first one, cuDF decides whether it spills.
        "undecided": True,
        "spills": True,
        # The pool is dask-cuda's, once, and CuPy allocates from it.
        "resources": [True, "CuPy"],
    }
