"""Every member of every row comes out byte for byte, whatever was done to the frame before."""

from __future__ import annotations

import gzip
import subprocess

import pandas as pd
import pytest
from counted import work  # noqa: F401
from tars import random_tar, tar, webdataset_samples, zstd
from witnesses import (
    by_dali,
    by_gnu_tar,
    by_tarfile,
    by_webdataset,
    flat,
    shards_in,
    written_by_tarfile,
)

import dask_image_ingest as dii

LABELS = pd.DataFrame({"cls": pd.array([0, 1], "int64[pyarrow]"), "name": ["a", "b"]})


@pytest.fixture
def table(shards):
    return dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])


@pytest.fixture
def original(photos):
    return {photo.key: photo.members for photo in photos}


def export(frame, tmp_path, **options):
    options = {"samples_per_shard": 5} | options
    return dii.to_webdataset(frame, tmp_path / "out" / "{shard:06d}.tar", **options)


def read_back(tmp_path):
    return by_webdataset(shards_in(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation",
    [
        lambda d: d,
        lambda d: d[d.width > 150],
        lambda d: d.merge(LABELS, on="cls"),
        lambda d: d.sort_values("width"),
        lambda d: d.sample(frac=0.5, random_state=3),
        lambda d: d.shuffle("cls"),
        lambda d: d.repartition(npartitions=2),
        lambda d: d.persist(),
        lambda d: d.set_index("cls"),
        lambda d: d.set_index("__key__"),
        lambda d: d.compute(),
        lambda d: d.compute().sample(9, random_state=1),
    ],
    ids=[
        *("all", "filter", "merge", "sort", "sample", "shuffle", "repartition", "persist"),
        *("set_index", "key as index", "pandas", "pandas sample"),
    ],
)
def test_members_and_order_are_those_of_the_frame_after(operation, table, original, tmp_path):
    frame = operation(table)
    if hasattr(frame, "persist"):
        frame = frame.persist()  # rows of one value come out of a shuffle in any order
    told = export(frame, tmp_path)
    frame = frame.compute() if hasattr(frame, "compute") else frame
    keys = frame.reset_index()["__key__"].tolist()
    assert read_back(tmp_path) == [(key, original[key]) for key in keys]
    assert told["samples"].sum() == len(keys)


def test_no_image_is_decoded(shards, tmp_path, work):  # noqa: F811
    frame = dii.read_webdataset_images(shards, backend="pandas")
    export(frame[frame.width > 150], tmp_path)
    assert not work["decoded"]


def test_a_frame_with_the_stored_pixels_is_exported_without_decoding(shards, tmp_path, original):
    frame = dii.read_webdataset_images(shards, backend="pandas")
    export(frame, tmp_path)
    assert dict(read_back(tmp_path)) == original


def test_shards_are_what_tarfile_writes(table, original, tmp_path):
    told = export(table, tmp_path)
    members = flat([(key, original[key]) for key in table["__key__"].compute()])
    for number, (path, count) in enumerate(zip(told["url"], told["members"], strict=True)):
        part = members[:count]
        members = members[count:]
        with open(path, "rb") as file:
            assert file.read() == written_by_tarfile(part), number


def test_all_readers_agree(table, original, tmp_path):
    export(table, tmp_path, index=True)
    paths = shards_in(tmp_path / "out")
    expected = [(key, original[key]) for key in table["__key__"].compute()]
    assert by_tarfile(paths) == flat(expected)
    unpacked = by_gnu_tar(paths, tmp_path)
    assert sorted(name.partition(":")[2] for name in unpacked) == sorted(
        n for n, _ in flat(expected)
    )
    assert sorted(unpacked.values()) == sorted(data for _, data in flat(expected))
    wanted = [tuple(m.get(e, b"") for e in ("jpg", "txt", "json")) for _, m in expected]
    indexes = sorted((tmp_path / "out").glob("*.idx"))
    assert by_dali(paths, ("jpg", "txt", "json")) == wanted
    assert by_dali(paths, ("jpg", "txt", "json"), indexes) == wanted


NAMES = ["ключ/ü", "é", "ñ", "n" * 99, "m" * 99, "folder/" * 20 + "k", "f" * 150 + "/k", "p" * 250]


def test_names_that_ustar_cannot_hold_are_read_by_all(tmp_path):
    expected = [
        (name, {"jpg": f"image {n}".encode(), "txt": f"text {n}".encode()})
        for n, name in enumerate(NAMES)
    ]
    (tmp_path / "in.tar").write_bytes(tar(flat(expected), "pax"))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    export(frame, tmp_path, samples_per_shard=100, index=True)
    paths = shards_in(tmp_path / "out")
    assert by_webdataset(paths) == expected
    assert by_tarfile(paths) == flat(expected)
    assert {n[2:]: data for n, data in by_gnu_tar(paths, tmp_path).items()} == dict(flat(expected))
    wanted = [(m["jpg"], m["txt"]) for _, m in expected]
    assert by_dali(paths, ("jpg", "txt")) == wanted
    assert by_dali(paths, ("jpg", "txt"), [tmp_path / "out" / "000000.idx"]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "compress"), [(".tar.gz", gzip.compress), (".tar.zst", zstd)])
