"""A partition is computed once, and read back ever after: what counts as the same partition."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from arrow_values import OTHERS, PLAIN, UNREAD, nested
from query_answers import answer
from witnesses import contents

import dask_image_ingest as dii
from dask_image_ingest.dataset.plan import Scan
from dask_image_ingest.errors import ArgumentError, ExportError, FunctionError, ShardError
from dask_image_ingest.frames import backend_of

runner = importlib.import_module("dask_image_ingest.checkpoint.checkpoint")


class Counted:
    """A model that tells how often it was called, in a file."""

    def __init__(self, calls, factor=1.0):
        self.calls, self.factor = str(calls), factor

    def __call__(self, images):
        with open(self.calls, "a") as file:
            file.write("called\n")
        means = np.array([image.mean() for image in images], "float32")
        return {"mean": means * self.factor, "vector": np.stack([means, -means], axis=1)}


OUTPUTS = {"mean": "float32", "vector": "list<float32>"}


@pytest.fixture
def folder(shards, tmp_path):
    """The shards, to be changed."""
    return shutil.copytree(shards[0].parent, tmp_path / "in")


@pytest.fixture
def job(folder, tmp_path):
    """``job()`` is a frame with a model in it; ``job.calls()`` how often that was called since."""

    def make(factor=1.0, **options):
        ddf = dii.read_webdataset_images(folder, backend="pandas", **({"size": 16} | options))
        model = Counted(tmp_path / "calls", factor)
        return ddf.images.map_batches(model, outputs=OUTPUTS, batch_size=100)

    def calls():
        file = tmp_path / "calls"
        count = len(file.read_text().splitlines()) if file.exists() else 0
        file.write_text("")
        return count

    make.calls = calls
    return make


def test_it_computes_at_once_and_never_again(job, tmp_path):
    stored = dii.checkpoint(job(), tmp_path / "out")
    assert job.calls() == 3
    got = answer(stored.compute())
    assert answer(dii.checkpoint(job(), tmp_path / "out").compute()) == got
    assert job.calls() == 0
    assert answer(job().compute()) == got


def test_a_changed_shard_is_computed_again_and_no_other(job, folder, tmp_path):
    dii.checkpoint(job(), tmp_path / "out")
    shard = sorted(folder.glob("*.tar"))[1]
    shutil.copy(min(folder.glob("*.tar")), shard)
    job.calls()
    stored = dii.checkpoint(job(), tmp_path / "out")
    assert job.calls() == 1
    assert answer(stored.compute()) == answer(job().compute())
    # What it was before is not kept.
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 3


@pytest.mark.slow
def test_an_added_shard_is_computed_alone_and_a_removed_one_goes_away(job, folder, tmp_path):
    out = tmp_path / "out"
    first = min(folder.glob("*.tar"))
    dii.checkpoint(job(), out)
    job.calls()
    # Before all others, so that every partition has another number.
    shutil.copy(first, folder / "another.tar")
    stored = dii.checkpoint(job(), out)
    assert job.calls() == 1
    assert answer(stored.compute()) == answer(job().compute())
    first.unlink()
    job.calls()
    stored = dii.checkpoint(job(), out)
    assert job.calls() == 0
    assert stored.npartitions == len(list(out.glob("*.parquet"))) == 3
    assert answer(stored.compute()) == answer(job().compute())


def test_stored_boundaries_win_over_those_of_another_machine(job, folder, tmp_path):
    few, many = job(partition_size=None), job(partition_size=3000)
    assert few.npartitions < many.npartitions
    dii.checkpoint(few, tmp_path / "out")
    job.calls()
    stored = dii.checkpoint(many, tmp_path / "out")
    assert (stored.npartitions, job.calls()) == (few.npartitions, 0)
    assert answer(stored.compute()) == answer(few.compute())
    # Its columns belong to the rows of a read with the same boundaries.
    read = dii.read_webdataset_images(folder, backend="pandas", partition_size=None)
    paired = read[["__key__"]].assign(mean=stored["mean"]).compute()
    assert answer(paired) == answer(stored[["__key__", "mean"]].compute())


@pytest.mark.slow
def test_a_shard_of_which_nothing_is_stored_has_the_boundaries_of_this_machine(job, tmp_path):
    few, many = job(partition_size=None), job(partition_size=3000)
    (read,) = many.expr.find_operations(Scan)
    of_others = sum(not split.url.endswith("000.tar") for (split,) in read.sources)
    dii.checkpoint(few.partitions[:1], tmp_path / "out")
    stored = dii.checkpoint(many, tmp_path / "out")
    assert stored.npartitions == 1 + of_others
    assert answer(stored.compute()) == answer(few.compute())


def test_shards_with_indexes_keep_their_own_rows(job, folder, tmp_path):
    without = answer(job().compute())
    dii.write_index(folder)
    assert answer(dii.checkpoint(job(), tmp_path / "out").compute()) == without


def test_some_partitions_first_and_the_others_later(job, tmp_path):
    one = dii.checkpoint(job().partitions[1:2], tmp_path / "out")
    assert answer(one.compute()) == answer(job().partitions[1].compute())
    job.calls()
    dii.checkpoint(job(), tmp_path / "out")
    assert job.calls() == 2
    # Partitions that are not asked for now stay.
    dii.checkpoint(job().partitions[:1], tmp_path / "out")
    dii.checkpoint(job(), tmp_path / "out")
    assert job.calls() == 0


@pytest.mark.slow
def test_an_edited_function_is_refused_until_overwrite(job, tmp_path):
    out = tmp_path / "out"
    dii.checkpoint(job(), out)
    before, wide = sorted(out.iterdir()), job()
    with pytest.raises(ExportError, match=r"map_batches\(Counted\) has changed.*overwrite=True"):
        dii.checkpoint(job(factor=2.0), out)
    with pytest.raises(ExportError, match="read_webdataset_images has changed"):
        dii.checkpoint(job(size=17), out)
    with pytest.raises(ExportError, match="read_webdataset_images has changed"):
        dii.checkpoint(job(max_member_bytes=9), out)
    with pytest.raises(ExportError, match=r"steps were read_web.* and are read_web.*Filter now"):
        dii.checkpoint(wide[wide.width > 9], out)
    assert sorted(out.iterdir()) == before
    stored = dii.checkpoint(job(factor=2.0), out, overwrite=True)
    assert answer(stored.compute()) == answer(job(factor=2.0).compute())


SETTINGS = """
from typing import NamedTuple

