"""An index holds for each copy of its shard, wherever that lies, and for no other shard."""

from __future__ import annotations

import gzip
import os
import random
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from faulty_server import faulty_server
from photo_shards import encode
from PIL import Image
from random_shards import random_shards
from s3 import empty_bucket, s3_options
from synthetic import write_shards
from tars import tar

import dask_image_ingest as dii

COLUMNS = ["__key__", "height", "width", "txt", "cls", "offset", "nbytes"]
PNG = encode(Image.new("RGB", (8, 8)), "png")
STALE = "is not used: it is stale"


@pytest.fixture
def written(tmp_path):
    """Three shards, one of them compressed, with indexes that were written beside them."""
    folder = tmp_path / "written"
    folder.mkdir()
    write_shards(folder, shards=3, per_shard=9, size=(120, 160))
    (folder / "shard-0002.tar.gz").write_bytes(
        gzip.compress((folder / "shard-0002.tar").read_bytes())
    )
    (folder / "shard-0002.tar").unlink()
    return folder


def copied(folder: Path, target: Path) -> Path:
    """As ``cp -r``: new files with times of their own."""
    target.mkdir(exist_ok=True)
    for number, path in enumerate(folder.iterdir()):
        shutil.copyfile(path, target / path.name)
        os.utime(target / path.name, ns=(0, 10**18 + number))
    return target


