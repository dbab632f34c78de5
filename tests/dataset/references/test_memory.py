"""Workers that can hold a fraction of the pixels move all rows, and none of them dies of it."""

from __future__ import annotations

import io
import os

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from photo_shards import encode, make_photos, write_tar
from PIL import Image

import dask_image_ingest as dii

pytestmark = [pytest.mark.slow, pytest.mark.newest]

SHARDS, IMAGES, CLASSES = 14, 10, 20
SIZE = (2000, 1500)


@pytest.fixture(scope="module")
def encoded():
    """Photographs of three megapixels, of which sample n is the one n % 8."""
    return [
        encode(Image.fromarray(photo.pixels).convert("RGB").resize(SIZE))
        for photo in make_photos(8)
    ]


@pytest.fixture(scope="module")
def want(encoded):
    """The same as Pillow has them."""
    return [np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")) for jpeg in encoded]


@pytest.fixture(scope="module")
def shards(encoded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    paths = []
    for shard in range(SHARDS):
        numbers = range(shard * IMAGES, (shard + 1) * IMAGES)
        members = {
            name: content
            for n in numbers
            for name, content in (
                (f"{n:03}.jpg", encoded[n % 8]),
                (f"{n:03}.cls", str(n * 7 % CLASSES).encode()),
            )
        }
        paths.append(str(write_tar(folder / f"{shard:02}.tar", members)))
    return paths


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    options = {"memory_limit": "1 GB", "dashboard_address": None}
    with dii.start_cluster(2, gpu=False, **options) as client:
        yield client


def means(group):
    keys = [str(key) for key in group["__key__"]]
    return pd.DataFrame({"key": keys, "mean": [a.mean() for a in group.images.arrays()]})


@pytest.mark.nightly
def test_more_pixels_than_workers_hold_are_moved_and_no_worker_dies(client, shards, want, tmp_path):
    ddf = dii.read_webdataset_images(shards, backend="pandas", members={"cls": "int64"})
    rows = SHARDS * IMAGES
    # A worker has 1 GB, of which libraries take half; two partitions have more than 0.6 each.
    assert rows * want[0].nbytes > 1.2e9
    workers = client.run(os.getpid)
    keys = [f"{n:03}" for n in range(rows)]
    pd.DataFrame({"__key__": keys, "score": range(rows)}).to_parquet(tmp_path / "scores.parquet")
    scores = dd.read_parquet(tmp_path / "scores.parquet")

    uneven = ddf.shuffle("cls", npartitions=2)
    stats = ddf.images.channel_stats().compute()
    pixels = np.stack([want[n % 8].reshape(-1, 3).mean(axis=0) for n in range(rows)])
    np.testing.assert_allclose(stats["mean"].to_numpy(float), pixels.mean(axis=0), atol=0.5)

    moves = [
        ddf.sort_values("offset"),
        ddf.set_index("__key__", drop=False),
        ddf.merge(scores, on="__key__"),
    ]
    for moved in moves:
        seen = []
        for batch in moved.images.iter_batches(8, columns=["__key__"]):
            number = int(batch["__key__"][0])
            np.testing.assert_allclose(
                batch["image"][0][::9, ::9], want[number % 8][::9, ::9].astype(float), atol=4
            )
            seen += batch["__key__"].tolist()
        assert sorted(seen) == keys

    meta = {"key": "object", "mean": "float64"}
    groups = uneven.groupby("cls").apply(means, meta=meta).compute()
    assert sorted(groups["key"]) == keys
    by_pillow = [want[int(key) % 8].mean() for key in groups["key"]]
    np.testing.assert_allclose(groups["mean"].to_numpy(float), by_pillow, atol=0.5)

    assert client.run(os.getpid) == workers