FACTOR = {factor}

class Settings(NamedTuple):
    k: float

    def apply(self, images):
        return images.mean(axis=(1, 2, 3)) * self.k * FACTOR

settings = Settings(1.0)

def function(images):
    # {text}
    return settings.apply(images)
"""


def test_an_edit_of_what_a_settings_object_does_is_an_edit_and_a_comment_is_none(
    folder, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)

    def checkpointed(**source):
        (tmp_path / "settings_of_test.py").write_text(SETTINGS.format(**source))
        sys.modules.pop("settings_of_test", None)
        importlib.invalidate_caches()
        function = importlib.import_module("settings_of_test").function
        ddf = dii.read_webdataset_images(folder, backend="pandas", size=16)
        made = ddf.images.map_batches(function, outputs={"mean": "float32"})
        return dii.checkpoint(made, tmp_path / "out")

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    checkpointed(factor=1.0, text="A comment.")
    checkpointed(factor=1.0, text="Another comment.")
    with pytest.raises(ExportError, match="another"):
        checkpointed(factor=5.0, text="A comment.")
    del sys.modules["settings_of_test"]


def test_a_version_stands_for_the_functions(job, tmp_path):
    out = tmp_path / "out"
    dii.checkpoint(job(), out, version="1")
    job.calls()
    dii.checkpoint(job(factor=2.0), out, version="1")
    assert job.calls() == 0
    with pytest.raises(ExportError, match="version= was '1' and is '2' now"):
        dii.checkpoint(job(), out, version="2")
    # Options of the read are known without it.
    with pytest.raises(ExportError, match="read_webdataset_images has changed"):
        dii.checkpoint(job(size=17), out, version="1")


LOCK = threading.Lock()


def with_a_lock(images):
    with LOCK:
        return images.mean((1, 2, 3))


def test_functions_that_no_digest_stands_for_are_refused(folder, tmp_path):
    ddf = dii.read_webdataset_images(folder, backend="pandas", size=16)
    made = ddf.images.map_batches(with_a_lock, outputs={"mean": "float32"})
    with pytest.raises(FunctionError, match=r"with_a_lock.*_thread.lock.*version='1'"):
        dii.checkpoint(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(dii.checkpoint(made, tmp_path / "out", version="1")) == 24


NOT_BY_PARTITION = {
    "merge": lambda d: d.merge(d[["__key__"]], on="__key__"),
    "shuffle": lambda d: d.shuffle("cls"),
    "repartition": lambda d: d.repartition(npartitions=2),
    "sample": lambda d: d.sample(frac=0.5, random_state=1),
    "random_split": lambda d: d.random_split([0.5, 0.5], random_state=1)[0],
    "set_index": lambda d: d.set_index("offset"),
    "sort_values": lambda d: d.sort_values("offset"),
    "drop_duplicates": lambda d: d.drop_duplicates("cls"),
    "mean of all": lambda d: d[d.width > d.width.mean()],
    "shift": lambda d: d.assign(before=d.width.shift(1)),
    "overlap": lambda d: d[["width"]].map_overlap(lambda x: x, 1, 0, meta=d[["width"]]._meta),
    "cumsum": lambda d: d.assign(total=d["nbytes"].cumsum()),
    "groupby": lambda d: d.groupby("cls").nbytes.sum().to_frame(),
    "head": lambda d: d.head(3, compute=False),
    "partition_info": lambda d: d.map_partitions(
        lambda x, partition_info=None: x, meta=d._meta, enforce_metadata=False
    ),
    "other shards": lambda d: d.partitions[:2].assign(n=d.partitions[1:].width),
    "concat": lambda d: dd.concat([d, d]),
}


@pytest.mark.parametrize("name", NOT_BY_PARTITION)
def test_what_brings_partitions_together_is_refused(name, folder, tmp_path):
    columns = ["__key__", "width", "cls", "offset", "nbytes"]
    ddf = dii.read_webdataset_images(folder, backend="pandas", columns=columns)
    with pytest.raises(ArgumentError, match="checkpoint"):
        dii.checkpoint(NOT_BY_PARTITION[name](ddf), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_frame_of_no_shards_is_refused(folder, tmp_path):
    ddf = dii.read_webdataset_images(folder, backend="pandas", columns=["__key__"])
    with pytest.raises(ArgumentError, match="before persist"):
        dii.checkpoint(ddf.persist(), tmp_path / "out")
    with pytest.raises(ArgumentError, match="not DataFrame"):
        dii.checkpoint(ddf.compute(), tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"ddf\[\['column'\]\]"):
        dii.checkpoint(ddf["__key__"], tmp_path / "out")


@pytest.mark.slow
def test_pixels_vectors_index_and_dtypes_survive(folder, tmp_path):
    ddf = dii.read_webdataset_images(folder, backend="pandas")
    ddf = ddf.images.map_batches(
        lambda images: np.array([i.mean((0, 1)) for i in images]),
        outputs={"vector": "list<float64>"},
        keep_image=True,
    )
    formats = pd.CategoricalDtype(["webp", "png", "jpeg", "gif"])
    ddf = ddf.assign(format=ddf["format"].astype(formats), width=ddf.width.astype("int64"))
    ddf = ddf[ddf.height > 150]
    want, got = ddf.compute(), dii.checkpoint(ddf, tmp_path / "out").compute()
    pixels = [want.pop("image").images.arrays(), got.pop("image").images.arrays()]
    pd.testing.assert_frame_equal(got, want)
    for one, other in zip(*pixels, strict=True):
        np.testing.assert_array_equal(one, other)


def test_divisions_survive(folder, tmp_path):
    ddf = dii.read_webdataset_images(folder, backend="pandas", columns=["__key__", "width"])
    keys = ddf["__key__"].compute()
    edges = [*keys[::8], keys.iloc[-1]]
    ddf = ddf.set_index("__key__", sorted=True, divisions=edges)
    for _ in range(2):
        stored = dii.checkpoint(ddf, tmp_path / "out")
        assert stored.divisions == tuple(edges)
        assert answer(stored.loc[keys.iloc[9] :].compute()) == answer(
            ddf.loc[keys.iloc[9] :].compute()
        )
        next((tmp_path / "out").glob("*.parquet")).unlink()


def test_only_the_columns_that_are_asked_for_are_read_and_len_reads_nothing(
    job, tmp_path, monkeypatch
):
    stored = dii.checkpoint(job(), tmp_path / "out")
    asked = []
    read = runner.parquet.ParquetFile.read

    def noted(self, columns=None, **options):
        asked.append(columns)
        return read(self, columns, **options)

    monkeypatch.setattr(runner.parquet.ParquetFile, "read", noted)
    assert len(stored) == 24
    assert asked == []
    stored["mean"].compute()
    assert asked == [["mean"]] * 3
    del asked[:]
    stored[stored["cls"] == 1][["txt"]].compute()
    assert [sorted(columns) for columns in asked] == [["cls", "txt"]] * 3


def test_images_of_a_checkpoint_have_the_shape_that_is_known(folder, tmp_path):
    ddf = dii.read_webdataset_images(folder, backend="pandas", size=16)
    stored = dii.checkpoint(ddf, tmp_path / "out")
    assert stored.images.stack().shape[1:] == (16, 16, 3)
    np.testing.assert_array_equal(stored.images.stack(), ddf.images.stack())


def test_a_checkpoint_of_a_checkpoint(job, folder, tmp_path):
    def both():
        first = dii.checkpoint(job(), tmp_path / "first")
        return first, dii.checkpoint(
            first[["__key__", "mean"]].assign(twice=first["mean"] * 2), tmp_path / "second"
        )

    first, second = both()
    assert second["twice"].compute().tolist() == [2 * mean for mean in first["mean"].compute()]
    before = {file.name for file in (tmp_path / "second").glob("*.parquet")}
    shutil.copy(folder / "photos-000.tar", folder / "photos-002.tar")
    first, second = both()
    after = {file.name for file in (tmp_path / "second").glob("*.parquet")}
    assert (len(before & after), len(after)) == (2, 3)
    assert second["twice"].compute().tolist() == [2 * mean for mean in first["mean"].compute()]


def test_late_decode_and_locations_go_through(folder, tmp_path):
    table = dii.read_webdataset_images(folder, backend="pandas").drop(columns=["image", "error"])
    decoded = dii.decode_images(table[table.width > 200])
    stored = dii.checkpoint(decoded, tmp_path / "out")
    assert answer(stored.compute()) == answer(decoded.compute())
    written = dii.to_webdataset(stored, tmp_path / "shards" / "{shard}.tar")
    assert written["samples"].sum() == len(stored)


def test_a_shard_that_cannot_be_read_is_left_out_and_tried_again(job, folder, tmp_path):
    shard = folder / "photos-001.tar"
    content = shard.read_bytes()
    shard.write_bytes(b"no tar at all" * 1000)
    with pytest.raises(ShardError):
        dii.checkpoint(job(), tmp_path / "out")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"1 shards could not be read.*photos-001"):
            stored = dii.checkpoint(job(shard_errors="drop"), tmp_path / "out")
        assert (len(stored), stored.npartitions) == (16, 3)
        assert len(stored.compute()) == 16
    shard.write_bytes(content)
    job.calls()
    assert len(dii.checkpoint(job(shard_errors="drop"), tmp_path / "out").compute()) == 24
    assert job.calls() == 1


def test_a_shard_that_changes_under_way_is_not_stored(job, folder, tmp_path):
    frame = job()
    os.utime(folder / "photos-001.tar", ns=(1, 1))
    with pytest.raises(ShardError, match=r"photos-001.tar has changed since it was listed"):
        dii.checkpoint(frame, tmp_path / "out")


def test_a_damaged_file_is_made_again(job, tmp_path):
    dii.checkpoint(job(), tmp_path / "out")
    file = next((tmp_path / "out").glob("*.parquet"))
    os.truncate(file, 100)
    job.calls()
    stored = dii.checkpoint(job(), tmp_path / "out")
    assert job.calls() == 1
    assert answer(stored.compute()) == answer(job().compute())
    file.unlink()
    with pytest.raises(ExportError, match=r"let checkpoint.. make it again"):
        stored.compute()


def cut_short(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "parts gone": lambda folder, part: (folder / "_parts.json").unlink(),
    "parts cut": lambda folder, part: cut_short(folder / "_parts.json"),
    "parts of another form": lambda folder, part: (folder / "_parts.json").write_text("[1]"),
    "parts gone, and one cut": lambda folder, part: (
        (folder / "_parts.json").unlink(),
        cut_short(part),
    ),
    "parts gone, and one of other columns": lambda folder, part: (
        (folder / "_parts.json").unlink(),
        pd.DataFrame({"a": [1]}).to_parquet(part),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_folder_is_made_whole(damage, overwrite, job, tmp_path):
    expected = answer(dii.checkpoint(job(), tmp_path / "out").compute())
    files = {path.name for path in (tmp_path / "out").iterdir()}
    part = min((tmp_path / "out").glob("*-of-*.parquet"))
    DAMAGES[damage](tmp_path / "out", part)
    job.calls()
    stored = dii.checkpoint(job(), tmp_path / "out", overwrite=overwrite)
    assert answer(stored.compute()) == expected
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    assert job.calls() == (len(files) - 2 if overwrite else "and one" in damage)


def test_a_folder_that_does_not_say_whose_it_is_is_refused_by_name(job, tmp_path):
    dii.checkpoint(job(), tmp_path / "out")
    for content in ("", "{}", "[]", '{"format": 1}', '{"format": 2}'):
        (tmp_path / "out" / "_checkpoint.json").write_text(content)
        for overwrite in (False, True):
            with pytest.raises(ExportError, match=r"_checkpoint\.json is damaged, .* or move the"):
                dii.checkpoint(job(), tmp_path / "out", overwrite=overwrite)


def test_a_task_that_outlived_its_run_changes_nothing_of_a_later_one(job, tmp_path, monkeypatch):
    # The same version= of a model whose weights have changed: the same files.
    computing, going_on, tasks, told = threading.Event(), threading.Event(), [], []
    task_of = runner._store

    def killed(task, **options):
        tasks.append((task, options))
        raise KeyboardInterrupt

    def slow(frame):
        computing.set()
        assert going_on.wait(60)
        return to_storage(frame)

    def outlive():
        try:
            task_of(tasks[0][0], **tasks[0][1])
        except ExportError as error:
            told.append(str(error))

    monkeypatch.setattr(runner, "_store", killed)
    with pytest.raises(KeyboardInterrupt), dask.config.set(scheduler="sync"):
        dii.checkpoint(job(1.0), tmp_path / "out", version="1")
    monkeypatch.setattr(runner, "_store", task_of)
    with monkeypatch.context() as patched:
        backend = backend_of(pd.DataFrame())
        to_storage = backend.to_storage
        patched.setattr(type(backend), "to_storage", lambda self, frame: slow(frame))
        outlived = threading.Thread(target=outlive)
        outlived.start()
        assert computing.wait(60)
    dii.checkpoint(job(2.0), tmp_path / "out", version="1", overwrite=True)
    expected = contents(tmp_path / "out")
    going_on.set()
    outlived.join(60)
    assert "another run writes to" in told[0]
    assert contents(tmp_path / "out") == expected


def test_a_second_writer_is_refused(job, tmp_path, monkeypatch):
    compute, refused = runner._store, []

    def interrupted(*arguments, **options):
        if not refused:
            with pytest.raises(ExportError, match=r"writes to .* now") as error:
                dii.checkpoint(job(), tmp_path / "out")
            refused.append(error)
        return compute(*arguments, **options)

    monkeypatch.setattr(runner, "_store", interrupted)
    dii.checkpoint(job(), tmp_path / "out")
    assert refused


def test_another_checkpoint_in_the_folder_of_an_export_does_no_harm(job, tmp_path):
    table = job().drop(columns=["mean", "vector"])
    written = dii.to_webdataset(table, tmp_path / "out" / "{shard}.tar")
    dii.checkpoint(job(), tmp_path / "out")
    dii.checkpoint(job(), tmp_path / "out", overwrite=True)
    for url in written["url"]:
        assert os.path.exists(url)
        assert os.path.exists(url.replace(".tar", ".parquet"))


@pytest.mark.parametrize(
    "options", [{"version": 1}, {"version": ""}, {"overwrite": "yes"}, {"path": ""}]
)
def test_arguments_that_make_no_sense_are_refused(options, job, tmp_path):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        dii.checkpoint(job(), **({"path": tmp_path / "out"} | options))


def test_a_sidecar_is_part_of_its_shard(folder, tmp_path):
    for shard in sorted(folder.glob("*.tar")):
        keys = dii.read_webdataset_images(shard, backend="pandas")["__key__"].compute()
        pd.DataFrame({"key": keys.to_numpy(), "score": 1.0}).to_parquet(
            shard.with_suffix(".parquet")
        )
    options = {"sidecar": "parquet", "size": 16, "backend": "pandas"}

    def stored():
        ddf = dii.read_webdataset_images(folder, **options)
        model = Counted(tmp_path / "calls")
        return dii.checkpoint(ddf.images.map_batches(model, outputs=OUTPUTS), tmp_path / "out")

    assert stored()["score"].compute().eq(1).all()
    changed = sorted(folder.glob("*.parquet"))[1]
    pd.read_parquet(changed).assign(score=2.0).to_parquet(changed)
    (tmp_path / "calls").unlink()
    assert stored()["score"].compute().tolist() == [1.0] * 8 + [2.0] * 8 + [1.0] * 8
    assert (tmp_path / "calls").read_text() == "called\n"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_read_is_not_written_to(overwrite, shards, tmp_path):
    table = dii.read_webdataset_images(shards[0], decode=False, backend="pandas")
    dii.to_parquet_images(table[["__key__", "image"]], tmp_path / "in")
    frame = dii.read_parquet_images(tmp_path / "in", decode=False, backend="pandas")
    for path in (tmp_path / "in", f"file://{tmp_path}/in/", tmp_path):
        with pytest.raises(ExportError, match=r"the frame reads .*, which lies in"):
            dii.checkpoint(frame, path, overwrite=overwrite)
    assert len(dii.read_parquet_images(tmp_path / "in")) == len(table)
    dii.checkpoint(dii.checkpoint(frame, tmp_path / "one"), tmp_path / "two")
    with pytest.raises(ExportError, match=r"the frame reads .*, which lies in"):
        dii.checkpoint(dii.checkpoint(frame, tmp_path / "one"), tmp_path / "one", overwrite=True)


def test_values_of_every_arrow_type_come_back_as_they_were(folder, tmp_path):
    by_function, assigned = (
        {
            f"{origin}{number}": each
            for number, each in enumerate(each for a in arrays for each in (a, *nested(a)))
        }
        for origin, arrays in (("f", PLAIN), ("c", [*OTHERS, *UNREAD]))
    )

    def made(keys):
        return {name: array.to_pylist() for name, array in by_function.items()}

    def with_columns(frame):
        columns = {
            name: pd.arrays.ArrowExtensionArray(pa.chunked_array([array[: len(frame)]]))
            for name, array in assigned.items()
        }
        return frame.assign(**columns)

    read = dii.read_webdataset_images(folder, decode=False).partitions[:1]
    first = read.map_partitions(lambda frame: frame[:3], meta=read._meta)
    outputs = {name: array.type for name, array in by_function.items()}
    ddf = first.images.map_batches(made, outputs, inputs=["__key__"], skip_missing=False)
    ddf = ddf.map_partitions(with_columns, meta=with_columns(ddf._meta))
    want, got = ddf.compute(), dii.checkpoint(ddf, tmp_path / "kept").compute()
    assert len(got) == 3
    for name, array in (by_function | assigned).items():
        assert got[name].dtype == want[name].dtype, name
        for frame in (want, got):
            column = pa.array(frame[name]).cast(array.type)
            # Dictionaries may have their categories in another order.
            assert column.equals(array) or column.to_pylist() == array.to_pylist(), name
