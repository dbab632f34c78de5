"""A source is walked by the read, and by nobody a second time."""

from __future__ import annotations

import gzip
import importlib
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import dask
import dask.dataframe as dd
import pytest
from tars import tar
from witnesses import shards_in

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import samples
from dask_image_ingest.errors import ShardError
from dask_image_ingest.export import locate

# The module, not the function of this name.
run = importlib.import_module("dask_image_ingest.export.to_webdataset")


@pytest.fixture
def walks(monkeypatch):
    """How often the read walks, and how often the export does."""
    counts = Counter()

    def counting(module, who):
        walk = module.index_tar

        def counted(*args):
            counts[who] += 1
            return walk(*args)

        monkeypatch.setattr(module, "index_tar", counted)

    counting(samples, "read")
    counting(locate, "export")
    return counts


@pytest.fixture
def read(shards):
    def read(**options):
        frame = dii.read_webdataset_images(shards, backend="pandas", **options)
        return frame.drop(columns=["image", "error"])

    return read


def export(frame, out, **options):
    return dii.to_webdataset(
        frame, out / "{shard:03d}.tar", samples_per_shard=5, sidecar=None, **options
    )


def computed(frame):
    """The same rows in memory: nobody is left who has walked for them."""
    return frame.drop(columns="image", errors="ignore").compute()


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[frame["width"] > 300],
        lambda frame: frame.map_partitions(lambda rows: rows[::-1]),
        lambda frame: frame.assign(__key__="new/" + frame["__key__"]),
    ],
    ids=["filter", "reversed", "renamed"],
)
def test_each_source_is_walked_once(change, read, shards, walks, tmp_path):
    frame = change(read())
    export(computed(frame), tmp_path / "expected")
    assert walks["export"] == 3
    walks.clear()
    export(frame, tmp_path / "out")
    assert walks == {"read": 3}
    assert_same(tmp_path)


def test_parts_of_a_shard_know_their_own_rows(read, walks, tmp_path):
    frame = read(partition_size=1)
    assert frame.npartitions > 8
    export(computed(frame), tmp_path / "expected")
    walks.clear()
    export(frame, tmp_path / "out")
    assert walks["export"] == 0
    assert_same(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.sort_values("nbytes"),
        lambda frame: frame.repartition(npartitions=1),
        lambda frame: dd.concat([frame[frame.width > 400], frame[frame.width <= 400]]),
        lambda frame: frame.merge(frame[["__key__"]], on="__key__"),
    ],
    ids=["sort", "repartition", "concat", "merge"],
)
def test_rows_that_left_their_task_are_located_all_the_same(change, read, walks, tmp_path):
    frame = change(read())
    export(computed(frame), tmp_path / "expected", shuffle=1)
    export(frame, tmp_path / "out", shuffle=1)
    assert_same(tmp_path)


@pytest.mark.filterwarnings("ignore:.*became null")  # texts of random bytes
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_members_of_a_compressed_shard_are_decompressed(compress, walks, tmp_path):
    members = {f"{n}.{e}": random.randbytes(900) for n in range(6) for e in ("jpg", "txt")}
    suffix = ".tar.gz" if compress is gzip.compress else ".tar"
    (tmp_path / f"in{suffix}").write_bytes(compress(tar(members)))
    frame = dii.read_webdataset_images(tmp_path / f"in{suffix}", backend="pandas")
    export(computed(frame), tmp_path / "expected")
    export(frame, tmp_path / "out")
    assert_same(tmp_path)


def test_a_source_that_is_replaced_after_its_walk_is_an_error(tmp_path, monkeypatch):
    source = tmp_path / "in.tar"
    source.write_bytes(tar({f"{n}.jpg": random.randbytes(900) for n in range(6)}))
    frame = dii.read_webdataset_images(source, backend="pandas")
    stage = run.stage_frame

    def replacing(*args):
        staged = stage(*args)
        source.write_bytes(tar({f"{n}.jpg": random.randbytes(900) for n in range(6)}))
        os.utime(source, (1, 1))
        return staged

    monkeypatch.setattr(run, "stage_frame", replacing)
    with pytest.raises(ShardError, match="has changed since its samples were read"):
        export(frame, tmp_path / "out")
    assert not shards_in(tmp_path / "out")


def test_a_source_that_is_replaced_between_its_parts_is_an_error(shards, tmp_path, monkeypatch):
    source = Path(shutil.copy(shards[0], tmp_path / "in.tar"))
    frame = dii.read_webdataset_images(source, backend="pandas", partition_size=1)
    assert frame.npartitions > 1
    walk = samples.index_tar

    def replacing(*args):
        found = walk(*args)
        os.utime(source, (len(times), 1))
        times.append(1)
        return found

    times = [1]
    monkeypatch.setattr(samples, "index_tar", replacing)
    with dask.config.set(scheduler="sync"), pytest.raises(ShardError, match="changed"):
        export(frame, tmp_path / "out")
    assert not shards_in(tmp_path / "out")


def assert_same(tmp_path):
    found, expected = (
        {path.name: path.read_bytes() for path in shards_in(tmp_path / name)}
        for name in ("out", "expected")
    )
    assert found
    assert found == expected
