"""An index of another shard of the same size and time is refused where the shard is read."""

from __future__ import annotations

import os
import shutil
import warnings

import numpy as np
import pytest
from faulty_server import Faulty, faulty_server
from photo_shards import encode
from PIL import Image
from tars import tar
from witnesses import by_webdataset

import dask_image_ingest as dii
from dask_image_ingest.errors import ShardError

TOLD = r"index\.parquet is not used: it is stale: .* other bytes from 0 on.*is read without it"


def shard(first: str, colour: int, pax: bool) -> bytes:
    """Four samples; those of two shards differ in keys, colours and captions alone."""
    members = []
    for number in range(4):
        picture = np.full((8, 8, 3), colour + number, np.uint8)
        key = f"{first}{number}" + "x" * 120 * pax
        members += [
            (f"{key}.png", encode(Image.fromarray(picture), "png")),
            (f"{key}.txt", f"{first} {number}".encode()),
            (f"{key}.npy", b"\x93NUMPY\x01\x00v\x00" + npy(number + colour)),
        ]
    return tar(members, "pax" if pax else "ustar")


def npy(value: int) -> bytes:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }"
    return header.ljust(117) + b"\n" + int(value).to_bytes(8, "little")


@pytest.fixture(params=["ustar", "pax"])
def folders(request, tmp_path):
    """Two folders with a shard and its index each, and one with a shard and the other's index."""
    for name, colour in (("a", 10), ("b", 99)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "000.tar"
        path.write_bytes(shard(name, colour, request.param == "pax"))
        os.utime(path, ns=(10**18, 10**18))
        dii.write_index(tmp_path / name)
        dii.write_index(tmp_path / name, combined=True)
    swapped = tmp_path / "swapped"
    shutil.copytree(tmp_path / "b", swapped)
    return tmp_path


@pytest.mark.parametrize("index", ["000.tar.index.parquet", "_index.parquet"])
def test_the_rows_are_those_of_the_shard(index, folders):
    swapped = folders / "swapped"
    for file in swapped.glob("*.parquet"):
        file.unlink()
    shutil.copy(folders / "a" / index, swapped / index)

    def read(folder, **options):
        return dii.read_webdataset_images(folder, backend="pandas", **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = read(folders / "b").compute()
    keys = [key for key, _ in by_webdataset([swapped / "000.tar"])]
    texts = {"columns": ["__key__", "txt"]}
    for options in ({}, texts, {"columns": ["__key__", "image"]}, {"columns": ["__key__", "npy"]}):
        with pytest.warns(UserWarning, match=TOLD):
            found = read(swapped, **options).compute()
        assert found["__key__"].tolist() == keys
        if "txt" in found:
            assert found["txt"].tolist() == [f"b {n}" for n in range(4)]
        if "npy" in found:
            assert found["npy"].tolist() == own["npy"].tolist()
        if "image" in found:
            pairs = zip(found.images.arrays(), own.images.arrays(), strict=True)
            assert all(np.array_equal(one, other) for one, other in pairs)
    with pytest.raises(ShardError, match="other bytes from 0 on"):
        read(swapped, index=True).compute()
    # What the warning advises.
    dii.write_index(swapped, overwrite=True, combined=index == "_index.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(swapped).compute()["__key__"].tolist() == keys


@pytest.mark.parametrize("pax", [False, True])
def test_images_that_are_decoded_later_are_those_of_their_keys_or_an_error(pax, monkeypatch):
    monkeypatch.setattr(Faulty, "tag", lambda self, body: '"the same"')
    with faulty_server() as server:
        urls = [f"{server.url}/{number:03d}.tar" for number in range(2)]
        options = {"columns": ["__key__", "image"], "backend": "pandas", "index": "memory://ours"}

        def keys():
            frame = dii.read_webdataset_images(urls, **options)
            stored = dii.read_webdataset_images(urls, decode=False, **options)
            batches = frame.images.iter_batches(2, columns=["__key__"], shuffle=1)
            yield lambda: [key for batch in batches for key in batch["__key__"]]
            yield lambda: frame.shuffle("__key__").compute()["__key__"].tolist()
            yield lambda: dii.decode_images(stored.compute())["__key__"].tolist()

        server.files |= {"/000.tar": shard("c", 1, pax), "/001.tar": shard("a", 2, pax)}
        dii.write_index(urls, folder="memory://ours", overwrite=True)
        for call in keys():
            assert sorted(key[:2] for key in call()) == [f"{c}{n}" for c in "ac" for n in range(4)]
        server.files["/001.tar"] = shard("b", 2, pax)
        for call in keys():
            with pytest.raises(ShardError, match=r"no image of 'a.*write_index\(overwrite=True\)"):
                call()


def test_a_remote_shard_is_checked_by_the_request_that_reads_it(folders, monkeypatch):
    monkeypatch.setattr(Faulty, "tag", lambda self, body: '"the same"')
    files = {f"/b/{path.name}": path.read_bytes() for path in (folders / "b").iterdir()}
    with faulty_server(files=files) as server:
        url, keys = f"{server.url}/b/000.tar", [f"b{n}" for n in range(4)]
        dii.write_index(url, folder=folders / "ours")

        def read():
            server.seen.clear()
            frame = dii.read_webdataset_images(url, index=folders / "ours", backend="pandas")
            found = frame.compute()
            asked = [path for method, path, _ in server.seen if method == "GET"]
            return found, [path for path in asked if path.endswith(".tar")]

        found, asked = read()
        assert [key[:2] for key in found["__key__"]] == keys
        assert asked == ["/b/000.tar"]
        server.files["/b/000.tar"] = (folders / "a" / "000.tar").read_bytes()
        with pytest.warns(UserWarning, match=TOLD):
            found, asked = read()
        assert [key[:2] for key in found["__key__"]] == [f"a{n}" for n in range(4)]
