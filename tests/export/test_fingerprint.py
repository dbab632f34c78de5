"""An export goes on without a new look at its frame only where that does the same as before."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import sys
from functools import partial

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from forked_python import run_python
from witnesses import contents

import dask_image_ingest as dii
from dask_image_ingest.errors import ExportError
from dask_image_ingest.export import query
from dask_image_ingest.export.query import frame_fingerprint

pytestmark = pytest.mark.newest

SCORER = """
import pandas as pd

def rows(frame):
    return frame.assign(score={value})

def each(width):
    return width + {value}

def made(number):
    return pd.DataFrame({{"x": [{value}]}})

class Scorer:
    factor = {value}

    def __call__(self, frame):
        return frame.assign(score=self.factor)
"""


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Import a module whose functions give this value: each time as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the same second and size, it is old

    def imported(value):
        gc.collect()  # dask gives back the query that it has of a name
        (tmp_path / "scorer.py").write_text(SCORER.format(value=value))
        sys.modules.pop("scorer", None)
        importlib.invalidate_caches()
        return importlib.import_module("scorer")

    yield imported
    sys.modules.pop("scorer", None)


def score(frame):
    return frame._meta.assign(score=1)


BY_IMPORTED = {
    "map_partitions": lambda d, m: d.map_partitions(m.rows, meta=score(d)),
    "apply": lambda d, m: d.assign(score=d["width"].apply(m.each, meta=("width", "int64"))),
    "map_batches": lambda d, m: d.images.map_batches(
        lambda x, each=m.each: each(x.mean((1, 2, 3))), outputs={"score": "float32"}
    ),
    "transform": lambda d, m: dii.read_webdataset_images(
        d.expr.frame.dataset.shards[0].url, backend="pandas", transform=m.each
    ),
    "from_map": lambda d, m: dd.from_map(m.made, [1], meta=pd.DataFrame({"x": [1]})),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_IMPORTED)
def test_a_function_that_was_edited_makes_another_frame(kind, shards, edited):
    tokens = []
    for value in (1, 2, 1):
        frame = BY_IMPORTED[kind](
            dii.read_webdataset_images(shards, backend="pandas", size=8), edited(value)
        )
        tokens.append(frame_fingerprint(frame, [c for c in frame.columns if c != "image"]))
        del frame
    assert tokens[0] == tokens[2] != tokens[1]


KNOWN_BY_NAME = {
    "persisted": lambda m: dd.from_map(m.made, [1], meta=pd.DataFrame({"x": [1]})).persist(),
    "delayed": lambda m: dd.from_delayed([dask.delayed(m.made, pure=True)(1)]),
    "an argument": lambda m: dd.from_pandas(pd.DataFrame({"x": [1]})).map_partitions(
        lambda frame, more: frame, dask.delayed(m.made, pure=True)(1), meta={"x": "int64"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KNOWN_BY_NAME)
def test_what_is_known_by_name_alone_has_a_token_in_this_process(kind, edited, monkeypatch):
    frame = KNOWN_BY_NAME[kind](edited(1))
    token = frame_fingerprint(frame, ["x"])
    assert frame_fingerprint(frame, ["x"]) == token
    monkeypatch.setattr(query, "_PROCESS", "another one")
    assert frame_fingerprint(frame, ["x"]) != token


UNSTABLE = {
    "sample": (lambda d: d.sample(frac=0.5), "random_state"),
    "random_split": (lambda d: d.random_split([0.5, 0.5])[0], "random_state"),
    "persist": (lambda d: d.persist(), r"persist\(\)"),
}


@pytest.mark.parametrize("kind", UNSTABLE)
def test_why_an_unchanged_query_is_another_one_is_told(kind, shards, tmp_path, monkeypatch):
    make, why = UNSTABLE[kind]
    table = dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])
    out = tmp_path / "{shard}.tar"
    dii.to_webdataset(make(table), out)
    monkeypatch.setattr(query, "_PROCESS", "another one")
    with pytest.raises(ExportError, match=why):
        dii.to_webdataset(make(table), out, resume=True)


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_rows_in_memory_are_digested_once_where_an_export_is(how, shards, tmp_path, monkeypatch):
    frame = dii.read_webdataset_images(shards, backend="pandas")
    rows = frame.drop(columns=["image", "error"]).compute()
    path = tmp_path / "{shard}.tar"
    dii.to_webdataset(rows, path)
    digested = []
    tokenize = query.tokenize
    monkeypatch.setattr(query, "tokenize", lambda of: digested.append(len(of)) or tokenize(of))
    written = dii.to_webdataset(rows, path, **{how: True})
    assert digested == [written["samples"].sum()]


def test_a_token_tells_nothing_of_partitions(shards, photos, tmp_path):
    for photo in photos[:4]:
        path = tmp_path / f"{photo.label}-{len(photo.encoded)}.{photo.extension}"
        path.write_bytes(photo.encoded)
    for read in (
        partial(dii.read_webdataset_images, shards, backend="pandas"),
        partial(dii.read_images, tmp_path, backend="pandas"),
    ):
        frames = [read(partition_size=size) for size in (None, "300 kB")]
        assert frames[0].npartitions < frames[1].npartitions
        tokens = {frame_fingerprint(frame[frame.width > 9], ["__key__"]) for frame in frames}
        assert len(tokens) == 1
        # The first partition has other rows.
        tokens = {frame_fingerprint(frame.partitions[[0]], ["__key__"]) for frame in frames}
        assert len(tokens) == 2


def test_tokens_tell_rows_and_options_apart(shards):
    table = dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])
    frames = [
        table,
        table[table.width > 100],
        table[table.width > 101],
        table[table["__key__"].isin(["a"])],
        table[table["__key__"].isin(["b"])],
        table.partitions[[0]],
        table.compute(),
        table.compute()[1:],
    ]
    tokens = [frame_fingerprint(frame, table.columns) for frame in frames]
    tokens.append(frame_fingerprint(table, table.columns[:-1]))
    assert len(set(tokens)) == len(tokens)


SETTINGS = """
import argparse
import scorer

