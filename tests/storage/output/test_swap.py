"""Writers that die between any two changes of a disk leave the old, the new, or a visible gap."""

from __future__ import annotations

import errno
import io
import json
import random
import re
import shutil

import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dying import dies, dying_at, moments
from PIL import Image
from tars import tar
from witnesses import by_webdataset, contents, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError, ExportError, ShardError, ShardNotFoundError
from dask_image_ingest.storage.output.run import JOURNAL, REPLACING, finish_swap, swap
from dask_image_ingest.storage.output.store import LocalStore


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three shards of two samples."""
    folder = tmp_path_factory.mktemp("source")
    for shard in range(3):
        members = {f"{shard}{n}.png": png(shard * 2 + n) for n in range(2)}
        (folder / f"{shard:03d}.tar").write_bytes(tar(members))
    return folder


def read(source):
    return dii.read_webdataset_images(source, decode=False, backend="pandas")


class Parquet:
    """Parquet files: six rows at first, then four."""

    OLD, NEW = ("00", "01", "10", "11", "20", "21"), ("10", "11", "20", "21")

    def write(self, source, out, new):
        frame = read(source)[["__key__", "__url__", "image"]]
        frame = frame.partitions[1:3] if new else frame
        dii.to_parquet_images(frame, out, overwrite=True)

    def found(self, out):
        """The rows as Arrow reads them; None if no reader takes what is there for the whole."""
        try:
            keys = pq.read_table(out)["__key__"].to_pylist()
        except (pa.ArrowException, KeyError):  # no parquet file, or no file at all
            with pytest.raises((ShardError, ShardNotFoundError)):
                dii.read_parquet_images(out)
            return None
        assert dii.read_parquet_images(out)["__key__"].compute().tolist() == keys
        return tuple(keys)

    def go_on(self, source, out):
        self.write(source, out, True)


class Shards(Parquet):
    """Shards with all that lies beside them."""

    OLD, NEW = ("00", "01", "10", "11", "20", "21"), ("00", "10", "11")

    def write(self, source, out, new, **how):
        frame = read(source).drop(columns="image")
        frame = frame[frame["__key__"].isin(self.NEW)] if new else frame
        how = how or {"overwrite": True}
        dii.to_webdataset(frame, f"{out}/{{shard:03d}}.tar", samples_per_shard=2, **how)

    def found(self, out):
        if not (out / "_manifest.json").exists():
            return None
        manifest = json.loads((out / "_manifest.json").read_text())
        shards = shards_in(out)
        assert [shard.name for shard in shards] == [each["name"] for each in manifest["shards"]]
        for shard in shards:
            table = pq.read_table(shard.with_suffix(".parquet"))
            keys = [key for key, _ in by_webdataset([shard])]
            assert table["__key__"].to_pylist() == keys
            assert {*table["__url__"].to_pylist()} == {str(shard)}
        return tuple(key for key, _ in by_webdataset(shards))


class Resumed(Shards):
    """The same, which go on where they died."""

    def go_on(self, source, out):
        try:
            self.write(source, out, True, resume=True)
        except ExportError:  # killed before its first file: it has not begun
            assert self.found(out) == self.OLD
            assert not (out / REPLACING).exists()
            self.write(source, out, True)


class Checkpoint(Parquet):
    """Stored partitions."""

    OLD, NEW = ("00", "01", "10", "11", "20", "21"), ("01", "11", "21")

    def frame(self, source, new):
        frame = read(source)[["__key__"]]
        return frame[frame["__key__"].str.endswith("1")] if new else frame

    def write(self, source, out, new):
        dii.checkpoint(self.frame(source, new), out, overwrite=True)

    def found(self, out):
        owner = out / "_checkpoint.json"
        if not (out / "_parts.json").exists() or (out / JOURNAL).exists():
            return None
        parts = json.loads((out / "_parts.json").read_text())["parts"]
        assert owner.exists()
        assert {path.name for path in out.glob("*.parquet")} == parts.keys()
        return tuple(sorted(pq.read_table(out)["__key__"].to_pylist()))

    def go_on(self, source, out):
        try:
            dii.checkpoint(self.frame(source, True), out)  # goes on with what was begun
        except ExportError:  # has the results of other work, and this has not begun
            assert self.found(out) == self.OLD
            assert not (out / REPLACING).exists()
            self.write(source, out, True)


class Index:
    """Indexes, each of which is of its shard."""

    OLD = NEW = ("00", "01", "10", "11", "20", "21")

    def write(self, source, out, new):
        dii.write_index(source, folder=out, overwrite=new)

    def found(self, out):
        return self.NEW if all(map(pq.read_table, out.glob("*.parquet"))) else None

    def go_on(self, source, out):
        self.write(source, out, True)
        assert not (out / "_staging").exists()


class CombinedIndex(Index):
    """One index of all."""

    def write(self, source, out, new):
        dii.write_index(source, folder=out, overwrite=new, combined=True)


WRITERS = [Parquet, Shards, Resumed, Checkpoint, Index, CombinedIndex]


@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "had_one"),
    [
        *((kind, True) for kind in WRITERS),
        (Parquet, False),
        (Checkpoint, False),
        *(
            pytest.param(kind, False, marks=pytest.mark.nightly)
            for kind in (Shards, Resumed, Index, CombinedIndex)
        ),
    ],
)
def test_a_writer_that_dies_leaves_the_old_or_the_new_or_a_gap_that_is_seen(
    kind, had_one, count, source, tmp_path, seed
):
    writer, out, old = kind(), tmp_path / "out", tmp_path / "old"
    before = {path.name: path.read_bytes() for path in source.iterdir()}

    def renew():
        shutil.rmtree(out, ignore_errors=True)
        if had_one:
            shutil.copytree(old, out)

    def write():
        writer.write(source, out, True)

    with dask.config.set(scheduler="synchronous"):
        writer.write(source, out, False)
        shutil.move(out, old)
        renew()
        made = moments(write)
        for moment in random.Random(seed).sample(made, min(count, len(made))):
            renew()
            assert dies(moment, write), moment
            possible = [writer.NEW, None, *[writer.OLD] * had_one]
            found = writer.found(out) if out.exists() else None
            assert found in possible, moment
            writer.go_on(source, out)
            assert writer.found(out) == writer.NEW, moment
            assert not {path.name for path in out.iterdir()} & {"_staging", "_lock", JOURNAL}
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize("count", [1, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [Parquet, Shards, Checkpoint, Index, CombinedIndex])
def test_a_writer_whose_disk_dies_names_what_it_could_not_write(
    kind, count, source, tmp_path, seed
):
    writer, out, old = kind(), tmp_path / "out", tmp_path / "old"
    with dask.config.set(scheduler="synchronous"):
        writer.write(source, out, False)
        shutil.copytree(out, old)
        made = moments(lambda: writer.write(source, out, True))
        # The last change may be one of those that clean up, which the next call does again.
        for moment in random.Random(seed).sample(made[:-1], min(count, len(made) - 1)):
            shutil.rmtree(out)
            shutil.copytree(old, out)
            broken = OSError(errno.EIO, "Input/output error")
            told = rf"{re.escape(str(out))}.* cannot be (written|read): Input/output error"
            with dying_at(moment, broken), pytest.raises(ExportError, match=told):
                writer.write(source, out, True)
            assert writer.found(out) in (writer.OLD, writer.NEW, None), moment
            writer.go_on(source, out)
            assert writer.found(out) == writer.NEW, moment


def test_what_was_being_moved_is_moved_by_whoever_comes_next(tmp_path):
    store = LocalStore(str(tmp_path))
    for name in ("a", "b", "gone", "_staging/x", "_staging/y"):
        store.put(name, name.encode())
    assert dies(6, lambda: swap(store, {"_staging/x": "a", "_staging/y": "b"}, ["gone", "a"]))
    assert (tmp_path / JOURNAL).exists()
    with pytest.raises((pa.ArrowException, OSError)):
        pq.read_table(tmp_path / JOURNAL)
    finish_swap(store)
    finish_swap(store)
    assert store.sizes().keys() == {"a", "b"}
    assert (store.read("a"), store.read("b")) == (b"_staging/x", b"_staging/y")


JOURNALS = [
    b"", b"{}", b"[]", b"nul", b"\xff\xfe", b"[" * 100_000, b'{"new": [], "old": []}',
    b'{"new": {}, "old": [3]}', b'{"new": {"_staging/x": 5}, "old": []}',
    b'{"new": {}, "old": ["../precious"]}',
    b'{"new": {"_staging/x": "../precious"}, "old": []}', b'{"new": {}, "old": ["a\\u0000"]}',
    b'{"new": {"precious": "there"}, "old": []}', b'{"new": {}, "old": [""]}',
]  # fmt: skip


def test_a_list_of_replaced_files_that_no_swap_wrote_moves_and_removes_nothing(tmp_path):
    store = LocalStore(str(tmp_path / "out"))
    (tmp_path / "precious").write_bytes(b"kept")
    store.put("_staging/x", b"new")
    for journal in JOURNALS:
        (tmp_path / "out" / JOURNAL).write_bytes(journal)
        before = contents(tmp_path)
        with pytest.raises(ExportError, match=f"{JOURNAL} is damaged, or not from this release"):
            finish_swap(store)
        assert contents(tmp_path) == before, journal


@pytest.mark.rounds(3, nightly=100)
def test_of_two_killed_overwrites_the_last_goes_on(source, tmp_path, seed):
    out, random_ = tmp_path / "out", random.Random(seed)
    frame = read(source).drop(columns="image")

    def export(size, **how):
        dii.to_webdataset(frame, f"{out}/{{shard:03d}}.tar", samples_per_shard=size, **how)

    with dask.config.set(scheduler="synchronous"):
        export(5)
        before, made = contents(out), moments(lambda: export(1, overwrite=True))
        shutil.rmtree(out)
        export(5)
        assert dies(random_.choice(made), lambda: export(1, overwrite=True))
        assert dies(random_.choice(made[:60]), lambda: export(3, overwrite=True))
        try:
            export(3, resume=True)
        except ExportError:  # it has not come so far as to say that it has begun
            mark = out / REPLACING
            assert not mark.exists() or b'"samples_per_shard": 1,' in mark.read_bytes()
            finished = {name: digest for name, digest in contents(out).items() if name in before}
            assert finished == before or len(shards_in(out)) == 6
            export(3, overwrite=True)
    assert [len(by_webdataset([shard])) for shard in shards_in(out)] == [3, 3]
    assert not {path.name for path in out.iterdir()} & {"_staging", "_lock", JOURNAL}


def test_a_killed_overwrite_of_a_checkpoint_by_itself_computes_all_of_it(source, tmp_path):
    calls = []

    def number(image):
        calls.append(len(image))
        return {"n": [len(calls)] * len(image)}

    def stored(**how):
        frame = dii.read_webdataset_images(source, backend="pandas")
        made = frame.images.map_batches(number, {"n": "int64"}, batch_size=2)
        return dii.checkpoint(made[["__key__", "n"]], tmp_path / "out", version="1", **how)

    with dask.config.set(scheduler="synchronous"):
        stored()
        assert calls == [2] * 3
        made = moments(lambda: stored(overwrite=True))
        for moment in (made[len(made) // 4], made[len(made) // 3]):
            assert dies(moment, lambda: stored(overwrite=True))
            computed = len(calls)
            stored()
            values = stored()["n"].compute()
            assert len(calls) > computed, moment
            assert values.min() > 6, moment


def test_a_folder_that_is_being_replaced_is_read_by_nobody(source, tmp_path):
    Parquet().write(source, tmp_path / "out", False)
    (tmp_path / "out" / JOURNAL).write_text('{"new": {}, "old": []}')
    for path in (tmp_path / "out", tmp_path / "out" / "*.parquet"):
        with pytest.raises(ShardError, match=r"being replaced, or that this was killed"):
            dii.read_parquet_images(path)
    with pytest.raises(ArgumentError, match="there are files already"):
        dii.to_parquet_images(read(source), tmp_path / "out")
    assert len(dii.read_parquet_images(tmp_path / "out")) == 6
