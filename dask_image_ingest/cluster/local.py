"""``start_cluster``: a cluster on this machine whose workers share the cores for decoding.

Its client closes the cluster when it is closed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Nanny, Status, Worker

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.cluster.prepare import prepare_workers
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.frames import get_backend, gpus

THREADS = "image-ingest.decode-threads"

_CLOSE_TIMEOUT = 10  # seconds for a second attempt


class ClusterClient(Client):
    """Client that closes its cluster when it is closed."""

    setting: dask.config.set | None = None  # of this process, until the client is closed

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client, then the cluster; called by Dask too."""
        cluster = self.cluster
        try:
            return super().close(*args, **kwargs)
        finally:
            if self.setting is not None:
                with contextlib.suppress(KeyError):  # of clients that overlap
                    self.setting.__exit__(None, None, None)
                self.setting = None
            if cluster is not None and not self.asynchronous:
                _close(cluster)


def _close(cluster: LocalCluster) -> None:
    """Close a cluster, also if its workers are slow to end because the machine is busy."""
    if cluster.status == Status.closing:
        return  # an earlier close() failed, and Dask would wait forever
    try:
        cluster.close()
    except TimeoutError:
        # Workers that were killed did not end in time. Their nannies are closed already (but not
        # before dask 2026.8): close the rest.
        cluster.status = Status.failed
        with contextlib.suppress(TimeoutError):
            cluster.close(timeout=_CLOSE_TIMEOUT)


# Environment variables of workers; works for cluster classes that set ``env=`` themselves, too.
_SPAWN = "distributed.nanny.pre-spawn-environ"

# dask-cuda's keywords for device_memory_limit, as fractions.
_LIMIT_KEYWORDS: dict[Any, float | None] = {"default": 0.8, "auto": None}

# Dask's periodic callbacks: default interval, and ours. With the defaults, three processes spend
# 3.4 % of two cores on them, and half of that with ours. A user's setting is left alone.
_INTERVALS = {
    "distributed.admin.tick.interval": ("20ms", "200ms"),
    "distributed.worker.profile.interval": ("10ms", "50ms"),
}

# Dask splits larger buffers, and the receiver copies them together. By variable, since processes
# read the setting when they import distributed.
_SHARD, _DEFAULT_SHARD = "distributed.comm.shard", "64MiB"
_LARGER_SHARD = {"DASK_DISTRIBUTED__COMM__SHARD": "1GiB"}


