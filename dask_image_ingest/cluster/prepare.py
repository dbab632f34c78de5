"""``prepare``: whatever workers need, put there once, also for those that come later."""

from __future__ import annotations

import asyncio
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import dask
import pandas as pd
from distributed import Client, Scheduler, Status, Worker, WorkerPlugin
from distributed.protocol.pickle import loads

from dask_image_ingest.cluster.messages import silence_routine
from dask_image_ingest.cluster.warm import end_warm_up, warm_up
from dask_image_ingest.environment import PACKAGE, Portable, environment, versions
from dask_image_ingest.errors import ArgumentError, ClusterError, DaskImageIngestError
from dask_image_ingest.frames import gpus
from dask_image_ingest.scheduler_plugin import PrepareScheduler, prepare_scheduler
from dask_image_ingest.storage import find_shards

_CONFIG = "image-ingest"

# The variable by which a nanny gives its worker the configuration of its own process.
_INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"

_PATIENCE = 30.0  # seconds for the answers of workers

# Of which other versions on a worker give other answers or none.
_LIBRARIES = ("dask", "distributed", "pandas", "pyarrow")

_NAMED = 5  # hosts in a warning


class PrepareWorker(WorkerPlugin):
    """Imports the package, configures it as the client is, and has DALI ready.

    Parameters
    ----------
    config
        The values of ``image-ingest``.
    device
        Where the worker decodes; None for what it has.
    own
        Values that the cluster was started with, which take the place of others.
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

    def __reduce__(self) -> tuple[Portable, tuple[dict[str, Any]]]:
        return Portable(_plugin), (self.__dict__,)

    def setup(self, worker: Worker) -> None:
        """Begin; called by dask for each worker."""
        if self._process != _this_process():  # else it would outlast what the client configures
            there = dask.config.get(_CONFIG, {}, config=_of_this_machine())
            dask.config.set({_CONFIG: dask.config.merge(there, self.config, self.own)})
        warm_up(self.device or _device(), worker)

    def teardown(self, worker: Worker) -> None:
        """Wait for what was begun; called by dask."""
        if worker.status == Status.closing:
            silence_routine(closing=True)
        end_warm_up()


def _of_this_machine() -> dict[str, Any]:
    """The configuration by files and variables, without that which a nanny has inherited."""
    variables = {name: value for name, value in os.environ.items() if name != _INHERITED}
    return dask.config.collect(dask.config.paths, variables)


def _plugin(state: dict[str, Any]) -> WorkerPlugin:
    """The plugin on a worker; one that does nothing where this package is not installed.

    A worker that can't unpickle a plugin ends when it joins. See `Portable`.
    """
    try:
        from dask_image_ingest.cluster.prepare import PrepareWorker as Plugin
    except ImportError:
        from distributed import WorkerPlugin

        return WorkerPlugin()
    plugin = Plugin.__new__(Plugin)
    plugin.__dict__.update(state)
    return plugin


async def dask_setup(server: Any) -> None:
    """Prepare a worker or scheduler with ``--preload dask_image_ingest``; called by dask."""
    if isinstance(server, Worker):
        warm_up(_device(), server)
    elif isinstance(server, Scheduler):
        await server.register_scheduler_plugin(PrepareScheduler(environment()), idempotent=True)


def dask_teardown(server: Any) -> None:
    """Wait for what was begun; called by dask."""
    end_warm_up()


def prepare(
    client: Client,
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Prepare the workers of a cluster, and those that join it later, for this package.

    They import the package, load DALI, and take over the configuration of ``image-ingest`` that
    this process has. Calling it again sends the configuration anew. Whatever will make a query slow
    or wrong is a warning: other versions of libraries, more threads than cores, several threads on
    a GPU, no memory limit, shards that a worker does not see.

    Parameters
    ----------
    client
        Of any Dask cluster.
    paths
        Shards as ``read_webdataset_images`` takes them, to be looked for on each worker.
    storage_options
        For the remote file system.

    Returns
    -------
    pandas.DataFrame
        A row for each worker: ``address``, ``host``, ``cores``, ``threads``, ``gpu``,
        ``memory_limit``, a version of each package (None where it is not installed), and with
        ``paths`` how many ``shards`` it sees.

    Raises
    ------
    ArgumentError
        For an asynchronous client.
    ClusterError
        If the scheduler or all workers lack this package, or DALI where this process has it, or
        have another version of the package.
    ShardNotFoundError
        If ``paths`` lead to no shard in this process.

    Examples
    --------
    >>> with start_cluster() as client:  # or Client("tcp://scheduler:8786")
    ...     table = prepare(client, "train-{000..003}.tar")
    >>> table["shards"].unique()
    array([4])
    """
    if client.asynchronous:
        raise ArgumentError("an asynchronous client can't wait: pass Client(address)")
    shards = None if paths is None else find_shards(paths, storage_options)
    told = prepare_scheduler(client)
    if told.error:
        raise ClusterError(told.error)
    prepare_workers(client)
    present = client.scheduler_info(n_workers=-1)["workers"]
    found = told.found
    table = pd.DataFrame(
        [_row(address, worker, found.get(address, {})) for address, worker in present.items()],
        columns=["address", "host", "cores", "threads", "gpu", "memory_limit", *versions()],
    ).drop(columns="platform")
    if shards is not None:
        fit = table["address"][table[PACKAGE] == environment()[PACKAGE]].tolist()
        seen = client.sync(_ask_each, client, fit, _count_shards, paths, storage_options)
        table["shards"] = table["address"].map(seen).fillna(0).astype("int64")
    for warning in [told.warning, *_warnings(table, None if shards is None else len(shards))]:
        if warning:
            warnings.warn(warning, stacklevel=2)
    return table


