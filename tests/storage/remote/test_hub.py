"""Shards on the Hugging Face Hub: the token stays there, and ranges come from its storage."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import dask
import numpy as np
import pytest
from faulty_server import patient
from forked_python import run_python
from hub_server import REPOSITORY, hub_server
from photo_shards import make_photos, write_photo_shards

import dask_image_ingest as dii
from dask_image_ingest.index import index_file
from dask_image_ingest.storage import open_shard
from dask_image_ingest.storage.hub_source import hub_address

URL = f"hf://datasets/{REPOSITORY}/train/*.tar"

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_photo_shards(make_photos(24), folder, 8)
    dii.write_index(folder / "*.tar")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {f"train/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("revision", ["", "@v1", "@refs/pr/1"])
def test_shards_on_the_hub_are_read_and_the_token_is_sent_to_the_hub_alone(folder, revision):
    local = dii.read_webdataset_images(folder / "*.tar", size=32).compute()
    url = URL.replace(REPOSITORY, REPOSITORY + revision)
    with hub_server(files(folder)) as hub:
        read = dii.read_webdataset_images(url, size=32, storage_options=hub.options).compute()
    assert hub.counts["storage"] > 0
    assert hub.counts["token to the storage"] == hub.counts["without token"] == 0
    assert read["__key__"].tolist() == local["__key__"].tolist()
    for got, expected in zip(read.images.arrays(), local.images.arrays(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_after_a_filter_ask_the_hub_once_for_each_shard(folder):
    with hub_server(files(folder)) as hub:
        ddf = dii.read_webdataset_images(URL, storage_options=hub.options)
        # Whether the repository exists, and its folder.
        assert (hub.counts["repository"], hub.counts["listing"]) == (1, 1)
        rows = ddf[["__key__", "__url__", "offset", "nbytes"]].compute()
        hub.counts.clear()
        decoded = dii.decode_images(rows.iloc[::2], size=32, storage_options=hub.options)
    assert decoded.error.isna().all()
    assert hub.counts["file"] == 3
    assert hub.counts["listing"] == hub.counts["repository"] == 0


def test_an_index_of_the_hubs_own_versions_opens_no_shard(folder, tmp_path):
    shards = {name: data for name, data in files(folder).items() if name.endswith(".tar")}
    with hub_server(shards) as hub:
        options = {"storage_options": hub.options}
        dii.write_index(URL, folder=tmp_path / "index", combined=True, **options)
        assert hub.counts["missing"] == 0
        hub.files["train/_index.parquet"] = (tmp_path / "index" / "_index.parquet").read_bytes()
        ddf = dii.read_webdataset_images(URL, **options)
        hub.counts.clear()
        assert len(ddf) == 24
        assert hub.counts["file"] <= 1


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Shards larger than the first request, with an index that was written before the upload."""
    folder = tmp_path_factory.mktemp("many")
    write_photo_shards(make_photos(80), folder, 4)
    dii.write_index(folder / "*.tar", combined=True)
    return folder


def test_rows_after_a_filter_take_three_round_trips_in_a_row(many):
    with hub_server(files(many)) as hub, patient():
        ddf = dii.read_webdataset_images(URL, storage_options=hub.options)
        rows = ddf[["__key__", "__url__", "offset", "nbytes"]].compute()
        hub.answered.clear()
        hub.latency = 0.5
        decoded = dii.decode_images(rows.iloc[::2], size=32, storage_options=hub.options)
        asked = len(hub.answered)
    assert len(decoded) == 40
    assert decoded.error.isna().all()
    assert asked >= 60
    # The Hub's answers, the first bytes of shards, the images.
    assert hub.in_a_row() <= 3


def test_rows_of_an_index_of_before_the_upload_are_counted_by_requests_at_once(many, monkeypatch):
    monkeypatch.setattr(index_file, "_passed", set())
    with hub_server(files(many)) as hub, patient():
        ddf = dii.read_webdataset_images(URL, storage_options=hub.options)
        hub.answered.clear()
        hub.latency = 0.5
        assert len(ddf) == 80
        assert hub.counts["file"] >= 20
        # A task for each shard would wait for ten times as many, with two threads.
        assert hub.in_a_row() <= 4


def test_a_shard_that_changed_after_its_index_is_counted_anew(many):
    changed = files(many)
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("one.txt"))
    shard = changed["train/photos-003.tar"]
    changed["train/photos-003.tar"] = other.getvalue()[:1024].ljust(len(shard), b"\0")
    with hub_server(changed) as hub:
        ddf = dii.read_webdataset_images(URL, storage_options=hub.options)
        with pytest.warns(UserWarning, match=r"is stale.*photos-003\.tar is read without it"):
            assert len(ddf) == 77
        # To be checked each one once, and again in the task that reads the changed one.
        assert hub.counts["file"] <= 20 + 4


