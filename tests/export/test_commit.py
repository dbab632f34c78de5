"""Whole or not at all, one writer, and nothing of others is touched."""

from __future__ import annotations

import errno
import hashlib
import importlib
import io
import json
import logging
import os
import threading

import pandas as pd
import pyarrow as pa
import pytest
from forked_python import run_python
from witnesses import contents, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export import write_shards
from dask_image_ingest.storage.output import store as output_store

# The module, not the function of this name.
run = importlib.import_module("dask_image_ingest.export.to_webdataset")


@pytest.fixture
def table(shards):
    return dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def export(frame, out, **options):
    options = {"samples_per_shard": 5, "index": True} | options
    return dii.to_webdataset(frame, out / "{shard:03d}.tar", **options)


def finished_files(out):
    return {name: content for name, content in contents(out).items() if "_staging" not in name}


class Stopped(Exception):
    pass


@pytest.fixture
def stop_at(monkeypatch):
    """Let an export fail at the n-th shard that is committed."""

    def stop(number):
        commits = []
        commit = output_store.LocalStore.commit

        def committing(self, file, name, *args):
            if name.endswith(".tar"):
                commits.append(name)
                if len(commits) == number:
                    raise Stopped
            commit(self, file, name, *args)

        monkeypatch.setattr(output_store.LocalStore, "commit", committing)

    return stop


def test_the_manifest_says_what_is_there(table, out):
    told = export(table, out)
    manifest = json.loads((out / "_manifest.json").read_text())
    named = {"_manifest.json", "_plan.json"}
    for entry in manifest["shards"]:
        for file in (entry, *entry["beside"]):
            content = (out / file["name"]).read_bytes()
            assert len(content) == file["bytes"]
            assert hashlib.sha256(content).hexdigest() == file["sha256"]
            named.add(file["name"])
    assert {path.name for path in out.iterdir()} == named
    assert told["sha256"].tolist() == [entry["sha256"] for entry in manifest["shards"]]
    assert told["samples"].tolist() == [5, 5, 5, 5, 4]
    assert told["url"].tolist() == [str(path) for path in shards_in(out)]


def test_a_second_export_to_a_place_is_refused(table, out):
    export(table, out)
    before = contents(out)
    with pytest.raises(ExportError, match=r"has an export of 24 samples. resume=True"):
        export(table, out)
    assert contents(out) == before


def test_a_finished_export_is_found_finished(table, out, monkeypatch):
    told = export(table, out)
    monkeypatch.setattr(run, "stage_frame", None)
    again = export(table, out, resume=True)
    pd.testing.assert_frame_equal(told, again)
    assert told.attrs == again.attrs


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_stopped_export_goes_on_where_it_stopped(
    number, table, out, tmp_path, stop_at, monkeypatch
):
    export(table, out)
    expected = contents(out)
    out.rename(tmp_path / "whole")
    with monkeypatch.context():
        stop_at(number)
        with pytest.raises(Stopped):
            export(table, out)
    assert len(shards_in(out)) == number - 1
    with pytest.raises(ExportError, match=f"an unfinished export, {number - 1} of 5 shards"):
        export(table, out)
    monkeypatch.undo()
    written = []
    write = write_shards.copy_members
    monkeypatch.setattr(
        write_shards, "copy_members", lambda *args: written.append(args) or write(*args)
    )
    monkeypatch.setattr(run, "stage_frame", None)  # the plan is there already
    export(table, out, resume=True)
    assert len(written) == 5 - (number - 1)
    assert contents(out) == expected


def test_it_goes_on_with_other_partitions(shards, out, tmp_path, stop_at, monkeypatch):
    small = dii.read_webdataset_images(shards, backend="pandas", partition_size="300 kB")
    large = dii.read_webdataset_images(shards, backend="pandas", partition_size=None)
    assert small.npartitions > large.npartitions
    export(large, out)
    expected = contents(out)
    out.rename(tmp_path / "whole")
    with monkeypatch.context():
        stop_at(3)
        with pytest.raises(Stopped):
            export(large, out)
    monkeypatch.undo()
    export(small, out, resume=True)
    assert contents(out) == expected


