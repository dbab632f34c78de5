"""Workers that somebody else started have what they need, also those that come later."""

import os
import platform
import sys
import warnings

import dask
import pytest
from distributed import Client
from hand_started import HandStarted
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest.client import environment
from dask_image_ingest.decode.dali import decode_threads

pytestmark = pytest.mark.slow

LIMIT = "image-ingest.remote.retry-limit"


@pytest.fixture
def cluster(tmp_path):
    with HandStarted(tmp_path / "cluster") as started, dask.config.set(scheduler=None):
        yield started


def is_warm() -> bool:
    """Whether this process has decoded something."""
    warm = sys.modules.get("dask_image_ingest.cluster.prepare")
    return (
        warm is not None
        and "dask_image_ingest.decode.planner" in sys.modules
        and len(warm._warming) == 1
        and not warm._warming[0].is_alive()
    )


def become(client: Client, function, expected) -> None:
    """Wait until a function gives the same on all workers."""
    until(lambda: set(client.run(function).values()) == {expected})


def configured():
    return dask.config.get("image-ingest.remote.retry-limit", None)


def test_all_workers_are_prepared_and_told_of(cluster, shards):
    cluster.worker("--memory-limit", "2 GiB")
    cluster.worker("--memory-limit", "2 GiB", "--no-nanny")
    with cluster.client(2) as client:
        with dask.config.set({LIMIT: "9s"}), warnings.catch_warnings(action="error"):
            warnings.filterwarnings("ignore", "more threads")  # on a machine of one core
            table = dii.prepare_cluster(client, shards[0].parent)
        become(client, is_warm, True)
        become(client, configured, "9s")
        assert table["address"].tolist() == list(client.nthreads())
        assert set(table["host"]) == {platform.node()}
        assert set(table["threads"]) == {1}
        assert set(table["cores"]) == {len(os.sched_getaffinity(0))}
        assert set(table["memory_limit"]) == {2 << 30}
        assert set(table["shards"]) == {3}
        here = environment()
        for name in ("dask-image-ingest", "dask", "distributed", "pandas", "pyarrow", "python"):
            assert set(table[name]) == {here[name]}
        assert table["dali"].tolist() == [here["dali"]] * 2

        cluster.worker()
        client.wait_for_workers(3, timeout=SECONDS)
        become(client, configured, "9s")
        become(client, is_warm, True)

        client.restart_workers(
            [address for address in table["address"] if has_nanny(client, address)]
        )
        client.wait_for_workers(3, timeout=SECONDS)
        become(client, configured, "9s")

        # Once more, with another configuration.
        with dask.config.set({LIMIT: "8s"}), warnings.catch_warnings(action="ignore"):
            table = dii.prepare_cluster(client)
        become(client, configured, "8s")
        assert len(table) == 3
        assert "shards" not in table

        # What is no longer configured does not stay.
        with warnings.catch_warnings(action="ignore"):
            dii.prepare_cluster(client)
        become(client, configured, None)


def test_it_keeps_what_a_cluster_was_started_with():
    with (
        dii.start_cluster(1, gpu=False, decode_threads=3, dashboard_address=None) as client,
        warnings.catch_warnings(action="ignore"),
    ):
        for limit in ("9s", "8s"):
            with dask.config.set({LIMIT: limit}):
                dii.prepare_cluster(client)
            become(client, configured, limit)
            become(client, decode_threads, 3)


def has_nanny(client: Client, address: str) -> bool:
    return client.run(lambda dask_worker: dask_worker.nanny, workers=[address])[address] is not None


def test_what_will_be_slow_or_wrong_is_a_warning(cluster, shards, monkeypatch):
    cluster.worker("--nthreads", "99", "--memory-limit", "0")
    monkeypatch.chdir(shards[0].parent)
    with cluster.client(1) as client, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        table = dii.prepare_cluster(client, "*.tar")  # of the client's working directory
    host = platform.node()
    said = [str(each.message) for each in told]
    assert table["shards"].tolist() == [0]
    assert [each for each in said if f"than cores on {host} (99 on" in each]
    assert [each for each in said if f"1 worker on {host} has no memory limit" in each]
    assert [each for each in said if "other shards than this process, which sees 3" in each]
    assert len(said) == 3


def test_with_the_preload_a_worker_is_ready_before_any_client_comes(cluster):
    cluster.worker("--preload", "dask_image_ingest")
    with cluster.client(1) as client:
        become(client, is_warm, True)


def test_an_asynchronous_client_is_refused():
    async def main() -> None:
        async with Client(processes=False, asynchronous=True, dashboard_address=":0") as client:
            with pytest.raises(dii.ArgumentError, match="asynchronous"):
                dii.prepare_cluster(client)

    import asyncio

    asyncio.run(main())
