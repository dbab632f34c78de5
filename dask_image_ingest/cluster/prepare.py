"""``prepare_cluster``: set up the workers of any cluster, and those that join later.

A worker loads DALI while the client plans its query: to build the first pipeline takes as long as
the decode of a partition. And it ends after an error of CUDA with which all later calls of the
process fail, so that its nanny starts another.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, Literal

import dask
import numpy as np
import pandas as pd
from dask.typing import Key
from distributed import Client, Scheduler, Status, Worker, WorkerPlugin
from distributed.protocol.pickle import loads
from PIL import Image

from dask_image_ingest.client import MarkSuspects, check_client, environment, versions, workers_of
from dask_image_ingest.decode import DecodeSpec, decode_one
from dask_image_ingest.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardNotFoundError,
    warn_user,
)
from dask_image_ingest.frames import gpus
from dask_image_ingest.storage import find_shards

_CONFIG = "image-ingest"

# Variable by which a nanny passes the configuration of its process to its worker.
_INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"

# Libraries for which different versions on a worker may change results or break messages.
_LIBRARIES = ("dask", "distributed", "pandas", "pyarrow")

_MAX_NAMED = 5  # hosts listed in a warning


logger = logging.getLogger("dask_image_ingest")

# Values of cudaError_t after which the process must be terminated, by CUDA's documentation: from
# cudaErrorIllegalAddress (700) to cudaErrorLaunchFailure (719).
_STICKY = frozenset((700, 702, 710, *range(714, 720)))

# Seconds that the event loop waits to hear whether the GPU is lost.
_ANSWER_TIMEOUT = 1.0


class LeaveBrokenGpu(WorkerPlugin):
    """Worker plugin that ends the process after an error from which its GPU does not recover.

    The failed task and those that the worker held are computed again by others, as after any death
    of a worker. A worker without a nanny stays, since nobody would replace it. If the GPU is
    busy, perhaps training, the worker goes on, and ends when the GPU turns out to be lost.
    """

    name = "image-ingest-broken-gpu"

    def setup(self, worker: Worker) -> None:
        """Keep the worker; called by Dask."""
        self._worker = worker
        self._query: threading.Thread | None = None

    def transition(self, key: Key, start: str, finish: str, **kwargs: object) -> None:
        """Look at the GPU after an error of CUDA; called by Dask."""
        if finish != "error":
            return
        text = self._worker.state.tasks[key].exception_text
        is_asked = self._query is not None and self._query.is_alive()
        if "cuda" in text.lower() and not is_asked:
            # In a thread, since an answer waits for all work on the GPU. A GPU that is lost answers
            # at once: the process then ends before the scheduler hears that the task failed.
            self._query = threading.Thread(
                target=self._leave_if_broken, name="broken-gpu", daemon=True
            )
            self._query.start()
            self._query.join(_ANSWER_TIMEOUT)

    def _leave_if_broken(self) -> None:
        error = broken_gpu()
        if error is None:
            return
        logger.error("%s: the GPU is unusable for this process: %s", self._worker.address, error)
        if self._worker.nanny:
            # At once: closing in order would move frames that can't be read.
            os._exit(1)


def broken_gpu() -> str | None:
    """Error of CUDA that all later calls of this process give; None if there is none."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error) if error.status in _STICKY else None
    return None