def test_a_finished_export_without_all_of_its_files_is_told(table, out):
    export(table, out)
    os.truncate(out / "003.parquet", 10)
    with pytest.raises(ExportError, match="files are missing"):
        export(table, out, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda d: (d[d.width > 150], {}), "the frame is another one"),
        (lambda d: (d, {"samples_per_shard": 6}), "samples_per_shard was 5 and is 6 now"),
        (lambda d: (d, {"shuffle": 1}), "shuffle was None and is 1 now"),
        (lambda d: (d, {"members": ["jpg", "png", "webp"]}), "members was"),
        (lambda d: (d.assign(new=1), {}), "the frame is another one"),
        (lambda d: (d.compute()[::-1], {}), "the frame is another one"),
    ],
    ids=["rows", "count", "shuffle", "members", "columns", "order"],
)
def test_another_export_to_the_same_place_is_refused(other, said, table, out, stop_at, monkeypatch):
    with monkeypatch.context():
        stop_at(2)
        with pytest.raises(Stopped):
            export(table, out)
    monkeypatch.undo()
    before = contents(out)
    frame, options = other(table)
    with pytest.raises(ExportError, match=said):
        export(frame, out, resume=True, **options)
    assert contents(out) == before
    export(table, out, resume=True)


def test_columns_of_other_values_are_refused_before_anything_is_written(
    table, out, stop_at, monkeypatch
):
    with monkeypatch.context():
        stop_at(3)
        with pytest.raises(Stopped):
            export(table.assign(score=1), out)
    monkeypatch.undo()
    before = finished_files(out)
    with pytest.raises(ExportError, match="the frame is another one"):
        export(table.assign(score=2), out, resume=True)
    assert finished_files(out) == before
    export(table.assign(score=1), out, resume=True)
    assert {score for path in out.glob("0*.parquet") for score in pd.read_parquet(path).score} == {
        1
    }


def test_a_persisted_frame_goes_on_in_its_own_process(table, out, stop_at, monkeypatch):
    frame = table.persist()
    with monkeypatch.context():
        stop_at(3)
        with pytest.raises(Stopped):
            export(frame, out)
    monkeypatch.undo()
    export(frame, out, resume=True)
    assert len(shards_in(out)) == 5


def test_a_source_that_changed_makes_another_frame(shards, out, tmp_path, stop_at, monkeypatch):
    paths = [tmp_path / path.name for path in shards]
    for path, source in zip(paths, shards, strict=True):
        path.write_bytes(source.read_bytes())
    with monkeypatch.context():
        stop_at(3)
        with pytest.raises(Stopped):
            export(dii.read_webdataset_images(paths, backend="pandas"), out)
    monkeypatch.undo()
    os.utime(paths[2], (1, 1))
    with pytest.raises(ExportError, match="the frame is another one"):
        export(dii.read_webdataset_images(paths, backend="pandas"), out, resume=True)


def test_overwrite_says_what_it_removes_and_removes_nothing_else(table, out, caplog):
    export(table, out)
    (out / "notes.txt").write_text("mine")
    (out / "007.tar").write_text("mine too")
    with caplog.at_level(logging.WARNING):
        export(table[table.width > 200], out, samples_per_shard=10, index=False, overwrite=True)
    assert f"removes 17 files of an earlier export from {out}: _manifest.json" in caplog.text
    assert {path.name for path in out.iterdir()} == {
        *("_manifest.json", "_plan.json", "notes.txt", "007.tar"),
        *("000.tar", "000.parquet", "001.tar", "001.parquet"),
    }


@pytest.mark.slow
def test_a_refused_overwrite_removes_nothing(table, out):
    export(table, out)
    before = contents(out)
    with pytest.raises(ArgumentError):
        export(table.compute().assign(__key__="a.b"), out, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_are_not_written_over(overwrite, table, out):
    out.mkdir()
    (out / "003.tar").write_text("mine")
    with pytest.raises(ExportError, match=r"1 files which no export wrote .* first 003.tar"):
        export(table, out, overwrite=overwrite)
    assert [path.name for path in out.iterdir()] == ["003.tar"]
    assert (out / "003.tar").read_text() == "mine"


def test_the_shards_that_are_read_are_not_written_over(table, out):
    export(table, out)
    again = dii.read_webdataset_images(out, backend="pandas")
    before = contents(out)
    with pytest.raises(
        ExportError, match=r"the frame reads .*000.(tar|parquet), which this export would"
    ):
        export(again, out, overwrite=True)
    assert contents(out) == before


def test_a_plan_of_another_making_is_left_alone(table, out):
    out.mkdir()
    (out / "_plan.json").write_text('{"format": 99}')
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ExportError, match="is not what this release writes there"):
            export(table, out, **options)
    template = {"template": "../{shard}.tar", "sidecar": False, "index": False}
    (out / "_plan.json").write_text(json.dumps({"format": 1, "options": template, "shards": 1}))
    with pytest.raises(ExportError, match="is not what this release writes there"):
        export(table, out, overwrite=True)


