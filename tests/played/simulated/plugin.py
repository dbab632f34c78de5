"""Puts the simulated GPU in place, before pytest imports cuDF or CuPy: ``-p simulated.plugin``."""

import os

from simulated import arrays, counts, memory


def install():
    """Have all that this process imports from now on use it."""
    # No driver is asked for, and cuDF's spill manager is there, for what must stay spillable.
    os.environ |= {"RAPIDS_NO_INITIALIZE": "1", "CUDF_SPILL": "1", "CUDF_SPILL_ON_DEMAND": "0"}
    arrays.install()

    import rmm.pylibrmm.device_buffer

    rmm.DeviceBuffer = memory.DeviceBuffer
    rmm.pylibrmm.device_buffer.copy_ptr_to_host = memory.copy_ptr_to_host
    memory.install_resources(rmm.mr)

    import cudf
    from cudf.core.buffer.spillable_buffer import SpillableBufferOwner

    import dask_image_ingest
    from simulated import decoder, kernels

    kernels.install()
    decoder.install()
    cudf.DataFrame.to_parquet, cudf.read_parquet = kernels.write_parquet, kernels.read_parquet
    mark_exposed = SpillableBufferOwner.mark_exposed

    def mark_and_count(buffer):
        if not buffer.exposed:
            counts.count("pinned", buffer.size)
        mark_exposed(buffer)

    SpillableBufferOwner.mark_exposed = mark_and_count
    dask_image_ingest.start_cluster = start_cluster


def start_cluster(*args, **options):
    """A cluster of one worker, in this process: another one would have no such GPU."""
    import dask
    from distributed import LocalCluster

    from dask_image_ingest.cluster.local import THREADS, ClusterClient

    cluster = LocalCluster(1, threads_per_worker=1, processes=False, dashboard_address=None)
    client = ClusterClient(cluster)
    client.setting = dask.config.set({THREADS: 2})
    return client


install()
