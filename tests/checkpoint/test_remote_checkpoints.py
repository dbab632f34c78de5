"""Checkpoints where fsspec writes to: a real S3 server, and a file system in memory."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from query_answers import answer
from sleeper import Sleeper

import dask_image_ingest as dii
from dask_image_ingest.checkpoint.query import FingerprintedQuery
from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output.store import RemoteStore

runner = importlib.import_module("dask_image_ingest.checkpoint.checkpoint")

pytestmark = pytest.mark.slow


@pytest.fixture
def frame(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16)
    return ddf.images.map_batches(
        _vectors, outputs={"vector": "list<float32>"}, batch_size=100, keep_image=True
    )


def _vectors(images):
    return np.asarray(images).mean((1, 2), dtype="float32")


def checkpoint(frame, remote, **options):
    return dii.checkpoint(frame, remote[0], storage_options=remote[1], **options)


def files(remote) -> dict[str, bytes]:
    fs = remote[2]
    fs.invalidate_cache()
    return {name: fs.cat_file(name) for name in fs.find(remote[0].partition("://")[2])}


def test_what_is_missing_there_is_computed_and_nothing_else(frame, remote):
    stored = checkpoint(frame, remote)
    assert answer(stored.compute()) == answer(frame.compute())
    before = files(remote)
    part = next(name for name in before if name.endswith(".parquet"))
    times = remote[2].modified(next(n for n in before if n.endswith(".parquet") and n != part))
    remote[2].rm(part)
    stored = checkpoint(frame, remote)
    assert files(remote) == before
    assert times == remote[2].modified(
        next(n for n in before if n.endswith(".parquet") and n != part)
    )
    assert answer(stored[["vector"]].compute()) == answer(frame[["vector"]].compute())


def test_a_finished_one_is_opened_with_no_upload(frame, remote, monkeypatch):
    checkpoint(frame, remote)

    def refuse(*arguments, **options):
        raise AssertionError("nothing is to be written")

    monkeypatch.setattr(RemoteStore, "commit", refuse)
    monkeypatch.setattr(RemoteStore, "create", refuse)
    assert len(checkpoint(frame, remote)) == 24


def test_the_record_of_a_dead_writer_is_taken_over(frame, remote):
    url, options, _ = remote
    place = RemoteStore(url, options)
    assert place.create("_lock", b'{"run": "x", "who": "somebody who is dead", "beat": 3}')
    assert len(checkpoint(frame, remote)) == 24
    assert not any(name.endswith("_lock") for name in files(remote))


def test_a_failing_upload_is_told_and_loses_nothing(frame, remote, monkeypatch):
    put_file = remote[2].put_file
    uploads = []

    def failing(lpath, rpath, **kwargs):
        if rpath.endswith(".parquet"):
            uploads.append(rpath)
            if len(uploads) == 2:
                raise ConnectionResetError("the connection broke off")
        return put_file(lpath, rpath, **kwargs)

    monkeypatch.setattr(remote[2], "put_file", failing)
    with pytest.raises(ExportError, match=r"broke off.*run it again, checkpoint\(\) goes on"):
        checkpoint(frame, remote)
    assert sum(name.endswith(".parquet") for name in files(remote)) == 1
    checkpoint(frame, remote)
    # The second and the third are sent again, the first is not.
    assert len(uploads) == 4


@pytest.mark.parametrize("step", ["tasks_of", "one_task_per_item"])
def test_a_checkpoint_that_slept_while_another_took_over_changes_nothing(
    step, frame, remote, monkeypatch
):
    owner = {"tasks_of": FingerprintedQuery, "one_task_per_item": runner}[step]
    sleeper = Sleeper(monkeypatch, owner, step, lambda: checkpoint(frame, remote))
    try:
        other = frame.assign(more=frame["width"] * 2)
        checkpoint(other, remote, overwrite=True)
        expected = files(remote)
    finally:
        sleeper.wake()
    (error,) = sleeper.errors
    assert "another run has taken over" in str(error)
    assert files(remote) == expected
    monkeypatch.setattr(RemoteStore, "commit", None)  # nothing is to be written
    assert len(checkpoint(other, remote)) == 24