class PrepareWorker(LeaveBrokenGpu):
    """Worker plugin that applies the client's configuration and loads DALI.

    ``device`` is what the worker decodes on, None to detect it; ``own`` are values that
    ``start_cluster`` sets for this cluster, which override ``config``.
    """

    name = "image-ingest"

    def __init__(
        self,
        config: Mapping[str, Any],
        device: Literal["cpu", "gpu"] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.own = own or {}
        self._process = _this_process()

    def setup(self, worker: Worker) -> None:
        """Configure the process and start the warm-up; called by Dask."""
        super().setup(worker)
        # Not in the client's own process, where later changes of its configuration must count.
        if self._process != _this_process():
            local = dask.config.get(_CONFIG, {}, config=_machine_config())
            dask.config.set({_CONFIG: dask.config.merge(local, self.config, self.own)})
        warm_up(self.device or _device(), worker)

    def teardown(self, worker: Worker) -> None:
        """Wait for the warm-up; called by Dask."""
        end_warm_up()


def _machine_config() -> dict[str, Any]:
    """Configuration in this machine's files and variables, without what its nanny passed on."""
    variables = {name: value for name, value in os.environ.items() if name != _INHERITED}
    return dask.config.collect(dask.config.paths, variables)


# Seconds after which a thread hands on the GIL. The default, 5 ms, is half of what a GPU takes for
# a batch, and DALI would have nothing to do until its thread has the GIL.
_SWITCH_INTERVAL = 0.0005

_warming: list[threading.Thread] = []  # at most one

_STARTING = (Status.created, Status.init, Status.starting)


def warm_up(device: Literal["cpu", "gpu"], worker: Worker | None = None) -> None:
    """Decode an image in a thread of its own, once per process.

    On a GPU it waits until ``worker`` has started, since the memory pool does not exist before.
    """
    if _warming:
        return
    if device == "gpu":
        sys.setswitchinterval(_SWITCH_INTERVAL)
    thread = threading.Thread(target=_decode, args=(device, worker), name="warm-up", daemon=True)
    _warming.append(thread)
    thread.start()


def end_warm_up() -> None:
    """Wait for the warm-up: a worker that closes at once must not be in the middle of an import."""
    while _warming:
        _warming.pop().join()


def _decode(device: Literal["cpu", "gpu"], worker: Worker | None) -> None:
    while device == "gpu" and worker is not None and worker.status in _STARTING:
        time.sleep(0.05)
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    # If DALI or GPU memory is missing, the first read reports it.
    with suppress(MissingDependencyError, RuntimeError):
        decode_one(np.frombuffer(file.getvalue(), np.uint8), DecodeSpec(device=device))


async def dask_setup(server: Worker | Scheduler) -> None:
    """Prepare a worker or scheduler with ``--preload dask_image_ingest``; called by Dask."""
    if isinstance(server, Worker):
        await server.plugin_add(LeaveBrokenGpu())
        warm_up(_device(), server)
    elif isinstance(server, Scheduler):
        await server.register_scheduler_plugin(MarkSuspects(), idempotent=True)


def dask_teardown(server: Worker | Scheduler) -> None:
    """Wait for the warm-up; called by Dask."""
    end_warm_up()


def prepare_cluster(
    client: Client,
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Prepare the workers of a cluster, and those that join later, for this package.

    Workers are checked as before the first query with images. They load DALI, and get this
    process's configuration under ``image-ingest``. Call it again to send a changed one. It warns of
    whatever makes a query slow or wrong: other versions of libraries, more threads than cores,
    several threads on a GPU, no memory limit, shards that a worker does not see.

    Parameters
    ----------
    client
        Client of any Dask cluster.
    paths
        Shards, as for ``read_webdataset_images``, to be counted on each worker.
    storage_options
        Options of the remote file system.

    Returns
    -------
    pandas.DataFrame
        One row for each worker: ``address``, ``host``, ``cores``, ``threads``, ``gpu``,
        ``memory_limit``, the version of each package (None if not installed), and with ``paths``
        the number of ``shards`` that it sees (null if it can't list them).

    Raises
    ------
    ArgumentError
        For an asynchronous client.
    ClusterError
        If a worker lacks this package, or has another version of it.
    ShardNotFoundError
        If ``paths`` match no shard in this process.

    Examples
    --------
    >>> with start_cluster() as client:  # or Client("tcp://scheduler:8786")
    ...     table = prepare_cluster(client, "train-{000..003}.tar")
    >>> table["shards"].unique()
    array([4])
    """
    if client.asynchronous:
        raise ArgumentError("an asynchronous client can't wait: pass Client(address)")
    shards = None if paths is None else find_shards(paths, storage_options)
    environments = check_client(client)
    prepare_workers(client)
    workers = workers_of(client)
    table = pd.DataFrame(
        [
            _row(address, info, environments[address])
            for address, info in workers.items()
            if address in environments
        ],
        columns=["address", "host", "cores", "threads", "gpu", "memory_limit", *versions()],
    ).drop(columns="platform")
    if shards is not None:
        answers = client.run(_count_shards, paths, storage_options, on_error="return")
        counts = {address: n for address, n in answers.items() if isinstance(n, int)}
        table["shards"] = table["address"].map(counts)
        errors = {str(error): a for a, error in answers.items() if isinstance(error, Exception)}
        for error, address in errors.items():
            warn_user(f"{address} can't list the shards: {error}")
    for warning in _warnings(table, None if shards is None else len(shards)):
        warn_user(warning)
    return table


def prepare_workers(
    client: Client,
    device: Literal["cpu", "gpu"] | None = None,
    own: Mapping[str, Any] | None = None,
) -> None:
    """Register `PrepareWorker` with this process's configuration.

    It replaces an earlier one, and keeps that one's ``device`` and ``own`` unless they are given.
    """
    if pickled := client.run_on_scheduler(_registered):
        earlier: PrepareWorker = loads(pickled)
        device, own = device or earlier.device, own or earlier.own
    client.register_plugin(PrepareWorker(dask.config.get(_CONFIG, None) or {}, device, own))


def _registered(dask_scheduler: Scheduler) -> bytes | None:
    plugin: bytes | None = dask_scheduler.worker_plugins.get(PrepareWorker.name)
    return plugin


def _this_process() -> tuple[str, int]:
    return platform.node(), os.getpid()


def _device() -> Literal["cpu", "gpu"]:
    """Device of this process: a GPU worker is started with the variable that selects its GPU."""
    return "gpu" if os.environ.get("CUDA_VISIBLE_DEVICES") and gpus() else "cpu"


async def _count_shards(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    storage_options: dict[str, Any] | None,
) -> int:
    """Count the shards that this process sees; in a thread, so as not to block the event loop."""
    try:
        return len(await asyncio.to_thread(find_shards, paths, storage_options))
    except ShardNotFoundError:
        return 0


def _row(address: str, info: dict[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **environment,
        "address": address,
        "threads": info["nthreads"],
        "gpu": (info.get("gpu") or {}).get("name"),
        "memory_limit": info["memory_limit"],
    }


def _warnings(table: pd.DataFrame, shards: int | None) -> Iterable[str]:
    """Warnings about a slow or wrong setup, with the remedy."""
    if table.empty:
        return
    here = environment()
    for name in _LIBRARIES:
        other = table[table[name] != here[name]]
        if len(other):
            versions = ", ".join(sorted(map(str, other[name].unique())))
            yield (
                f"{_workers(other)} {name} {versions}, and this process has {here[name]}: results "
                "may differ or fail to arrive. Install the same versions everywhere"
            )
    by_host = table.groupby("host").agg(threads=("threads", "sum"), cores=("cores", "max"))
    crowded = by_host[by_host["threads"] > by_host["cores"]]
    if len(crowded):
        hosts = [f"{host} ({threads} on {cores})" for host, threads, cores in crowded.itertuples()]
        yield (
            f"more threads of workers than cores on {_few(hosts)}: decoding gets slower. Start "
            "fewer workers there, or with fewer threads (--nthreads)"
        )
    several = table[table["gpu"].notna() & (table["threads"] > 2)]
    if len(several):
        yield f"{_workers(several)} a GPU and more than two threads: start them with --nthreads 2"
    unlimited = table[table["memory_limit"].fillna(0) == 0]
    if len(unlimited):
        yield (
            f"{_workers(unlimited)} no memory limit: nothing is spilled to disk, and the system "
            "kills them when memory is used up. Start them with --memory-limit"
        )
    if shards is not None:
        blind = table[table["shards"].notna() & (table["shards"] != shards)]
        if len(blind):
            least = int(blind["shards"].min())
            yield (
                f"{_workers(blind)} other shards than this process, which sees {shards}: as few as "
                f"{least}. Mount the folder at the same path on each host"
            )


def _workers(table: pd.DataFrame) -> str:
    """Subject of a sentence: ``2 workers on node17, node18 have``."""
    noun = "worker" if len(table) == 1 else "workers"
    verb = "has" if len(table) == 1 else "have"
    return f"{len(table)} {noun} on {_few(sorted(set(table['host'])))} {verb}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
