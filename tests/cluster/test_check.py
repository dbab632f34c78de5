"""Workers that can't run tasks of this package are refused before they get one."""

import asyncio
import io
import os
import platform
import shutil
import signal
import time
import warnings

import dask
import pytest
from dask import delayed
from distributed import Client
from hand_started import HandStarted, packages_without
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest import computing, scheduler_plugin
from dask_image_ingest.environment import environment

pytestmark = pytest.mark.slow

REPOSITORY = str(dii.__path__[0]).rpartition("/")[0]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> str:
    """A path with all packages but this one."""
    return packages_without(tmp_path_factory.mktemp("bare") / "site")


@pytest.fixture(scope="module")
def older(bare, tmp_path_factory) -> str:
    """A path with another version of this package."""
    folder = tmp_path_factory.mktemp("older")
    shutil.copytree(dii.__path__[0], folder / "dask_image_ingest")
    module = folder / "dask_image_ingest" / "__init__.py"
    module.write_text(module.read_text().replace(dii.__version__, "0.0.9"))
    return f"{folder}:{bare}"


@pytest.fixture(scope="module")
def no_dali(tmp_path_factory) -> str:
    folder = packages_without(tmp_path_factory.mktemp("no_dali") / "site", "nvidia")
    return f"{REPOSITORY}:{folder}"


@pytest.fixture
def cluster(tmp_path):
    with HandStarted(tmp_path / "cluster") as started, dask.config.set(scheduler=None):
        yield started


def read(shards):
    return dii.read_webdataset_images(shards, columns=["__key__"], backend="pandas")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("bare", "no dask-image-ingest"),
        ("older", rf"dask-image-ingest 0\.0\.9 \(here {dii.__version__}\)"),
        ("no_dali", "no DALI"),
    ],
)
def test_workers_that_lack_something_are_an_error_that_names_them(
    lacks, said, request, cluster, shards
):
    if lacks == "no_dali" and environment()["dali"] is None:
        pytest.skip("this process has no DALI either")
    cluster.worker("--no-nanny", PYTHONPATH=request.getfixturevalue(lacks))
    with cluster.client(1) as client:
        (address,) = client.nthreads()
        ddf = read(shards)
        said = f"1 worker has {said}: {platform.node()} \\({address}\\)"
        for compute in (ddf.compute, lambda: client.compute(ddf), ddf.__len__):
            with pytest.raises(dii.ClusterError, match=said):
                compute()
        # What does not need this package is computed.
        assert delayed(sum)([1, 2]).compute() == 3
        assert ddf.__key__.count().compute(scheduler="synchronous") == 24
        assert list(client.nthreads()) == [address]


def test_a_scheduler_that_lacks_the_package_is_an_error(tmp_path, bare, shards, monkeypatch):
    with HandStarted(tmp_path, PYTHONPATH=bare) as cluster, dask.config.set(scheduler=None):
        cluster.worker(PYTHONPATH="")
        with (
            cluster.client(1),
            pytest.raises(dii.ClusterError, match=f"The scheduler .*{platform.node()}, has no"),
        ):
            read(shards).compute()
        # What does not need the package has its line all the same.
        monkeypatch.setattr(computing, "_PATIENCE", 0.1)
        monkeypatch.setattr(computing, "_EVERY", 0.1)
        out = io.StringIO()
        with cluster.client(1), dii.progress(out):
            assert delayed(lambda: time.sleep(0.5) or 3)().compute() == 3
        assert " 1/1 tasks in" in out.getvalue()


def test_one_worker_that_lacks_the_package_is_named_and_may_be_retired(cluster, bare, shards):
    cluster.worker()
    cluster.worker("--no-nanny", "--host", "127.0.0.2", PYTHONPATH=bare)
    with cluster.client(2) as client:
        ddf = read(shards)
        for ask in (ddf.compute, lambda: dii.prepare(client, shards)):
            with pytest.raises(dii.ClusterError, match=r"1 worker has no dask.*127\.0\.0\.2"):
                ask()
        (unfit,) = (each for each in client.nthreads() if "127.0.0.2" in each)
        # Neither has harmed what it computes for others.
        assert client.submit(sum, [1, 2], workers=[unfit]).result() == 3
        client.retire_workers([unfit])
        assert len(ddf.compute()) == 24
        assert "Failed to deserialize" not in cluster.log()


