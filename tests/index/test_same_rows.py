"""What is read with an index is what is read without one: rows, types, partitions, warnings."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from random_shards import random_shards

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import samples as warning_module

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [
    {},
    {"errors": "drop", "size": 16},
    {"image": "png;seg.png;webp;jpg", "partition_size": 20_000},
    {"image": "seg.npy;jpeg", "max_pixels": 2000},
    {"members": {"txt": "string", "cls": "int64", "npy": "binary", "json": "string"}},
    {"json_fields": {"similarity": "float64", "n": "int32", "deep.er": "string", "no": "int8"}},
    {"members": {"txt": "int64", "json": "binary", "": "binary"}, "partition_size": None},
]
QUERIES = [
    lambda d: d,
    lambda d: d.drop(columns=["image", "error"]),
    lambda d: d[["__key__", "height", "format"]],
    lambda d: d[d.width > 60][["width", "channels", "__key__"]],
    lambda d: d[["offset", "nbytes"]],
    lambda d: d[d.height > d.width],
    lambda d: d[["error"]],
    lambda d: d.loc[d.format == "jpeg", ["__key__", "error", "height"]],
    lambda d: d.partitions[-1],
    lambda d: d[d.txt.isna()] if "txt" in d.columns else d[["nbytes"]],
]


def answer(paths: list[str], query, caplog, **options) -> tuple[Any, ...]:
    """All that comes back: rows or the error, and whatever was said on the way."""
    warning_module._warned_extensions.clear()
    caplog.clear()
    with warnings.catch_warnings(record=True) as said, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        try:
            ddf = dii.read_webdataset_images(paths, backend="pandas", **options)
            asked = query(ddf)
            parts = [part.compute() for part in asked.partitions]
            found = parts, ddf.npartitions, ddf.divisions, ddf.dtypes
            assert len(asked) == sum(map(len, parts))
        except dii.DaskImageIngestError as error:
            found = type(error), str(error)
    stale = "is not used: it is stale"
    told = sorted(text for each in said if stale not in (text := str(each.message)))
    return found, told, sorted(record.getMessage() for record in caplog.records)


def assert_same(one: Any, other: Any) -> None:
    assert other[1:] == one[1:]
    one, other = one[0], other[0]
    if isinstance(one[0], type):
        assert other == one
        return
    assert other[1:3] == one[1:3]
    pd.testing.assert_series_equal(other[3], one[3])
    for mine, theirs in zip(other[0], one[0], strict=True):
        pd.testing.assert_frame_equal(mine, theirs)


@pytest.mark.rounds(2, nightly=200)
def test_any_tar_reads_the_same_with_our_index(tmp_path, caplog, seed, rng):
    paths = random_shards(tmp_path / "shards", seed)
    chosen = rng.choice(OPTIONS) | {"shard_errors": rng.choice(["raise", "drop"])}
    query = rng.choice(QUERIES)
    expected = answer(paths, query, caplog, index=False, **chosen)
    folder = rng.choice([None, tmp_path / "indexes"])
    written = dii.write_index(paths, folder=folder, shard_errors="drop")
    index = {"index": folder} if folder else rng.choice([{}, {"index": "auto"}])
    if not (written["state"] == "failed").any() and not folder:
        index = rng.choice([index, {"index": True}])
    assert_same(expected, answer(paths, query, caplog, **chosen, **index))


@pytest.mark.rounds(2, nightly=200)
def test_any_mixture_of_indexes_reads_the_same(tmp_path, caplog, seed, rng):
    """Shards with an index of their own, in the common one, in both and in none, stale or not."""
    folder = tmp_path / "shards"
    paths = [
        path.rename(folder / f"{number}-{path.name}")
        for number in range(3)
        for path in map(Path, random_shards(folder, 3 * seed + number))
    ]
    chosen = rng.choice(OPTIONS) | {"shard_errors": rng.choice(["raise", "drop"])}
    chosen |= {"shards_per_partition": rng.choice([1, 2, 3, "auto"])}
    query = rng.choice(QUERIES)
    for _ in range(rng.randrange(1, 4)):
        some = rng.sample(paths, rng.randrange(1, len(paths) + 1))
        dii.write_index(some, combined=rng.random() < 0.6, shard_errors="drop")
        for path in rng.sample(paths, rng.randrange(3)):
            path.touch()
    expected = answer(paths, query, caplog, index=False, **chosen)
    assert_same(expected, answer(paths, query, caplog, **chosen))
