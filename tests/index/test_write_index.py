"""Indexes are written whole or not at all, and one that does not hold is told and not used."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import dask
import pandas as pd
import pytest
from synthetic import write_shards
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.errors import ExportError
from dask_image_ingest.index import index_file
from dask_image_ingest.storage.output.store import LocalStore


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, shards=3, per_shard=8, size=(60, 80))


def captions(paths, **options):
    return dii.read_webdataset_images(paths, backend="pandas", **options)["txt"].compute().tolist()


def test_what_it_tells_and_where_it_lies(shards, tmp_path):
    told = dii.write_index(tmp_path)
    assert told["shard"].tolist() == shards
    assert told["index"].tolist() == [f"{shard}.index.parquet" for shard in shards]
    assert told["samples"].tolist() == [8, 8, 8]
    assert told["bytes"].tolist() == [os.path.getsize(path) for path in told["index"]]
    assert told["damage"].isna().all()
    # Nothing else is left behind, and no glob takes an index for a shard.
    assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, [*shards, *told["index"]]))
    assert captions(f"{tmp_path}/*.tar*") == [f"picture {n}" for n in range(24)]


def test_other_tools_can_read_it(shards):
    dii.write_index(shards[0])
    found = pd.read_parquet(shards[0] + ".index.parquet")
    columns = ["format", "height", "width", "channels", "orientation", "needs_pillow", "error"]
    members = [f"{kind}/{what}" for kind in ("jpg", "txt", "cls") for what in ("offset", "size")]
    contents = ["txt/content", "cls/content"]
    wanted = {"__key__", *members, *contents, *(f"jpg/{column}" for column in columns)}
    assert set(found.columns) == wanted
    assert found["jpg/height"].tolist() == [60 + 4 * n for n in range(8)]
    with open(shards[0], "rb") as file:
        file.seek(found["txt/offset"][3])
        assert file.read(found["txt/size"][3]) == found["txt/content"][3] == b"picture 3"


@pytest.mark.slow
def test_a_shard_that_has_changed_makes_its_index_stale(shards):
    dii.write_index(shards)
    path = Path(shards[1])
    path.write_bytes(path.read_bytes().replace(b"picture 9", b"painter 9"))
    stale = r"the index .*shard-0001\.tar\.index\.parquet is not used: it is stale.*write_index"
    with pytest.warns(UserWarning, match=stale):
        assert captions(shards)[9] == "painter 9"
    with pytest.raises(dii.ShardError, match=r"shard-0001\.tar\.index\.parquet can't be used"):
        captions(shards, index=True)
    told = dii.write_index(shards)
    assert told["state"].tolist() == ["kept", "written", "kept"]
    assert captions(shards, index=True)[9] == "painter 9"


def test_the_first_index_that_is_stale_is_told_once(shards):
    dii.write_index(shards)
    os.utime(shards[0], ns=(1, 1))
    with pytest.warns(UserWarning, match="is stale") as said:
        assert len(captions(shards)) == 24
    assert len(said) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "text", "release"])
def test_a_damaged_index_costs_a_scan_and_no_row(shards, damage, monkeypatch):
    dii.write_index(shards[:2])
    with monkeypatch.context() as patch:
        if damage == "release":
            patch.setattr(index_file, "_FORMAT", 99)
        dii.write_index(shards[2])
    path = Path(shards[2] + ".index.parquet")
    whole = path.read_bytes()
    if damage == "other":
        pd.DataFrame({"a": [1]}).to_parquet(path)
    elif damage != "release":
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"no"}[damage])
    with pytest.warns(UserWarning, match=r"shard-0002\.tar\.index\.parquet is not used"):
        assert captions(shards) == [f"picture {n}" for n in range(24)]
    assert dii.write_index(shards)["state"].tolist() == ["kept", "kept", "written"]


def test_an_index_that_goes_away_costs_a_scan(shards):
    dii.write_index(shards)
    ddf = dii.read_webdataset_images(shards, backend="pandas")
    os.unlink(shards[1] + ".index.parquet")
    with pytest.warns(UserWarning, match="there is no such file"):
        assert len(ddf) == 24


def test_a_write_that_fails_leaves_nothing(shards, tmp_path, monkeypatch):
    def full(self, file, *args):
        file.flush()
        raise dii.ExportError("the disk is full")

    monkeypatch.setattr(LocalStore, "commit", full)
    with pytest.raises(dii.ExportError):
        dii.write_index(shards)
    assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, shards))


def test_a_shard_that_is_no_tar_does_not_stop_the_others(shards, tmp_path):
    bad = tmp_path / "shard-0000a.tar"
    bad.write_bytes(b"<html>" * 200)
    with pytest.raises(dii.ShardError, match=r"1 of 4 shards .*shard-0000a\.tar is no tar"):
        dii.write_index(tmp_path)
    told = dii.write_index(tmp_path, shard_errors="drop")
    assert sorted(told["state"]) == ["failed", "kept", "kept", "kept"]


def test_read_only_shards_have_their_indexes_elsewhere(shards, tmp_path, no_scan):
    dii.write_index(shards, folder=tmp_path / "a" / "b")
    assert sorted(os.listdir(tmp_path / "a" / "b")) == [
        f"shard-000{n}.tar.index.parquet" for n in range(3)
    ]
    assert len(captions(shards, index=tmp_path / "a" / "b")) == 24
    with pytest.raises(AssertionError, match="scanned"):
        captions(shards)


def test_shards_of_one_name_share_no_index(shards, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(shards[0], other)
    with pytest.raises(dii.ArgumentError, match="folders of their own"):
        dii.write_index([shards[0], other], folder=tmp_path / "indexes")


def test_a_shard_in_which_every_member_has_an_extension_of_its_own_has_no_index(tmp_path):
    """Keys with dots in their last part: no table of as many columns."""
    path = tmp_path / "0.tar"
    path.write_bytes(tar({"a.jpg": b"", **{f"a{n}.{n}.txt": b"%d" % n for n in range(2000)}}))
    with pytest.raises(dii.ShardError, match="has 2001 extensions, and an index holds at most 64"):
        dii.write_index(path)


@pytest.mark.slow
@pytest.mark.more
def test_tasks_of_a_cluster_write_them(shards):
    with dii.start_cluster(n_workers=2):
        assert dii.write_index(shards)["state"].tolist() == ["written"] * 3
        assert captions(shards) == [f"picture {n}" for n in range(24)]


@pytest.mark.parametrize("index", [3, None, "", "a\0b", ["x"]])
def test_an_index_is_a_folder_or_a_word(shards, index):
    with pytest.raises(dii.ArgumentError, match="index="):
        dii.read_webdataset_images(shards, index=index)


def test_a_read_with_an_index_is_another_task_than_one_without(shards):
    dii.write_index(shards)
    names = {
        dii.read_webdataset_images(shards, backend="pandas", index=index)._name
        for index in (False, "auto")
    }
    assert len(names) == 2
    with dask.config.set(scheduler="threads"):
        assert len(captions(shards, index=True)) == 24


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, r"make room, and run it again, write_index\(\) goes on"),
        (errno.EROFS, r"Pass folder= to have the indexes elsewhere"),
    ],
)
def test_errors_of_writing_say_what_to_do_about_an_index(code, said, shards, monkeypatch):
    commit = LocalStore.commit

    def failing(self, *args):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            commit(self, *args)

    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(LocalStore, "commit", failing)
    with pytest.raises(ExportError, match=said) as raised:
        dii.write_index(shards)
    assert "to_webdataset" not in str(raised.value)