@pytest.mark.parametrize("nanny", ["--nanny", "--no-nanny"])
def test_a_worker_that_joins_amid_a_query_is_refused_and_the_query_goes_on(
    nanny, cluster, older, shards, tmp_path
):
    cluster.worker()
    with cluster.client(1) as client, Client(cluster.scheduler, set_as_default=False) as other:
        joined = tmp_path / "joined"
        ddf = read(shards)
        future = client.compute(ddf.map_partitions(waits_for, str(joined), meta=ddf._meta))
        until(lambda: any(client.processing().values()))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            unfit = cluster.worker(nanny, PYTHONPATH=older)
            unfit.wait(SECONDS)  # it has not been started again
            # All clients are told, also those without queries of this package.
            until(lambda: len(told) == 2)
        assert "dask-image-ingest 0.0.9" in str(told[0].message)
        joined.touch()
        assert len(future.result(SECONDS)) == 24
        assert len(other.nthreads()) == 1
        assert not client.run_on_scheduler(suspected)
        assert "Failed to deserialize" not in cluster.log()


def waits_for(frame, path):
    until(lambda: os.path.exists(path))
    return frame


def suspected(dask_scheduler):
    return [task.key for task in dask_scheduler.tasks.values() if task.suspicious]


def test_a_query_whose_last_fit_worker_dies_fails_and_work_of_others_waits(
    cluster, bare, shards, monkeypatch
):
    monkeypatch.setattr(scheduler_plugin, "_LONELY", 0.1)
    fit = cluster.worker("--no-nanny")
    with cluster.client(1) as client, warnings.catch_warnings(action="ignore"):
        ddf, part = read(shards), read(shards[:1])
        assert len(ddf) == 24
        cluster.worker("--no-nanny", PYTHONPATH=bare).wait(SECONDS)
        assert len(ddf) == 24
        never = ddf.map_partitions(waits_for, "nowhere", meta=ddf._meta)
        running = client.compute(never)
        until(lambda: any(client.processing().values()))
        os.killpg(fit.pid, signal.SIGKILL)
        for query in (running, client.compute(ddf)):
            with pytest.raises(dii.ClusterError, match=r"no worker left.* 1 worker has no dask"):
                query.result(SECONDS)
        waiting = client.submit(sum, [1, 2])
        with pytest.raises(dii.ClusterError, match="no worker left"):
            part.compute()
        assert not waiting.done()
        cluster.worker()
        assert waiting.result(SECONDS) == 3
        assert len(read(shards[:2]).compute()) == 16


def test_a_worker_that_does_not_answer_is_named_and_gets_tasks_when_it_does(
    cluster, shards, monkeypatch
):
    monkeypatch.setattr(scheduler_plugin, "_PATIENCE", 1.0)
    worker = cluster.worker("--no-nanny")
    with cluster.client(1) as client:
        (stopped,) = client.nthreads()
        os.killpg(worker.pid, signal.SIGSTOP)
        try:
            with pytest.warns(UserWarning, match=rf"not answered for 1 s: {stopped}"):
                future = client.compute(read(shards))
        finally:
            os.killpg(worker.pid, signal.SIGCONT)
        assert len(future.result(SECONDS)) == 24


def test_an_asynchronous_client_is_told_too(cluster, bare, shards, monkeypatch):
    monkeypatch.setattr(scheduler_plugin, "_LONELY", 0.1)
    # Whether it is asked before it reads its first task is a race.
    said = r"1 worker has (no dask|closed its connection .* no dask)"

    async def main():
        async with Client(scheduler_file=cluster.address, asynchronous=True) as client:
            await client.wait_for_workers(1, timeout=SECONDS)
            future = client.compute(read(shards))
            with pytest.raises(dii.ClusterError, match=said):
                await future
            cluster.worker()
            await client.wait_for_workers(1, timeout=SECONDS)
            return len(await client.compute(read(shards[:2])))

    cluster.worker(PYTHONPATH=bare)
    with pytest.warns(UserWarning, match=said):
        assert asyncio.run(main()) == 16