settings = argparse.Namespace(names=set("abcdef"), scorer=scorer.Scorer())

def function(images):
    return scorer.each(images.mean((1, 2, 3))) + len(settings.names)
"""

TOLD = """
import sys
import dask_image_ingest as dii
from dask_image_ingest.export.query import frame_fingerprint
import scorer, settings_of_test

ddf = dii.read_webdataset_images(sys.argv[1:], backend="pandas", size=8)
mapped = ddf.images.map_batches(settings_of_test.function, outputs={"score": "float32"})
scored = ddf.map_partitions(scorer.Scorer(), meta=ddf._meta.assign(score=1))
for frame in (mapped, scored):
    print(frame_fingerprint(frame, ["score"]))
found = dii.curate.find_duplicates(ddf, by="bytes")
found = dii.curate.find_overlaps(found, ddf[ddf.cls == 1], by="bytes")
print(frame_fingerprint(found, ["duplicate.of", "overlap.found"]))
"""


@pytest.mark.slow
def test_a_token_of_a_frame_is_the_same_in_every_process(shards, edited, tmp_path):
    edited(1)
    (tmp_path / "settings_of_test.py").write_text(SETTINGS)
    told = set()
    for seed in "12":
        path = os.pathsep.join([str(tmp_path), *sys.path])
        finished = subprocess.run(
            [sys.executable, "-c", TOLD, *map(str, shards)],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert finished.returncode == 0, finished.stderr
        assert "None" not in finished.stdout
        told.add(finished.stdout)
    assert len(told) == 1


# Is killed before the third shard, if asked; says whether it looked at the frame.
RUN = """
import importlib, os, signal, sys
sys.path.insert(0, sys.argv[3])
import dask
import dask_image_ingest as dii
from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output import store as output_store
import scorer

run = importlib.import_module("dask_image_ingest.export.to_webdataset")
killed = sys.argv[4] == "killed"
stage, commit = run.stage_frame, output_store.LocalStore.commit

def staging(*args):
    print("staged")
    return stage(*args)

def committing(self, file, name, *args):
    if killed and name == "002.tar":
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self, file, name, *args)

run.stage_frame, output_store.LocalStore.commit = staging, committing
frame = dii.read_webdataset_images(sys.argv[1], backend="pandas").drop(columns=["image", "error"])
frame = frame.map_partitions(scorer.rows)
with dask.config.set(scheduler="synchronous"):
    try:
        dii.to_webdataset(
            frame, sys.argv[2] + "/{shard:03d}.tar", samples_per_shard=5, resume=not killed
        )
    except ExportError as error:
        print(error)
"""


@pytest.mark.slow
def test_an_export_that_goes_on_in_another_process_has_no_values_of_old_code(shards, tmp_path):
    def resumed(out, value, how="resumed"):
        (tmp_path / "scorer.py").write_text(SCORER.format(value=value))
        arguments = (shards[0].parent, tmp_path / out, tmp_path, how)
        done = run_python(RUN, *arguments, PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == (-9 if how == "killed" else 0), done.stderr
        return done.stdout

    said = "the frame is another one"
    resumed("out", 1.0, "killed")
    shutil.copytree(tmp_path / "out", tmp_path / "unedited")
    assert resumed("unedited", 1.0) == ""
    assert said in resumed("out", 2.0)
    assert resumed("out", 1.0) == ""
    # Finished, it is no other, and stays finished when it is refused.
    whole = contents(tmp_path / "out")
    assert said in resumed("out", 2.0)
    assert resumed("out", 1.0) == ""
    assert contents(tmp_path / "out") == whole
    scores = pd.concat(pd.read_parquet(path) for path in (tmp_path / "out").glob("*.parquet"))
    assert set(scores["score"]) == {1.0}
