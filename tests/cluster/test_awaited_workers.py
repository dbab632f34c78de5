"""Reads that are made before a worker has joined are for workers, not for this machine."""

import warnings

import pytest
from distributed import Client, LocalCluster
from synthetic import write_shards

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """4 photographs of 6 MB, which are 92 MB decoded."""
    (path,) = write_shards(tmp_path_factory.mktemp("large"), 1, 4, size=(2400, 3200), distinct=1)
    return path


def test_auto_says_what_it_takes_while_there_is_no_worker(shard, monkeypatch):
    from dask_image_ingest.frames import pandas_backend

    # This machine could hold anything.
    monkeypatch.setattr(pandas_backend, "MEMORY_LIMIT", 1 << 50)
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster:
        with Client(cluster):
            with pytest.warns(UserWarning, match=r"no worker has joined .* takes 512 MiB"):
                dii.read_webdataset_images(shard, backend="pandas")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                asked = dii.read_webdataset_images(shard, backend="pandas", partition_size="30 MiB")
            assert asked.npartitions == 4
