"""An error of a worker says which one, and whether the client sees what is missing there."""

import pickle
import platform

import dask
import pytest
from hand_started import HandStarted

import dask_image_ingest as dii

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with (
        HandStarted(tmp_path_factory.mktemp("cluster")) as cluster,
        dask.config.set(scheduler=None),
    ):
        cluster.worker()
        with cluster.client(1) as client:
            yield client


def on_worker(client) -> str:
    (address,) = client.nthreads()
    return rf" \[worker {address} on {platform.node()}\]"


def test_a_shard_that_only_the_client_sees(client, shards, monkeypatch):
    monkeypatch.chdir(shards[0].parent)
    # The working directory of whichever process asks.
    ddf = dii.read_webdataset_images("/proc/self/cwd/*.tar", backend="pandas")
    said = rf"photos-00\d.tar is not found.*{on_worker(client)}"
    with pytest.raises(dii.ShardNotFoundError, match=said):
        ddf.compute()


def test_an_index_that_a_worker_does_not_see(client, tmp_path, shards):
    path = tmp_path / "indexed.tar"
    path.write_bytes(shards[0].read_bytes())
    dii.write_index(path)
    ddf = dii.read_webdataset_images(path, columns=["__key__"], backend="pandas")
    path.with_name("indexed.tar.index.parquet").unlink()
    with pytest.warns(UserWarning, match=rf"indexed\.tar is read without it{on_worker(client)}"):
        assert len(ddf.compute()) == 8


def test_a_shard_that_nobody_sees_any_more(client, tmp_path, shards):
    path = tmp_path / "gone.tar"
    path.write_bytes(shards[0].read_bytes())
    ddf = dii.read_webdataset_images(path, backend="pandas")
    path.unlink()
    said = rf"gone\.tar is not found{on_worker(client)}"
    with pytest.raises(dii.ShardNotFoundError, match=said):
        ddf.compute()
    with pytest.raises(dii.ShardNotFoundError) as raised:
        ddf.compute(scheduler="synchronous")
    assert "worker" not in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_shard_that_is_none(client, tmp_path, shards):
    for name in ("0.tar", "1.tar"):
        (tmp_path / name).write_bytes(shards[0].read_bytes())
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
    (tmp_path / "1.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(dii.ShardError, match=on_worker(client)):
        ddf.compute()
