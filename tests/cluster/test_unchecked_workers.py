"""Workers without the package that get a task before they have answered the check.

So do those of an asynchronous client, which does not wait for it, and those that answer too late.
"""

import asyncio
import warnings
from contextlib import asynccontextmanager

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker
from processes import SECONDS

import dask_image_ingest as dii
from dask_image_ingest import scheduler_plugin

pytestmark = pytest.mark.slow

# The calls of a check. The worker closes just before one is made, or after the last.
CALLS = ["_check", "_check_scheduler", "register_plugin", "identity", "run_on_each", "run"]
CALLS += ["log_event", None]


class Bare(Worker):
    """A worker in this process that is like one without the package.

    It says so when it is asked, and closes its connection over a task as soon as it may.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.may_close = asyncio.Event()
        self.handlers |= {"run": self.answer}
        self.stream_handlers |= {"compute-task": self.compute}

    async def answer(self, comm, **options):
        answer = await self.run(comm, **options)
        answer["result"].data["dask-image-ingest"] = None
        return answer

    async def compute(self, **_):
        await self.may_close.wait()
        raise ImportError("dask_image_ingest")


class Silent(Bare):
    """Such a worker that answers no call."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.may_close.set()
        self.handlers |= dict.fromkeys(("run", "plugin-add"), self.no_answer)

    async def no_answer(self, comm, **_):
        await asyncio.sleep(SECONDS)


@asynccontextmanager
async def cluster_whose_worker_closes(before, monkeypatch):
    """Address of the scheduler, its client, and warnings meanwhile."""
    async with (
        Scheduler(port=0, dashboard_address=":0") as scheduler,
        Bare(scheduler.address, nthreads=1) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):

        def closing(call):
            async def late(*args, **options):
                worker.may_close.set()
                while scheduler.workers:
                    await asyncio.sleep(0.01)
                return await call(*args, **options)

            return late

        async def no_answer(comm, **_):
            worker.may_close.set()
            await asyncio.sleep(SECONDS)

        def told(message, *_, **__):
            worker.may_close.set()
            messages.append(str(message))

        messages = []
        monkeypatch.setattr(scheduler_plugin.warnings, "warn", told)
        if before == "run":
            worker.handlers["run"] = no_answer
        elif before:
            places = {"register_plugin": client, "log_event": client, "identity": client.scheduler}
            place = places.get(before, scheduler_plugin)
            monkeypatch.setattr(place, before, closing(getattr(place, before)))
        yield scheduler.address, client, messages


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(scheduler_plugin, "_PATIENCE", 1.0)
    with dask.config.set({"scheduler": None, "distributed.comm.timeouts.connect": "1s"}):
        yield monkeypatch


def read(shards):
    return dii.read_webdataset_images(shards, columns=["__key__"], backend="pandas")


@pytest.mark.parametrize("before", CALLS)
def test_whenever_the_only_worker_closes_its_query_is_an_error(before, shards, patched):
    patched.setattr(scheduler_plugin, "_LONELY", 0.2)

    async def main():
        async with cluster_whose_worker_closes(before, patched) as (_, client, told):
            with pytest.raises(dii.ClusterError, match=r"no worker left .* no dask-image-ingest"):
                await asyncio.wait_for(client.compute(read(shards)), SECONDS)
            assert told
            assert all("no dask-image-ingest" in line for line in told)

    asyncio.run(main())


@pytest.mark.parametrize("before", ["_check", "run", None])
def test_whenever_the_only_worker_closes_another_one_takes_its_query(before, shards, patched):
    async def main():
        async with cluster_whose_worker_closes(before, patched) as (scheduler, client, told):
            future = client.compute(read(shards))
            while not told:
                await asyncio.sleep(0.01)
            async with Worker(scheduler, nthreads=1):
                assert len(await asyncio.wait_for(future, SECONDS)) == 24

    asyncio.run(main())


def test_a_worker_that_closes_instead_of_answering_late_ends_the_query(shards, patched):
    patched.setattr(scheduler_plugin, "_LONELY", 0.2)
    patched.setattr(scheduler_plugin, "_PATIENCE", 0.2)
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None}
    with (
        LocalCluster(n_workers=1, worker_class=Silent, **options) as cluster,
        Client(cluster),
        pytest.warns(UserWarning, match="not answered for|closed its connection"),
        pytest.raises(dii.ClusterError, match=r"no worker left .* no dask-image-ingest"),
    ):
        read(shards).compute()


def test_another_scheduler_at_the_same_address_is_checked_as_well(shards, patched):
    patched.setattr(scheduler_plugin, "_LONELY", 0.2)

    async def main():
        scheduler = await Scheduler(port=0, dashboard_address=":0")
        async with Client(scheduler.address, asynchronous=True) as client:
            async with Worker(scheduler.address, nthreads=1):
                await client.wait_for_workers(1)
                assert len(await client.compute(read(shards))) == 24
            before = client._scheduler_identity["id"]
            await scheduler.close()
            async with (
                Scheduler(port=scheduler.port, dashboard_address=":0") as scheduler,
                Bare(scheduler.address, nthreads=1) as worker,
            ):
                while client.status != "running" or client._scheduler_identity["id"] == before:
                    await asyncio.sleep(0.01)
                await client.wait_for_workers(1)
                worker.may_close.set()
                with (
                    # Dask does not tell a client that has connected again of warnings.
                    warnings.catch_warnings(action="ignore"),
                    pytest.raises(dii.ClusterError, match=r"no worker left .* no dask"),
                ):
                    await asyncio.wait_for(client.compute(read(shards)), SECONDS)

    asyncio.run(main())
