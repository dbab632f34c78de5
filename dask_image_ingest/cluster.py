"""``start_cluster``: a cluster on this machine whose workers leave each other room to decode."""

from __future__ import annotations

from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

from dask_image_ingest.cluster_arguments import check_arguments, check_names
from dask_image_ingest.errors import MissingDependencyError
from dask_image_ingest.frames import gpus

_THREADS_VARIABLE = "DASK_IMAGE_INGEST__DECODE_THREADS"

# Variables that a worker starts with; those of ``env=`` come too late for its allocator.
_SPAWN = "distributed.nanny.pre-spawn-environ"

# Workers keep the memory in which one image was decoded for the next. dask's own trim threshold has
# glibc map all above 128 kB anew for each use: 150 page faults an image, a tenth of its decoding.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": 16 << 20, "MALLOC_TRIM_THRESHOLD_": 64 << 20}

# Dask's own clocks, their usual pace and ours: in three processes they take 3.4 % of two cores, so
# half of that. A setting that is not the usual one is somebody's.
_CLOCKS = {
    "distributed.admin.tick.interval": ("20ms", "200ms"),
    "distributed.worker.profile.interval": ("10ms", "50ms"),
}


def start_cluster(
    n_workers: int | None = None,
    *,
    decode_threads: int | None = None,
    gpu: bool | None = None,
    rmm_pool_size: str | int | float = 0.5,
    device_memory_limit: str | int | float = 0.7,
    dashboard_address: str | None = ":8787",
    **kwargs: Any,
) -> Client:
    """Start a cluster on this machine and connect to it.

    One worker process with one thread for each GPU, where there are GPUs; else one for each core,
    up to 8, which share the cores between their decoders.

    Parameters
    ----------
    n_workers
        Worker processes. By default one per GPU, or one per core up to 8.
    decode_threads
        DALI threads of each worker; by default the cores divided by the workers.
    gpu
        True, False, or None for what the machine has.
    rmm_pool_size
        Device memory that each worker's RMM pool takes, in bytes (``"20 GB"``) or as a share of the
        card. DALI has a pool of its own that never shrinks: leave it room.
    device_memory_limit
        Device memory past which a worker moves data to host memory, in bytes or as a share.
    dashboard_address
        Where the dashboard listens; None for any port that is free.
    **kwargs
        For ``dask_cuda.LocalCUDACluster`` or ``distributed.LocalCluster``.

    Returns
    -------
    distributed.Client
        Closing it shuts the cluster down; it is a context manager.

    Raises
    ------
    ArgumentError
        For numbers that are not positive, sizes that are none, arguments that no worker has.
    MissingDependencyError
        With ``gpu=True`` on a machine without dask-cuda.

    Examples
    --------
    >>> with start_cluster() as client:  # doctest: +SKIP
    ...     ddf = read_webdataset_images("train-{000..099}.tar").persist()
    """
    check_arguments({**locals(), **kwargs})
    cores = CPU_COUNT
    use_gpu = bool(gpus()) if gpu is None else gpu
    n_workers = n_workers or (gpus() if use_gpu else min(cores, 8)) or 1
    environment = {_THREADS_VARIABLE: str(decode_threads or max(1, cores // n_workers))}
    settings = {
        "n_workers": n_workers,
        "threads_per_worker": 1,
        "dashboard_address": dashboard_address or ":0",
        **kwargs,
    }
    settings["env"] = environment | settings.get("env", {})
    clocks = {
        name: ours
        for name, (usual, ours) in _CLOCKS.items()
        if dask.config.get(name, None) == usual
    }
    with dask.config.set(clocks):
        if use_gpu:
            cluster = _cuda_cluster(
                rmm_pool_size=rmm_pool_size, device_memory_limit=device_memory_limit, **settings
            )
        else:
            cluster = _cpu_cluster(**settings)
    return ClusterClient(cluster)


class ClusterClient(Client):
    """A client that takes its cluster down with it."""

    def close(self, *args: Any, **kwargs: Any):
        """Close the client, then the cluster."""
        cluster = self.cluster
        closing = super().close(*args, **kwargs)
        if cluster is not None and not self.asynchronous:
            cluster.close()
        return closing


def _cpu_cluster(**settings: Any) -> LocalCluster:
    check_names(settings)
    spawn = dask.config.get(_SPAWN)
    if "MALLOC_MMAP_THRESHOLD_" not in spawn:
        spawn = spawn | _ALLOCATOR
    # So that a worker knows the image dtype of a frame that it reads or is sent.
    settings = {"preload": ["dask_image_ingest"]} | settings
    with dask.config.set({_SPAWN: spawn}):
        return LocalCluster(**settings)


def _cuda_cluster(*, env: dict[str, str], device_memory_limit: Any, **settings: Any):
    try:
        from dask_cuda import LocalCUDACluster
        from dask_cuda.utils import parse_device_memory_limit
    except ImportError as error:
        raise MissingDependencyError(
            "a GPU cluster needs dask-cuda, which is not installed: pip install "
            "'dask-image-ingest[cuda12]' or [cuda13]"
        ) from error
    gpu_defaults = {
        "rmm_allocator_external_lib_list": "cupy",
        # A pool without a maximum grows until nothing is left for DALI.
        "rmm_maximum_pool_size": 0.8,
        "enable_cudf_spill": True,
        # Registers .images on frames that a worker was sent, and not in the middle of a first task.
        "pre_import": "dask_image_ingest.frames.cudf",
    }
    settings = gpu_defaults | settings
    limit = parse_device_memory_limit(device_memory_limit)
    if limit and settings["enable_cudf_spill"]:
        # dask-cuda then leaves frames to cuDF, which does not know of dask-cuda's limit.
        env = {"CUDF_SPILL_DEVICE_LIMIT": str(limit)} | env
    # LocalCUDACluster puts its own env= in the place of ours.
    with dask.config.set({_SPAWN: dask.config.get(_SPAWN) | env}):
        return LocalCUDACluster(device_memory_limit=device_memory_limit, **settings)
