"""Reads that are made before a worker has joined are for workers, not for this machine."""

import warnings

import pytest
from distributed import Client, LocalCluster
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest import client
from dask_image_ingest.dataset.scan import partitioning


def test_auto_says_what_it_takes_while_there_is_no_worker(tmp_path, monkeypatch):
    # 4 photographs, 88 MiB decoded, and a machine that could hold anything.
    write_shards(tmp_path, 1, 4, size=(2400, 3200), distinct=1)
    monkeypatch.setattr(client, "MEMORY_LIMIT", 1 << 50)
    monkeypatch.setattr(partitioning, "_DEFAULT_SIZE", 30 << 20)
    none = LocalCluster(n_workers=0, processes=False, dashboard_address=None)
    with none as cluster, Client(cluster):
        with pytest.warns(UserWarning, match=r"no worker has joined.* takes 30 MiB"):
            ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
        assert ddf.npartitions == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asked = dii.read_webdataset_images(tmp_path, backend="pandas", partition_size="1 GiB")
        assert asked.npartitions == 1


def test_auto_takes_the_memory_of_the_workers(tmp_path):
    write_shards(tmp_path, 1, 4, size=(2400, 3200), distinct=1)
    one = LocalCluster(n_workers=1, processes=False, dashboard_address=None, memory_limit="600 MiB")
    with one as cluster, Client(cluster):
        with warnings.catch_warnings(action="error"):
            ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
        # A sixteenth of 600 MiB, of 88 MiB in all.
        assert ddf.npartitions == 3


def test_workers_are_known_whenever_the_client_updates_its_totals(tmp_path, monkeypatch):
    async def overtaken(client, n_workers=0):
        await update(client, n_workers)
        await update(client)  # as its periodic callback does, without workers

    update = Client._update_scheduler_info
    write_shards(tmp_path, 1, 1)
    # All of this process counts as the worker's memory: over a small limit it would pause for ever.
    one = LocalCluster(n_workers=1, processes=False, dashboard_address=None, memory_limit="64 GiB")
    with one as cluster, Client(cluster) as client:
        monkeypatch.setattr(Client, "_update_scheduler_info", overtaken)
        assert not client.scheduler_info()["workers"]
        with warnings.catch_warnings(action="error"):
            assert len(dii.read_webdataset_images(tmp_path, backend="pandas")) == 1
        (threads,) = dii.prepare_cluster(client)["threads"]
        assert {threads} == {*client.nthreads().values()}


def test_auto_says_what_it_takes_where_workers_have_no_limit(tmp_path, monkeypatch):
    write_shards(tmp_path, 1, 4, size=(2400, 3200), distinct=1)
    monkeypatch.setattr(client, "MEMORY_LIMIT", 1 << 50)
    monkeypatch.setattr(partitioning, "_DEFAULT_SIZE", 30 << 20)
    unlimited = LocalCluster(
        n_workers=1, processes=False, dashboard_address=None, memory_limit=None
    )
    with unlimited as cluster, Client(cluster):
        with pytest.warns(UserWarning, match=r"no worker has a memory limit.* takes 30 MiB"):
            ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
        assert ddf.npartitions == 3
