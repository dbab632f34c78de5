"""Shards on the Hugging Face Hub: the token stays there, and ranges come from its storage."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
from hub_server import REPOSITORY, hub_server
from photo_shards import make_photos, write_photo_shards

import dask_image_ingest as dii
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
        hub.files["train/_index.parquet"] = (tmp_path / "index" / "_index.parquet").read_bytes()
        ddf = dii.read_webdataset_images(URL, **options)
        hub.counts.clear()
        assert len(ddf) == 24
        assert hub.counts["file"] <= 1


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
