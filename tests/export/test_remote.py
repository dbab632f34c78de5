"""Places that fsspec writes to: a real S3 server, and a file system in memory."""

from __future__ import annotations

import importlib
import json
import os
import threading
from functools import partial
from itertools import product
from unittest import mock

import dask
import dask.dataframe as dd
import pytest
from faulty_server import faulty_server
from s3 import empty_bucket, s3_options
from sleeper import Sleeper
from witnesses import by_webdataset, contents

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export import write_shards
from dask_image_ingest.storage.output import store as output_store

# The module, not the function of this name.
run = importlib.import_module("dask_image_ingest.export.to_webdataset")

pytestmark = pytest.mark.slow


STEPS = ["stage_frame", "make_plan", "one_task_per_item", "refuse_other_run"]
# The server makes an export slow: one of its cases stands for the others.
ONLY_NIGHTLY = {("s3", step, how) for step in STEPS for how in ("resume", "overwrite")}
ONLY_NIGHTLY -= {("s3", "one_task_per_item", "resume")}


@pytest.fixture
def table(shards):
    return dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])


def export(frame, remote, **more):
    url, storage_options, _ = remote
    options = {"samples_per_shard": 8, "index": True} | more
    return dii.to_webdataset(
        frame, url + "/{shard:03d}.tar", storage_options=storage_options, **options
    )


def files(remote) -> dict[str, bytes]:
    url, _, fs = remote
    fs.invalidate_cache()
    root = url.partition("://")[2]
    return {
        name.strip("/").removeprefix(root + "/"): fs.cat_file(name)
        for name in fs.find(root)
        if not name.endswith("_plan.json")
    }


@pytest.mark.parametrize("shuffle", [None, 1])
def test_the_same_shards_as_on_this_machine(shuffle, table, remote, tmp_path):
    told = export(table, remote, shuffle=shuffle)
    options = {"samples_per_shard": 8, "index": True, "shuffle": shuffle}
    dii.to_webdataset(table, tmp_path / "{shard:03d}.tar", **options)
    there, here = files(remote), contents(tmp_path)
    assert there.keys() == here.keys()
    for name in there:
        if name.endswith((".tar", ".idx")):
            assert there[name] == (tmp_path / name).read_bytes(), name
    assert told["url"].tolist() == [f"{remote[0]}/{number:03d}.tar" for number in range(3)]
    manifest = json.loads(there["_manifest.json"])
    assert [entry["bytes"] for entry in manifest["shards"]] == [
        len(there[e["name"]]) for e in manifest["shards"]
    ]


@pytest.mark.filterwarnings("ignore:The inplace keyword")
def test_sidecars_point_to_the_remote_shards(table, remote, photos):
    url, options, _ = remote
    export(table, remote)
    sidecars = dd.read_parquet(url + "/*.parquet", storage_options=options)
    wide = dii.decode_images(sidecars[sidecars.width > 200], storage_options=options).compute()
    assert wide["error"].isna().all()
    assert set(wide["__key__"]) == {p.key for p in photos if p.pixels.shape[1] > 200}


def test_an_export_from_there_to_there(table, remote, tmp_path):
    url, options, _ = remote
    export(table, remote)
    again = dii.read_webdataset_images(url, backend="pandas", storage_options=options)
    url = url.removesuffix("out") + "more"
    told = dii.to_webdataset(again, url + "/{shard}.tar", storage_options=options, shuffle=3)
    assert told["samples"].tolist() == [24]
    again = dii.read_webdataset_images(url, backend="pandas", storage_options=options)
    assert sorted(again["__key__"].compute()) == sorted(table["__key__"].compute())


def test_a_second_export_is_refused_and_an_overwrite_removes_the_first(table, remote):
    export(table, remote)
    with pytest.raises(ExportError, match="has an export of 24 samples"):
        export(table, remote)
    export(table[table.width > 200], remote, samples_per_shard=50, index=False, overwrite=True)
    assert files(remote).keys() == {"000.tar", "000.parquet", "_manifest.json"}


def test_a_failing_upload_is_told_and_loses_nothing(table, remote, monkeypatch):
    export(table, remote)
    expected = files(remote)
    remote[2].rm(remote[0], recursive=True)
    put_file = remote[2].put_file
    uploads = []

    def failing(lpath, rpath, **kwargs):
        uploads.append(rpath)
        if rpath.endswith(".tar") and sum(path.endswith(".tar") for path in uploads) == 2:
            raise ConnectionResetError("the connection broke off")
        return put_file(lpath, rpath, **kwargs)

    with monkeypatch.context():
        monkeypatch.setattr(remote[2], "put_file", failing)
        with pytest.raises(ExportError, match=r"\d.tar cannot be written: .*broke off.*resume="):
            export(table, remote)
    monkeypatch.undo()
    there = files(remote)
    assert sum(name.endswith(".tar") for name in there) == 1
    assert all(there[name] == expected[name] for name in there if name.endswith(".tar"))
    assert "_manifest.json" not in there
    written = []
    write = write_shards.copy_members
    monkeypatch.setattr(
        write_shards, "copy_members", lambda *args: written.append(args) or write(*args)
    )
    export(table, remote, resume=True)
    assert len(written) == 2
    assert files(remote) == expected


def test_an_upload_that_arrives_short_is_told(table, remote, monkeypatch):
    fs = remote[2]
    put_file = fs.put_file

    def short(lpath, rpath, **kwargs):
        if not rpath.endswith(".tar"):
            return put_file(lpath, rpath, **kwargs)
        return fs.pipe_file(rpath, b"short")

    monkeypatch.setattr(fs, "put_file", short)
    with pytest.raises(ExportError, match=r"has 5 bytes after \d+ were sent"):
        export(table, remote)