def test_the_second_of_two_writers_is_refused(table, out, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def waiting(*args, **kwargs):
        begun.set()
        assert go_on.wait(60)
        return stage(*args, **kwargs)

    stage = run.stage_frame
    monkeypatch.setattr(run, "stage_frame", waiting)
    first = threading.Thread(target=export, args=(table, out))
    first.start()
    assert begun.wait(60)
    try:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(
                ExportError, match=rf"another run writes to .* \(process {os.getpid()}"
            ):
                export(table, out, **options)
    finally:
        go_on.set()
        first.join()
    assert len(shards_in(out)) == 5
    assert not (out / "_lock").exists()


def test_a_task_that_outlived_its_export_changes_nothing_of_a_later_one(table, out, monkeypatch):
    # The same samples with other scores: the same plan.
    contexts, copying, going_on = [], threading.Event(), threading.Event()
    write_shard, copy_members = run.write_shard, write_shards.copy_members

    def killed(number, context):
        contexts.append(context)
        raise Stopped

    def slow(*args):
        copying.set()
        assert going_on.wait(60)
        return copy_members(*args)

    told = []

    def outlive(context):
        try:
            write_shard(0, context)
        except ExportError as error:
            told.append(str(error))

    monkeypatch.setattr(run, "write_shard", killed)
    with pytest.raises(Stopped):
        export(table.assign(score=1), out)
    monkeypatch.setattr(run, "write_shard", write_shard)
    monkeypatch.setattr(write_shards, "copy_members", slow)
    task = threading.Thread(target=outlive, args=(contexts[0],))
    task.start()
    assert copying.wait(60)
    monkeypatch.setattr(write_shards, "copy_members", copy_members)
    export(table.assign(score=2), out, overwrite=True)
    expected = contents(out)
    going_on.set()
    task.join(60)
    assert "another run writes to" in told[0]
    assert contents(out) == expected
    assert set(pd.read_parquet(out / "000.parquet").score) == {2}


# Runs with a limit on the size of a file, which is to a writer what a full disk is.
LIMITED = """
import resource, sys
import dask
import dask_image_ingest as dii
from dask_image_ingest.errors import ExportError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
frame = dii.read_webdataset_images(sys.argv[1], backend="pandas")
frame = frame.drop(columns=["image", "error"])
with dask.config.set(scheduler="synchronous"):
    try:
        dii.to_webdataset(frame, sys.argv[2] + "/{shard:03d}.tar", samples_per_shard=3)
    except ExportError as error:
        print(error)
"""


@pytest.mark.newest
@pytest.mark.slow
def test_a_full_disk_is_told_and_loses_nothing(shards, table, out, tmp_path):
    export(table, out, samples_per_shard=3, index=False)
    expected = contents(out)
    out.rename(tmp_path / "whole")
    finished = run_python(LIMITED, shards[0].parent, out)
    assert (
        "File too large. What is finished stays; make room, and run it again, to_webdataset() with "
        "resume=True" in finished.stdout
    )
    assert finished.returncode == 0, finished.stderr
    for path in shards_in(out):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    assert len(shards_in(out)) < 8
    assert not list((out / "_staging").glob("*.tmp"))
    export(table, out, samples_per_shard=3, index=False, resume=True)
    assert contents(out) == expected


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_told(error, table, out, monkeypatch):
    def refusing(path, *args, **kwargs):
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(os, "makedirs", refusing)
    with pytest.raises(
        ExportError, match=f"{out} cannot be written: {os.strerror(error)}. Choose another"
    ):
        export(table, out)
    monkeypatch.undo()
    assert not out.exists()


def test_a_staged_table_that_cannot_be_read_back_is_told(table, out, monkeypatch):
    class Failing(io.BytesIO):
        def read(self, *args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    failing = pa.PythonFile(Failing(b"ARROW1" * 100), mode="r")
    monkeypatch.setattr(output_store.LocalStore, "open", lambda self, name: failing)
    told = rf"{out}/_staging/\S+ cannot be read: .*{os.strerror(errno.EIO)}"
    with pytest.raises(ExportError, match=told):
        export(table, out)
    monkeypatch.undo()
    export(table, out, resume=True)
    assert len(shards_in(out)) == 5  # 24 samples


def test_a_file_in_place_of_the_folder_is_told(table, out):
    out.write_text("a file")
    with pytest.raises(ExportError, match=f"{out} cannot be written"):
        export(table, out)


def test_shards_may_be_read_by_whoever_may_read_the_folder(table, out):
    before = os.umask(0o022)
    try:
        export(table, out)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