def prepare_workers(
    client: Client,
    device: Literal["cpu", "gpu"] | None = None,
    own: Mapping[str, Any] | None = None,
) -> None:
    """Register the plugin that prepares workers, with this process's configuration.

    It takes the place of the one that is there, if there is one, and keeps its ``device`` and
    ``own`` values unless others are given.
    """
    client.sync(_register, client, device, own)


async def _register(
    client: Client, device: Literal["cpu", "gpu"] | None, own: Mapping[str, Any] | None
) -> None:
    with suppress(ValueError):  # the scheduler may be configured to run no functions of clients
        if there := await client.run_on_scheduler(Portable(_registered)):
            before = loads(there)
            device, own = device or before.device, own or before.own
    plugin = PrepareWorker(dask.config.get(_CONFIG, None) or {}, device, own)
    with suppress(TimeoutError):  # of workers that don't answer, which it awaits
        await asyncio.wait_for(client.register_plugin(plugin), _PATIENCE)


def _registered(dask_scheduler: Scheduler) -> bytes | None:
    plugin: bytes | None = dask_scheduler.worker_plugins.get("image-ingest")
    return plugin


async def _ask_each(
    client: Client, workers: Sequence[str], function: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """The answer of each worker, of those that answer in time."""

    async def ask(worker: str) -> dict[str, Any]:
        answer = client.run(function, *args, workers=[worker], on_error="ignore")
        with suppress(TimeoutError):
            return await asyncio.wait_for(answer, _PATIENCE)
        return {}

    answers = await asyncio.gather(*map(ask, workers))
    return {worker: answer for each in answers for worker, answer in each.items()}


def _this_process() -> tuple[str, int]:
    return platform.node(), os.getpid()


def _device() -> Literal["cpu", "gpu"]:
    """The device of this process: workers for a GPU are started with the variable that names it."""
    return "gpu" if os.environ.get("CUDA_VISIBLE_DEVICES") and gpus() else "cpu"


async def _count_shards(paths: Any, storage_options: dict[str, Any] | None) -> int:
    """Count the shards this process sees; beside the event loop, which must not wait for disks."""
    try:
        return len(await asyncio.to_thread(find_shards, paths, storage_options))
    except DaskImageIngestError:
        return 0


def _row(address: str, worker: dict[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **there,
        "address": address,
        "threads": worker["nthreads"],
        "gpu": (worker.get("gpu") or {}).get("name"),
        "memory_limit": worker["memory_limit"],
    }


def _warnings(table: pd.DataFrame, shards: int | None) -> Iterable[str]:
    """Warnings of a slow or wrong setup, with the remedy."""
    here, table = environment(), table.dropna(subset="host")  # those that have answered
    if table.empty:
        return
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
    several = table[table["gpu"].notna() & (table["threads"] > 1)]
    if len(several):
        yield f"{_workers(several)} a GPU and several threads: start them with --nthreads 1"
    unlimited = table[table["memory_limit"].fillna(0) == 0]
    if len(unlimited):
        yield (
            f"{_workers(unlimited)} no memory limit: nothing is spilled to disk, and the system "
            "kills them when memory is used up. Start them with --memory-limit"
        )
    if shards is not None:
        blind = table[table["shards"] != shards]
        if len(blind):
            least = blind["shards"].min()
            yield (
                f"{_workers(blind)} other shards than this process, which sees {shards}: as few as "
                f"{least}. Mount the folder at the same path on each host"
            )


def _workers(table: pd.DataFrame) -> str:
    """Say which workers, as ``2 workers on node17, node18 have``."""
    noun = "worker" if len(table) == 1 else "workers"
    verb = "has" if len(table) == 1 else "have"
    return f"{len(table)} {noun} on {_few(sorted(set(table['host'])))} {verb}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