def test_compressed_shards_are_decompressed(suffix, compress, shards, original, tmp_path):
    paths = []
    for shard in shards:
        paths.append(tmp_path / (shard.stem + suffix))
        paths[-1].write_bytes(compress(shard.read_bytes()))
    frame = dii.read_webdataset_images(paths, backend="pandas")
    export(frame, tmp_path, shuffle=1)
    assert dict(read_back(tmp_path)) == original


def test_samples_without_an_image_keep_their_members(tmp_path):
    (tmp_path / "in.tar").write_bytes(
        tar({"a.jpg": b"A", "a.txt": b"a", "b.txt": b"b", "c.npy": b"c", "d.jpg": b""})
    )
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    export(frame, tmp_path)
    assert read_back(tmp_path) == [
        ("a", {"jpg": b"A", "txt": b"a"}),
        ("b", {"txt": b"b"}),
        ("c", {"npy": b"c"}),
        ("d", {"jpg": b""}),
    ]


def test_sparse_members_are_written_with_their_holes_filled(tmp_path):
    with open(tmp_path / "a.jpg", "wb") as file:
        file.write(b"begin")
        file.seek(300_000)
        file.write(b"end")
    (tmp_path / "a.txt").write_bytes(b"plain")
    subprocess.run(["tar", "-cSf", "in.tar", "a.jpg", "a.txt"], cwd=tmp_path, check=True)
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    assert frame["offset"].compute().isna().all()
    export(frame, tmp_path)
    assert read_back(tmp_path) == [
        ("a", {"jpg": (tmp_path / "a.jpg").read_bytes(), "txt": b"plain"})
    ]
    sidecar = pd.read_parquet(tmp_path / "out" / "000000.parquet")
    start, size = sidecar["offset"][0], sidecar["nbytes"][0]
    written = (tmp_path / "out" / "000000.tar").read_bytes()
    assert written[int(start) : int(start + size)] == (tmp_path / "a.jpg").read_bytes()


def test_samples_of_the_same_key_are_told_apart_by_their_bytes(tmp_path):
    first, second = {"a.jpg": b"1", "a.txt": b"one"}, {"a.jpg": b"2", "a.txt": b"two"}
    members = [*first.items(), ("b.jpg", b"-"), *second.items()]
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    export(frame, tmp_path, samples_per_shard=2)
    assert read_back(tmp_path) == [
        ("a", {"jpg": b"1", "txt": b"one"}),
        ("b", {"jpg": b"-"}),
        ("a", {"jpg": b"2", "txt": b"two"}),
    ]


def test_keys_may_be_given_anew(table, original, tmp_path):
    frame = table.assign(
        __key__="new/" + table["cls"].astype(str) + "/" + table["__key__"].str[-5:]
    )
    export(frame, tmp_path)
    renamed = {key.rpartition("/")[2]: members for key, members in read_back(tmp_path)}
    assert renamed == {key.rpartition("/")[2]: members for key, members in original.items()}
    assert all(key.startswith("new/") for key, _ in read_back(tmp_path))


# Random tars have odd names, members twice, and samples of one key without any image.
REASONS = {
    "bad-key",
    "bad-extension",
    "repeated-key",
    "duplicate-member",
    "ambiguous-sample",
    "repeated-row",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*links are not followed")
@pytest.mark.rounds(5, nightly=100)
def test_random_tars_come_back(seed, rng, tmp_path):
    """What webdataset reads in shards of any making, it reads in ours, or the row is named."""
    tars = [random_tar(seed * 100 + number) for number in range(rng.randrange(1, 4))]
    expected = []
    for number, shard in enumerate(tars):
        path = tmp_path / f"in-{number}.tar{rng.choice(['', '', '.gz'])}"
        path.write_bytes(gzip.compress(shard) if path.suffix == ".gz" else shard)
        for key, members in webdataset_samples(shard).items():
            name = key.rpartition(" (")[0] if key.endswith(")") else key
            expected.append((name, members))
    frame = dii.read_webdataset_images(str(tmp_path / "in-*"), backend="pandas", members={})
    told = export(frame, tmp_path, row_errors="drop", samples_per_shard=rng.choice([1, 3, 50]))
    found = [(key, members) for path in told["url"] for key, members in by_webdataset([path])]
    left_out = sum(entry["count"] for entry in told.attrs["left_out"].values())
    assert len(found) + left_out == len(frame)
    for sample in found:
        assert sample in expected
    assert told.attrs["left_out"].keys() <= REASONS
