"""Labels of rows: unique in a read, and the same in all reads of a shard."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from query_answers import answer

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import partitioning
from dask_image_ingest.dataset.scan.partitioning import first_labels


@pytest.fixture
def labels(shards):
    """The label of each key, of a read with options."""

    def labels(paths=shards, **options):
        ddf = dii.read_webdataset_images(paths, backend="pandas", **options)
        keys = ddf[["__key__"]].compute()
        assert keys.index.is_unique
        assert keys.index.dtype == np.int64
        assert keys.index.min() >= 0
        return dict(zip(keys["__key__"], keys.index, strict=True))

    return labels


def test_labels_depend_on_the_shard_and_the_place_in_it_alone(labels, shards, photos, tmp_path):
    want = labels()
    assert len(want) == len(photos)
    assert labels([*reversed(shards)]) == want
    assert labels(shards[1:]).items() <= want.items()
    for options in (
        {"partition_size": 50_000},
        {"shards_per_partition": 2},
        {"size": 8, "partition_size": 1000},
        {"filters": [("width", ">", 100)]},
    ):
        assert labels(**options).items() <= want.items()
    for path in shards:
        shutil.copy(path, tmp_path)
    without = labels(tmp_path)
    dii.write_index(tmp_path)
    assert labels(tmp_path, index=True) == labels(tmp_path, index=False) == without
    assert labels(tmp_path, index=True, partition_size=50_000) == without


def test_decoded_rows_keep_their_labels(labels, shards):
    want = labels()
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=8, shards_per_partition=2)
    decoded = ddf.compute()
    assert dict(zip(decoded["__key__"], decoded.index, strict=True)) == want
    moved = ddf[ddf.width > 100].sort_values("nbytes").compute()
    assert dict(zip(moved["__key__"], moved.index, strict=True)).items() <= want.items()


def test_rows_of_a_parquet_file_have_the_labels_of_their_places(shards, tmp_path):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=8)
    dii.to_parquet_images(ddf, tmp_path / "{shard}.parquet")
    whole = dii.read_parquet_images(tmp_path, backend="pandas")
    parts = dii.read_parquet_images(tmp_path, backend="pandas", size=8, partition_size=1000)
    assert parts.npartitions > whole.npartitions
    columns = ["__key__", "nbytes"]
    assert answer(parts[columns].compute()) == answer(whole[columns].compute())
    assert whole["__key__"].compute().index.is_unique


def test_shards_with_equal_digests_have_labels_of_their_own(monkeypatch):
    monkeypatch.setattr(partitioning, "digest_of_url", lambda url: len(url) << 24)
    urls = [f"/{number}.tar" for number in range(9)]
    firsts = first_labels([*urls, "/10.tar"])
    assert first_labels(["/10.tar", *reversed(urls)]) == firsts
    assert sorted(firsts.values()) == [number << 24 for number in range(6, 16)]


def test_secrets_of_a_url_do_not_change_labels():
    signed = "https://host/a.tar?X-Amz-Signature=0123&part=2"
    assert [*first_labels([signed]).values()] == [
        *first_labels(["https://host/a.tar?part=2"]).values()
    ]