def test_the_second_of_two_writers_is_refused(table, remote, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def waiting(*args, **kwargs):
        begun.set()
        assert go_on.wait(60)
        return stage(*args, **kwargs)

    stage = run.stage_frame
    monkeypatch.setattr(run, "stage_frame", waiting)
    first = threading.Thread(target=export, args=(table, remote))
    first.start()
    assert begun.wait(60)
    try:
        with pytest.raises(ExportError, match=r"or was killed there \(process \d+ on"):
            export(table, remote)
    finally:
        go_on.set()
        first.join()
    names = files(remote)
    assert sum(name.endswith(".tar") for name in names) == 3
    assert "_lock" not in names


def test_what_a_killed_writer_leaves_is_taken_over(table, remote, monkeypatch):
    export(table, remote)
    expected = files(remote)
    url, _, fs = remote
    root = url.partition("://")[2]
    fs.rm(root, recursive=True)
    write_shard = run.write_shard

    def stopping(number, context):
        if number == 1:
            raise KeyboardInterrupt
        return write_shard(number, context)

    with monkeypatch.context() as context, dask.config.set(scheduler="sync"):
        context.setattr(run, "write_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            export(table, remote)
    dead = {"run": "gone", "who": f"process 1 on {os.uname().nodename}"}
    fs.pipe_file(f"{root}/_lock", json.dumps(dead).encode())
    fs.pipe_file(f"{root}/_staging/{'0' * 32}.tmp", b"left over")
    with pytest.raises(ExportError, match=r"was killed there \(process 1 on .* resume=True"):
        export(table, remote)
    export(table, remote, resume=True)
    assert files(remote) == expected


@pytest.mark.more
@pytest.mark.parametrize(
    ("remote", "step", "taken_over"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] if case in ONLY_NIGHTLY else [])
        for case in product(["memory", "s3"], STEPS, ["resume", "overwrite"])
    ],
    indirect=["remote"],
)
def test_a_run_that_slept_while_another_took_over_changes_nothing(
    step, taken_over, table, remote, monkeypatch
):
    export(table.assign(score=2), remote)
    first = partial(export, table.assign(score=1), remote, samples_per_shard=12, overwrite=True)
    sleeper = Sleeper(monkeypatch, run, step, first)
    try:
        # The earlier export is resumed, or the same call goes on.
        score, per_shard = (2, 8) if taken_over == "resume" else (1, 12)
        frame = table.assign(score=score)
        export(frame, remote, samples_per_shard=per_shard, **{taken_over: True})
        expected = files(remote)
    finally:
        sleeper.wake()
    (error,) = sleeper.errors
    assert isinstance(error, ExportError)
    assert "another run" in str(error)
    found = files(remote)
    assert {name: found[name] for name in found if not name.startswith("_staging/")} == expected


@pytest.mark.more
@pytest.mark.parametrize("error", [None, ArgumentError("refused")])
def test_a_run_that_wakes_while_another_plans_takes_nothing_from_it(
    error, table, remote, monkeypatch
):
    make_plan = run.make_plan
    sleeper = Sleeper(monkeypatch, run, "stage_frame", partial(export, table, remote))

    def waking(*args, **kwargs):
        if threading.current_thread() is not sleeper.thread:
            sleeper.wake()
        elif error:
            raise error
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(run, "make_plan", waking)
    export(table, remote, resume=True)
    (told,) = sleeper.errors
    assert "another run has taken over" in str(told)
    assert sum(name.endswith(".tar") for name in files(remote)) == 3


@pytest.mark.more
def test_a_file_system_without_whole_uploads_gets_files_by_renaming(table, remote, monkeypatch):
    export(table, remote)
    expected = files(remote)
    remote[2].rm(remote[0], recursive=True)
    monkeypatch.setattr(output_store, "OBJECT_STORES", frozenset())
    fs = remote[2]
    put_file = fs.put_file
    targets = []

    def noting(lpath, rpath, **kwargs):
        targets.append(rpath)
        return put_file(lpath, rpath, **kwargs)

    monkeypatch.setattr(fs, "put_file", noting)
    export(table, remote)
    assert files(remote) == expected
    assert all("/_staging/" in target for target in targets)


def test_reading_back_by_webdataset(table, remote, tmp_path, photos):
    export(table, remote)
    for name, content in files(remote).items():
        if name.endswith(".tar"):
            (tmp_path / name).write_bytes(content)
    found = by_webdataset(sorted(tmp_path.glob("*.tar")))
    assert found == [(photo.key, photo.members) for photo in photos]


def test_a_record_whose_answer_was_lost_is_its_writers_own(s3_server):
    """The store has it, and refuses the second try: that is no other writer."""
    empty_bucket(s3_server, "lost")
    with faulty_server(upstream=s3_server) as proxy:
        place = output_store.RemoteStore("s3://lost/out", s3_options(proxy.url))
        assert place.read("_lock") is None
        # Before it is written, its writer looks whether there is one: by two requests.
        with mock.patch.object(
            proxy, "fault", side_effect=[None, None, "lost", *[None] * 9]
        ) as met:
            assert place.create("_lock", b"mine")
        assert met.call_count > 3
        assert place.read("_lock") == b"mine"
        assert not place.create("_lock", b"another's")