def test_a_bucket_is_read_as_a_repository(folder):
    local = dii.read_webdataset_images(folder / "*.tar", size=32).compute()
    url = f"hf://buckets/{REPOSITORY}/train/*.tar"
    with hub_server(files(folder)) as hub:
        ddf = dii.read_webdataset_images(url, size=32, storage_options=hub.options)
        assert (hub.counts["repository"], hub.counts["listing"]) == (1, 1)
        read = ddf.compute()
    assert hub.counts["token to the storage"] == hub.counts["without token"] == 0
    assert read["__key__"].tolist() == local["__key__"].tolist()
    for got, expected in zip(read.images.arrays(), local.images.arrays(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.more
def test_workers_list_nothing_and_send_the_token_to_the_hub_alone(folder, client):
    with hub_server(files(folder)) as hub:
        ddf = dii.read_webdataset_images(URL, size=32, storage_options=hub.options)
        assert len(ddf.compute()) == 24
    assert (hub.counts["repository"], hub.counts["listing"]) == (1, 1)
    assert hub.counts["storage"] > 0
    assert hub.counts["token to the storage"] == hub.counts["without token"] == 0


_ASKS_ONCE = """
import sys
import dask
from dask_image_ingest.errors import ShardError
from dask_image_ingest.index import index_file
from dask_image_ingest.storage import open_shard

dask.config.set({"image-ingest.remote.retry-limit": 0})
try:
    with open_shard(sys.argv[1], {"endpoint": sys.argv[2], "token": sys.argv[3]}):
        pass
except ShardError as error:
    print(error)
"""


def test_a_wait_that_the_hub_asks_one_process_for_is_kept_by_all(folder):
    url = f"hf://datasets/{REPOSITORY}/train/photos-000.tar"
    with hub_server(files(folder), busy=1, wait=("Retry-After", "4")) as hub:
        other = run_python(_ASKS_ONCE, url, hub.url, hub.token)
        assert "429" in other.stdout, other.stderr
        with open_shard(url, hub.options) as shard:
            assert bytes(shard[:100]) == hub.files["train/photos-000.tar"][:100]
    refused, accepted, _ = hub.answered
    assert accepted[0] >= refused[1] + 3.9


def test_a_wait_is_known_by_the_header_of_the_hub_too(folder):
    url = f"hf://datasets/{REPOSITORY}/train/photos-000.tar"
    with (
        hub_server(files(folder), busy=1, wait=("RateLimit", '"resolvers";r=0;t=1')) as hub,
        open_shard(url, hub.options) as shard,
    ):
        assert shard[:1]
    refused, accepted, _ = hub.answered
    assert accepted[0] >= refused[1] + 0.9


def test_an_address_that_expires_is_asked_for_again(folder):
    with (
        hub_server(files(folder), lease=2) as hub,
        dask.config.set(
            {"image-ingest.remote.head": "4 KiB", "image-ingest.remote.request-size": "16 KiB"}
        ),
    ):
        ddf = dii.read_webdataset_images(URL, size=32, storage_options=hub.options)
        frame = ddf.compute(scheduler="sync")
    assert hub.counts["expired"] > 0
    assert len(frame) == 24
    assert frame.error.isna().all()


def test_a_busy_hub_is_asked_again_when_it_says(folder):
    with hub_server(files(folder), busy=1) as hub:
        ddf = dii.read_webdataset_images(URL, storage_options=hub.options)
        assert len(ddf) == 24


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("org/name/a.tar", "org/name/resolve/main/a.tar"),
        ("datasets/o/n/a b/c.tar", "datasets/o/n/resolve/main/a%20b/c.tar"),
        ("datasets/o/n@v1.0/c.tar", "datasets/o/n/resolve/v1.0/c.tar"),
        ("datasets/o/n@a%2Fb/c.tar", "datasets/o/n/resolve/a%2Fb/c.tar"),
        ("datasets/o/n@refs/pr/1/d/c.tar", "datasets/o/n/resolve/refs%2Fpr%2F1/d/c.tar"),
        ("spaces/o/n/c.tar", "spaces/o/n/resolve/main/c.tar"),
        ("buckets/o/n/d/c.tar", "buckets/o/n/resolve/d/c.tar"),
    ],
)
def test_the_address_of_a_file_is_that_of_the_hub(path, address):
    assert hub_address("https://hub", path) == f"https://hub/{address}"
