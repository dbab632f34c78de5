"""Which sample is in which shard: by count, by bytes, in order or shuffled, never by partition."""

from __future__ import annotations

import os
import random
from itertools import product

import pytest
from tars import tar
from witnesses import by_webdataset, contents, shards_in

import dask_image_ingest as dii


@pytest.fixture
def table(shards):
    return dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])


def export(frame, folder, **options):
    return dii.to_webdataset(frame, folder / "{shard:06d}.tar", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "partitions"),
    [
        *((count, None) for count in (1, 5, 7, 8, 24, 1000)),
        (5, 1),
        (7, 5),
        *(
            pytest.param(count, partitions, marks=pytest.mark.nightly)
            for count, partitions in product((1, 8, 24, 1000), (1, 5))
        ),
    ],
)
def test_every_shard_but_the_last_has_the_count(count, partitions, table, tmp_path):
    frame = table if partitions is None else table.repartition(npartitions=partitions)
    told = export(frame, tmp_path, samples_per_shard=count)
    counts = [len(by_webdataset([path])) for path in shards_in(tmp_path)]
    assert counts == told["samples"].tolist()
    assert all(number == count for number in counts[:-1])
    assert 0 < counts[-1] <= count
    assert sum(counts) == 24


@pytest.mark.slow
@pytest.mark.parametrize("limit", [10_240, 40_960, 100_000, "150 kB", 10**9])
def test_no_shard_is_larger_than_its_bytes_and_none_has_room_for_the_next(limit, tmp_path):
    rng = random.Random(3)
    samples = [
        (f"{number:04d}", {"jpg": rng.randbytes(rng.randrange(9000)), "txt": b"x" * 700})
        for number in range(30)
    ]
    names = ["a" * 120 + "é", "b" * 300]
    samples += [(name, {"jpg": rng.randbytes(1000)}) for name in names]
    members = [(f"{key}.{e}", data) for key, m in samples for e, data in m.items()]
    (tmp_path / "in.tar").write_bytes(tar(members, "pax"))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    told = export(frame, tmp_path / "out", bytes_per_shard=limit)
    nbytes = {"150 kB": 150_000}.get(limit, limit)
    sizes = [os.path.getsize(path) for path in told["url"]]
    assert sizes == told["bytes"].tolist()
    for size, count in zip(sizes, told["samples"], strict=True):
        assert size <= nbytes or count == 1
    # Any shard with the first sample of the next one would be too large.
    starts = told["samples"].cumsum().tolist()
    for number, start in enumerate(starts[:-1]):
        first = samples[start - told["samples"][number] : start + 1]
        again = tmp_path / f"again-{number}"
        rows = frame.drop(columns="image").compute()
        rows = rows[rows["__key__"].isin([key for key, _ in first])]
        more = export(rows, again, samples_per_shard=1000)
        assert more["bytes"][0] > nbytes


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path):
    (tmp_path / "in.tar").write_bytes(
        tar({"a.jpg": b"a", "b.jpg": bytes(50_000), "c.jpg": b"c", "d.jpg": b"d"})
    )
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    told = export(frame, tmp_path / "out", bytes_per_shard=20_480)
    assert told["samples"].tolist() == [1, 1, 2]


def test_both_limits_hold(table, tmp_path):
    told = export(table, tmp_path, bytes_per_shard=10**6, samples_per_shard=7)
    assert told["samples"].tolist() == [7, 7, 7, 3]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 5])
def test_the_same_bytes_whatever_the_partitions(shuffle, shards, tmp_path):
    found = []
    out = tmp_path / "out"
    for number, size in enumerate((None, "500 kB", "auto")):
        frame = dii.read_webdataset_images(shards, backend="pandas", partition_size=size)
        frame = frame[frame.width > 120]
        frame = frame.repartition(npartitions=7) if number == 2 else frame
        export(frame, out, samples_per_shard=5, shuffle=shuffle, index=True)
        found.append(contents(out))
        out.rename(tmp_path / f"out-{number}")
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 10


def test_a_seed_is_an_order_whatever_the_order_of_the_frame(table, tmp_path):
    rows = table.compute()
    export(rows, tmp_path / "a", samples_per_shard=5, shuffle=3)
    export(rows.sample(frac=1, random_state=1), tmp_path / "b", samples_per_shard=5, shuffle=3)
    export(rows, tmp_path / "c", samples_per_shard=5, shuffle=4)
    keys = {name: [key for key, _ in by_webdataset(shards_in(tmp_path / name))] for name in "abc"}
    assert keys["a"] == keys["b"]
    assert keys["a"] != keys["c"]
    assert sorted(keys["a"]) == sorted(keys["c"]) == sorted(rows["__key__"])


@pytest.mark.slow
def test_a_shuffle_is_global_and_even(tmp_path):
    """Of every quarter of the samples about a quarter lands in every quarter of the order."""
    paths = []
    for shard in range(4):
        paths.append(tmp_path / f"in-{shard}.tar")
        members = {f"{number:04d}.jpg": b"" for number in range(shard * 500, shard * 500 + 500)}
        paths[-1].write_bytes(tar(members))
    frame = dii.read_webdataset_images(paths, backend="pandas")
    export(frame, tmp_path / "out", samples_per_shard=500, shuffle=1)
    for path in shards_in(tmp_path / "out"):
        numbers = [int(key) for key, _ in by_webdataset([path])]
        for quarter in range(4):
            share = sum(number // 500 == quarter for number in numbers)
            assert 90 <= share <= 160  # 125 expected, and a deviation of 8.4


def test_no_rows_make_no_shards(table, tmp_path):
    told = export(table[table.width > 10_000], tmp_path)
    assert len(told) == 0
    assert shards_in(tmp_path) == []
    assert (tmp_path / "_manifest.json").exists()