def rows(paths, **options) -> pd.DataFrame:
    """Metadata and images, without URLs and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = dii.read_webdataset_images(paths, backend="pandas", **options)
        found = frame[[*COLUMNS, "image"]].compute()
        assert len(frame) == len(found)
    pixels = [None if image is None else image.tobytes() for image in found.images.arrays()]
    return found[COLUMNS].assign(pixels=pixels).reset_index(drop=True)


@pytest.mark.parametrize("combined", [False, True])
def test_it_holds_for_a_copy_on_a_disk_and_on_a_server(combined, written, tmp_path, no_scan):
    dii.write_index(written, combined=combined)
    expected = rows(written)
    copy = copied(written, tmp_path / "copy")
    pd.testing.assert_frame_equal(rows(copy), expected)
    files = {f"/d/{path.name}": path.read_bytes() for path in written.iterdir()}
    with faulty_server(files=files, pages=True) as server:
        urls = [f"{server.url}{name}" for name in sorted(files) if "parquet" not in name]
        for index in ("auto", True, f"{server.url}/d"):
            pd.testing.assert_frame_equal(rows(urls, index=index), expected)
    # A second call stores the times of the copies.
    assert dii.write_index(copy, combined=combined)["state"].tolist() == ["kept"] * 3
    if combined:
        frame = dii.read_webdataset_images(copy, backend="pandas")
        shutil.rmtree(copy)
        assert len(frame) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("combined", [False, True])
def test_it_holds_after_an_upload_to_a_bucket(combined, written, s3_server, no_scan):
    dii.write_index(written, combined=combined)
    fs, options = empty_bucket(s3_server, "uploaded"), s3_options(s3_server)
    for path in written.iterdir():
        fs.put_file(str(path), f"uploaded/d/{path.name}")
    found = rows("s3://uploaded/d/", storage_options=options)
    pd.testing.assert_frame_equal(found, rows(written))


def other_first(data: bytearray) -> None:
    data[:6] = b"999999"


def other_labels(data: bytearray) -> None:
    data[:] = data.replace(b"picture", b"painter")


def other_end(data: bytearray) -> None:
    """Preallocated, and not downloaded to the end."""
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)


def cut(data: bytearray) -> None:
    del data[-20480:]


@pytest.mark.parametrize("change", [other_first, other_labels, other_end, cut])
@pytest.mark.parametrize("place", ["local", "web"])
def test_another_shard_is_refused_and_named(change, place, written, tmp_path):
    dii.write_index(written)
    copy = copied(written, tmp_path / "copy")
    data = bytearray((copy / "shard-0001.tar").read_bytes())
    change(data)
    (copy / "shard-0001.tar").write_bytes(data)
    files = {f"/d/{path.name}": path.read_bytes() for path in copy.iterdir()}
    with faulty_server(files=files, pages=True) as server:
        web = [f"{server.url}{name}" for name in sorted(files) if "parquet" not in name]
        paths = web if place == "web" else str(copy)
        read = dii.read_webdataset_images
        expected = read(paths, backend="pandas", index=False, shard_errors="drop")
        advice = r"write_index\(\.\.\., folder=\)" if place == "web" else "overwrite=True"
        told = (
            rf"shard-0001\.tar\.index\.parquet {STALE}.*shard-0001\.tar is read without.*{advice}"
        )
        # Dask makes one read of two that are equal, which tells once: these two differ.
        for columns, size in ((COLUMNS, 8), (["__key__", "image"], None)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = read(paths, size=size, backend="pandas")[columns].compute()
                wanted = expected[columns].compute()
            pd.testing.assert_frame_equal(found, wanted)
            stale = [str(each.message) for each in said if STALE in str(each.message)]
            assert len(stale) == 1
            assert pd.Series(stale).str.contains(told).all()


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("how", ["renamed", "overwritten"])
def test_two_shards_of_one_size_and_time_that_were_swapped_are_told_apart(how, combined, tmp_path):
    paths = [tmp_path / name for name in ("a.tar", "b.tar")]
    for number, path in enumerate(paths):
        path.write_bytes(tar([("key.png", PNG), ("key.txt", f"of {number}".encode())]))
        os.utime(path, ns=(10**18, 10**18))
    dii.write_index(tmp_path, combined=combined)
    if how == "renamed":
        paths[0].rename(tmp_path / "other")
        paths[1].rename(paths[0])
        (tmp_path / "other").rename(paths[1])
    else:
        one, other = (path.read_bytes() for path in paths)
        for path, data in zip(paths, (other, one), strict=True):
            path.write_bytes(data)
            os.utime(path, ns=(10**18, 10**18))
    with pytest.warns(UserWarning, match=f"{STALE}.*a.tar is read without it"):
        texts = dii.read_webdataset_images(tmp_path, backend="pandas")["txt"].compute()
    assert texts.tolist() == ["of 1", "of 0"]
    # What the warning advises, and without overwrite=.
    assert dii.write_index(tmp_path, combined=combined)["state"].tolist() == ["written"] * 2


@pytest.mark.parametrize("is_new_disk", [False, True])
def test_a_file_of_the_same_inode_on_another_disk_is_a_copy(
    is_new_disk, written, tmp_path, monkeypatch
):
    """Files that are copied to an empty disk have the inodes of the originals, if these had one."""
    fstat = os.fstat

    class FirstInode:
        st_ino = 12

        def __init__(self, descriptor):
            self.status = fstat(descriptor)

        def __getattr__(self, name):
            return getattr(self.status, name)

    monkeypatch.setattr(os, "fstat", FirstInode)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_fsid=1))
    dii.write_index(written)
    copy = copied(written, tmp_path / "copy")
    if is_new_disk:
        monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_fsid=2))
        assert len(rows(copy)) == 27
    else:
        with pytest.warns(UserWarning, match="another modification time"):
            assert len(dii.read_webdataset_images(copy, backend="pandas")) == 27


def test_one_warning_of_a_read_names_the_first(written):
    dii.write_index(written)
    for path in set(written.iterdir()) - set(written.glob("*.parquet")):
        path.touch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        frame = dii.read_webdataset_images(written, backend="pandas")
        assert len(frame) == len(frame.compute()) == 27
    (told,) = [str(each.message) for each in said if STALE in str(each.message)]
    assert "shard-0000.tar is read without it" in told


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_way_out_is_that_of_the_place(elsewhere, combined, written, tmp_path):
    """What the warning advises is done as it says, and then there is none."""
    options = {"index": tmp_path / "ours"} if elsewhere else {}
    dii.write_index(written, folder=options.get("index"), combined=combined)
    shard = written / "shard-0001.tar"
    shard.write_bytes(shard.read_bytes() + bytes(10240))
    with pytest.warns(UserWarning, match=STALE) as said:
        dii.read_webdataset_images(written, backend="pandas", **options)["txt"].compute()
    (told,) = [str(each.message) for each in said]
    arguments = re.search(r"\. write_index\((.*)\) writes it anew\.", told)[1]
    exec(f"dii.write_index(written, {arguments})", {"dii": dii, "written": written})
    rows(written, **options)
    assert len(list(written.glob("*.parquet"))) == (0 if elsewhere else 1 if combined else 3)


@pytest.mark.parametrize("combined", [False, True])
def test_published_indexes_are_pinned_in_a_folder_without_a_scan(combined, written, tmp_path):
    dii.write_index(written, combined=combined)
    expected = rows(written)
    files = {f"/d/{path.name}": path.read_bytes() for path in written.iterdir()}
    with faulty_server(files=files, pages=True) as server, pytest.MonkeyPatch.context() as patch:
        urls = [f"{server.url}{name}" for name in sorted(files) if "parquet" not in name]
        patch.setattr("dask_image_ingest.tar.index.TarScan", None)
        told = dii.write_index(urls, folder=tmp_path / "ours", combined=combined)
        assert told["state"].tolist() == ["kept"] * 3
        assert not server.counts["404"]  # nothing is asked for that the listing does not show
        server.reset()
        frame = dii.read_webdataset_images(urls, backend="pandas", index=tmp_path / "ours")
        assert frame["txt"].compute().tolist() == expected["txt"].tolist()
        assert not [path for method, path, _ in server.seen if method == "GET" and ".tar" in path]


@pytest.mark.parametrize("is_copy", [False, True])
def test_the_check_takes_no_round_trip_of_its_own(is_copy, tmp_path):
    """While an image is fetched, the bytes to check are."""
    folder = tmp_path / "large"
    folder.mkdir()
    write_shards(folder, shards=1, per_shard=60, size=(300, 400))
    path = next(folder.iterdir())
    with faulty_server(files={"/a.tar": path.read_bytes()}) as server:
        url = f"{server.url}/a.tar"
        if is_copy:
            path.rename(folder / "a.tar")
            dii.write_index(folder / "a.tar", folder=tmp_path)
        else:
            dii.write_index(url, folder=tmp_path)
        frame = dii.read_webdataset_images(url, backend="pandas", index=tmp_path, sidecar=None)
        server.reset()
        assert len(frame[frame.txt == "picture 20"][["image"]].compute()) == 1
        asked = [headers["Range"] for method, _, headers in server.seen if method == "GET"]
    # The head; then the image, and of a copy two other places, at once.
    assert len(asked) <= (4 if is_copy else 2), asked


@pytest.mark.slow
@pytest.mark.rounds(3, nightly=200)
def test_any_copy_reads_as_without_an_index(tmp_path, seed, rng):
    folder = tmp_path / "shards"
    paths = [Path(path) for path in random_shards(folder, seed)]
    dii.write_index(folder, combined=rng.random() < 0.5, shard_errors="drop")
    copy = copied(folder, tmp_path / "copy")
    for path in rng.sample(paths, rng.randrange(len(paths) + 1)):
        change(rng, copy / path.name, copy / rng.choice(paths).name)
    options = {"backend": "pandas", "shard_errors": "drop"}

    def answer(index):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                frame = dii.read_webdataset_images(copy, index=index, **options)
                return len(frame), frame.compute()
            except dii.DaskImageIngestError as error:
                return type(error), str(error)

    found, expected = answer("auto"), answer(False)
    assert found[0] == expected[0]
    if isinstance(found[1], pd.DataFrame):
        pd.testing.assert_frame_equal(found[1], expected[1])


def change(rng: random.Random, path: Path, other: Path) -> None:
    """Put something else in the place of a shard; mostly of the same size."""
    data, second = bytearray(path.read_bytes()), other.read_bytes()
    kind = rng.randrange(5)
    if kind == 0:
        data = data[: rng.randrange(len(data) + 1)]
    elif kind == 1:
        data = bytearray(second)
    elif kind == 2:
        data = bytearray((second + bytes(len(data)))[: len(data)])
    elif kind == 3:
        data[rng.randrange(min(100, len(data)))] ^= 1
    path.write_bytes(data)