def start_cluster(
    n_workers: int | None = None,
    *,
    decode_threads: int | None = None,
    gpu: bool | None = None,
    rmm_pool_size: str | int | float | None = 0.5,
    device_memory_limit: str | int | float | None = 0.7,
    dashboard_address: str | None = ":8787",
    **kwargs: Any,
) -> Client:
    """Start a cluster on this machine and connect to it.

    There is one worker per GPU, with two task threads: one prepares a partition while the GPU
    decodes that of the other. Without GPUs there is one worker per core up to 8, with one task
    thread. They share the cores for decoding.

    Parameters
    ----------
    n_workers
        Number of workers. By default one per GPU, which is the maximum, or one per core up to 8.
    decode_threads
        DALI threads of each worker; by default the cores divided by the workers.
    gpu
        True, False, or None to use GPUs if the machine has any.
    rmm_pool_size
        Initial size of each worker's RMM pool, in bytes (``"20 GB"``) or as a share of the GPU's
        memory. None for no pool.
    device_memory_limit
        GPU memory above which a worker moves frames to host memory, in bytes or as a share; also
        the maximum size of the pool. Leave room for DALI, which has its own pool that never
        shrinks.
    dashboard_address
        Address of the dashboard. If the port is taken, another one is used:
        ``client.dashboard_link`` has it. None for any free port.
    **kwargs
        For ``dask_cuda.LocalCUDACluster`` or ``distributed.LocalCluster``. With
        ``processes=False`` the workers are threads of this process, which then decodes with
        ``decode_threads`` threads until the client is closed: close one such client before you
        start the next.

    Returns
    -------
    distributed.Client
        Closing it closes the cluster too. It is a context manager.

    Raises
    ------
    ArgumentError
        For numbers that are not positive, unknown arguments, more workers than GPUs,
        ``asynchronous=True``, and if ``rmm_pool_size`` is larger than ``device_memory_limit``.
    MissingDependencyError
        With ``gpu=True`` if dask-cuda is not installed.

    Examples
    --------
    >>> with start_cluster() as client:
    ...     frame = read_webdataset_images("train-{000..003}.tar").compute()
    """
    if kwargs.get("asynchronous"):
        raise ArgumentError(
            "asynchronous=True, and start_cluster waits for its workers. In a coroutine, connect a "
            "second client: Client(client.scheduler.address, asynchronous=True)"
        )
    for name, number in (("n_workers", n_workers), ("decode_threads", decode_threads)):
        if number is not None:
            whole_number(name, number, 1)
    cores = CPU_COUNT
    use_gpu = bool(gpus()) if gpu is None else gpu
    devices = kwargs.get("CUDA_VISIBLE_DEVICES")
    visible = 0
    if use_gpu:
        visible = gpus() if devices is None else _count_devices(devices)
    n_workers = n_workers or (visible if use_gpu else min(cores, 8)) or 1
    threads = decode_threads or max(1, cores // n_workers)
    settings = {
        "n_workers": n_workers,
        "threads_per_worker": 2 if use_gpu else 1,
        "dashboard_address": dashboard_address or ":0",
        **kwargs,
    }
    intervals = {
        name: ours
        for name, (default, ours) in _INTERVALS.items()
        if dask.config.get(name, None) == default
    }
    variables = dask.config.get(_SPAWN)
    if dask.config.get(_SHARD, None) == _DEFAULT_SHARD:
        variables = _LARGER_SHARD | variables
    in_this_process = not use_gpu and not settings.get("processes", True)
    if in_this_process and "env" in settings:
        raise ArgumentError("env= is for worker processes, and with processes=False there are none")
    config = {} if in_this_process else {**intervals, _SPAWN: variables}
    with dask.config.set(config), warnings.catch_warnings():
        # The dashboard then uses another one.
        warnings.filterwarnings("ignore", r"\s*Port \d+ is already in use", UserWarning)
        if use_gpu:
            if devices is None and visible:
                # With several MIG instances, a process sees only the first.
                visible = max(visible, _count_devices(os.environ.get("CUDA_VISIBLE_DEVICES", "")))
            cluster = _cuda_cluster(
                visible,
                rmm_pool_size=rmm_pool_size,
                device_memory_limit=device_memory_limit,
                **settings,
            )
        else:
            _check_names(settings)
            cluster = LocalCluster(**settings)
    return connect(cluster, "gpu" if use_gpu else "cpu", threads, in_this_process)


def connect(
    cluster: LocalCluster, device: Literal["cpu", "gpu"], threads: int, in_this_process: bool
) -> Client:
    """Client of a cluster, whose workers are prepared; on failure the cluster is closed."""
    # Before there is a client, whose end restores it.
    setting = dask.config.set({THREADS: threads}) if in_this_process else None
    try:
        # Through the scheduler, pixels would be sent twice.
        client = ClusterClient(cluster, direct_to_workers=True)
    except BaseException:
        if setting is not None:
            setting.__exit__(None, None, None)
        cluster.close()
        raise
    client.setting = setting
    try:
        prepare_workers(client, device, {} if in_this_process else {"decode-threads": threads})
    except BaseException:
        client.close()
        raise
    return client


def _check_names(settings: Mapping[str, Any]) -> None:
    """Refuse keywords of neither the cluster nor its workers, with which no worker would start."""
    signatures = [inspect.signature(kind).parameters for kind in (LocalCluster, Nanny, Worker)]
    unknown = [name for name in settings if not any(name in known for known in signatures)]
    if unknown:
        raise ArgumentError(
            f"start_cluster has no argument {', '.join(map(repr, unknown))}, and neither have "
            "distributed's LocalCluster, Nanny and Worker"
        )


def _count_devices(devices: str | Iterable[object]) -> int:
    """Number of GPUs in ``CUDA_VISIBLE_DEVICES``, a string or list as for dask-cuda."""
    names = devices.split(",") if isinstance(devices, str) else map(str, devices)
    return len({name.strip() for name in names} - {""})


def _cuda_cluster(
    visible: int, *, env: dict[str, str] | None = None, **settings: Any
) -> LocalCluster:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise MissingDependencyError(
            "a GPU cluster needs dask-cuda, which is not installed: pip install "
            "'dask-image-ingest[cuda12]' or [cuda13]"
        ) from error
    gpu_defaults: dict[str, Any] = {
        "rmm_allocator_external_lib_list": "cupy",
        # Spill when the pool is exhausted. Not with CUDF_SPILL_DEVICE_LIMIT, by which cuDF would
        # spill a frame for each new one, however small.
        "enable_cudf_spill": True,
        # Registers sizeof and .images before the first task.
        "pre_import": "dask_image_ingest.frames.cudf.backend",
    }
    settings = gpu_defaults | _pool(settings)
    if settings["n_workers"] > visible:
        # dask-cuda would fail later, and leave its scheduler running.
        raise ArgumentError(
            f"n_workers={settings['n_workers']} is more than the {visible} GPUs that workers may "
            "have, of which each takes one. Without any, CUDA finds no GPU in this process, or "
            "cuDF and CuPy are not installed: pass gpu=False"
        )
    # LocalCUDACluster ignores env=.
    with dask.config.set({_SPAWN: dask.config.get(_SPAWN) | (env or {})}):
        cluster = LocalCUDACluster(**settings)
    if settings["enable_cudf_spill"]:
        _enable_spilling()
    return cluster


def _pool(settings: dict[str, Any]) -> dict[str, Any]:
    """Add a maximum size of the pool, as otherwise it would leave no memory for DALI."""
    initial, limit = settings["rmm_pool_size"], settings["device_memory_limit"]
    maximum = settings.get("rmm_maximum_pool_size", _LIMIT_KEYWORDS.get(limit, limit or None))
    if settings.get("rmm_async"):
        initial = None  # CUDA's asynchronous pool grows on demand
    elif initial is None:
        maximum = None
    if initial is not None and maximum is not None and _exceeds(initial, maximum):
        raise ArgumentError(
            f"rmm_pool_size={initial!r} is more than device_memory_limit={maximum!r}, to which the "
            "pool may grow at most: pass a smaller pool or a larger limit"
        )
    return settings | {"rmm_pool_size": initial, "rmm_maximum_pool_size": maximum}


def _exceeds(size: str | float, limit: str | float) -> bool:
    """Compare two sizes of GPU memory; only a mix of bytes and shares queries the GPU."""
    if isinstance(size, float) and isinstance(limit, float) and max(size, limit) <= 1:
        return size > limit
    from dask_cuda.utils import parse_device_bytes

    return (parse_device_bytes(size) or 0) > (parse_device_bytes(limit) or 0)


def _enable_spilling() -> None:
    """Enable spilling in this process too, as it can't receive spillable frames without.

    cuDF makes that choice for a process when its first object is created.
    """
    from cudf import get_option
    from cudf.core.buffer import spill_manager as cudf_spilling

    if cudf_spilling._global_manager_uninitialized or cudf_spilling.get_global_manager():
        return
    cudf_spilling.set_global_manager(
        cudf_spilling.SpillManager(statistic_level=get_option("spill_stats"))
    )
    if get_option("spill_on_demand"):
        get_backend("cudf")  # sets the pool, in front of which the spilling comes
        cudf_spilling.set_spill_on_demand_globally()
