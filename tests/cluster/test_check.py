"""Workers that can't run tasks of this package are told apart before they get one."""

import asyncio
import io
import os
import platform
import shutil
import signal
import sys
import time
import warnings

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask import delayed
from distributed import Client
from hand_started import HandStarted, packages_without
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest import progress_bar, scheduler_plugin
from dask_image_ingest.environment import Portable, environment

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
    cluster.worker(PYTHONPATH=request.getfixturevalue(lacks))
    with cluster.client(1) as client:
        (address,) = client.scheduler_info()["workers"]
        ddf = read(shards)
        said = f"1 worker has {said}: {platform.node()} \\({address}\\)"
        for compute in (ddf.compute, client.compute(ddf).result, ddf.__len__):
            with pytest.raises(dii.ClusterError, match=said):
                compute()
        # What does not need this package is computed.
        assert delayed(sum)([1, 2]).compute() == 3
        assert ddf.__key__.count().compute(scheduler="synchronous") == 24
        assert list(client.scheduler_info()["workers"]) == [address]


def test_a_scheduler_that_lacks_the_package_is_an_error(tmp_path, bare, shards, monkeypatch):
    with HandStarted(tmp_path, PYTHONPATH=bare) as cluster, dask.config.set(scheduler=None):
        cluster.worker(PYTHONPATH=f"{REPOSITORY}:{bare}")
        with (
            cluster.client(1),
            pytest.raises(dii.ClusterError, match=f"The scheduler .*{platform.node()}, has no"),
        ):
            read(shards).compute()
        # What does not need the package has its line all the same.
        monkeypatch.setattr(progress_bar, "_PATIENCE", 0.1)
        monkeypatch.setattr(progress_bar, "_EVERY", 0.1)
        out = io.StringIO()
        with cluster.client(1), dii.progress(out):
            assert delayed(lambda: time.sleep(0.5) or 3)().compute() == 3
        assert out.getvalue().startswith("1/1 tasks in")


def test_workers_that_lack_the_package_stay_out_where_others_have_it(cluster, bare, shards):
    cluster.worker()
    cluster.worker("--host", "127.0.0.2", PYTHONPATH=bare)
    with cluster.client(2) as client:
        with pytest.warns(UserWarning, match=r"1 worker has no dask-image-ingest: .*127\.0\.0\.2"):
            assert len(read(shards).compute()) == 24
        with warnings.catch_warnings(action="error"):  # once is enough
            assert len(read(shards[:2]).compute()) == 16
            # Shuffles between workers choose by address where rows go.
            ddf = dii.read_webdataset_images(shards, backend="pandas", size=8)
            labels = pd.DataFrame({"__key__": ddf["__key__"].compute(), "label": range(24)})
            others = dd.from_pandas(labels, npartitions=3)
            with dask.config.set({"dataframe.shuffle.method": "p2p"}):
                assert len(ddf.shuffle("__key__").compute()) == 24
                merged = ddf.merge(others, on="__key__").compute()
            assert sorted(merged["label"]) == list(range(24))
            assert ddf.groupby("cls").size(split_out=2).compute().sum() == 24
        assert len(client.scheduler_info()["workers"]) == 2
        assert "Failed to deserialize" not in cluster.log()
        # Both workers and the scheduler were asked, for all queries.
        assert cluster.log().count("Run out-of-band function 'environment'") == 3


def test_a_query_that_waits_for_workers_fails_when_only_unfit_ones_join(cluster, bare, shards):
    with cluster.client(0) as client:
        ddf = dii.read_webdataset_images(
            shards, columns=["__key__"], backend="pandas", partition_size=None
        )
        future = client.compute(ddf)
        cluster.worker(PYTHONPATH=bare)
        with pytest.raises(dii.ClusterError, match="1 worker has no dask-image-ingest"):
            future.result(SECONDS)
        # It is not lost, and what does not need this package is computed.
        assert delayed(sum)([1, 2]).compute() == 3


def test_a_worker_without_the_package_that_joins_amid_a_query_gets_no_part_of_it(
    cluster, bare, shards, tmp_path
):
    cluster.worker()
    with cluster.client(1) as client, warnings.catch_warnings(action="ignore"):
        joined = tmp_path / "joined"
        ddf = read(shards)
        future = client.compute(ddf.map_partitions(waits_for, str(joined), meta=ddf._meta))
        until(lambda: any(client.processing().values()))
        cluster.worker(PYTHONPATH=bare)
        client.wait_for_workers(2, timeout=SECONDS)
        joined.touch()
        assert len(future.result(SECONDS)) == 24
        assert {len(read(shards).compute()) for _ in range(3)} == {24}
        assert len(client.scheduler_info()["workers"]) == 2
        assert "Failed to deserialize" not in cluster.log()


def waits_for(frame, path):
    until(lambda: os.path.exists(path))
    return frame


def test_a_worker_that_does_not_answer_is_left_out_until_it_does(
    cluster, bare, shards, monkeypatch
):
    monkeypatch.setattr(sys.modules["dask_image_ingest.cluster.prepare"], "_PATIENCE", 1.0)
    monkeypatch.setattr(scheduler_plugin, "_PATIENCE", 5.0)
    worker = cluster.worker("--no-nanny", "--name", "stopped")
    cluster.worker()
    cluster.worker("--host", "127.0.0.2", PYTHONPATH=bare)
    with cluster.client(3) as client:
        present = client.scheduler_info()["workers"].items()
        (stopped,) = (address for address, each in present if each["name"] == "stopped")
        client.run(Portable(environment))  # so that the others answer at once next time
        os.killpg(worker.pid, signal.SIGSTOP)
        try:
            with pytest.warns(UserWarning, match=rf"not answered yet: {stopped}") as told:
                assert len(read(shards).compute()) == 24
            assert "1 worker has no dask-image-ingest" in str(told[0].message)
            assert pd.isna(installed(client)[stopped])
        finally:
            os.killpg(worker.pid, signal.SIGCONT)
        until(lambda: installed(client)[stopped] == dii.__version__)
        assert {len(read(shards).compute()) for _ in range(3)} == {24}


def installed(client):
    """The version of the package by worker."""
    with warnings.catch_warnings(action="ignore"):
        return dii.prepare(client).set_index("address")["dask-image-ingest"]


def test_an_asynchronous_client_is_told_too(cluster, bare, older, shards):
    async def ask(client, paths):
        ddf = dii.read_webdataset_images(
            paths, columns=["__key__"], backend="pandas", partition_size=None
        )
        return await client.compute(ddf)

    async def main():
        async with Client(scheduler_file=cluster.address, asynchronous=True) as client:
            await client.wait_for_workers(1, timeout=SECONDS)
            with pytest.raises(dii.ClusterError, match=r"dask-image-ingest 0\.0\.9"):
                await ask(client, shards)
            cluster.worker()
            await client.wait_for_workers(2, timeout=SECONDS)
            return len(await ask(client, shards[:2]))

    cluster.worker(PYTHONPATH=older)
    with warnings.catch_warnings(action="ignore"):
        assert asyncio.run(main()) == 16
