"""Whatever a query is, its checkpoint has the rows that it computes, or there is none."""

from __future__ import annotations

import random
import shutil
from collections import Counter

import pytest
from dask.dataframe import DataFrame
from query_answers import answer
from query_sources import sources
from query_steps import STEPS, add
from query_text import Query
from random_queries import choose, quiet

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError

QUERIES = 6


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with quiet():
        return sources(tmp_path_factory.mktemp("queries"))


def frames_of(source, seed):
    """Frames that a random query makes, the last of them the most composed."""
    query = Query(random.Random(seed), source)
    for _ in range(12):
        if len(query.lines) < 4:
            add(query, choose(query.rng, STEPS))
    made = [(query.lines, query.lazy[name]) for name in query.names]
    return [(lines, frame) for lines, frame in made if isinstance(frame, DataFrame)]


def stored_or_refused(frame, path, rng):
    """What a checkpoint gives after parts of it were lost, None where there is none."""
    try:
        dii.checkpoint(frame, path)
    except ArgumentError:
        return None
    for file in sorted(path.glob("*.parquet")):
        if rng.random() < 0.5:
            file.unlink()
    if rng.random() < 0.5:
        (path / "_parts.json").unlink()
    return dii.checkpoint(frame, path).compute()


@pytest.mark.rounds(1, nightly=40)
def test_a_checkpoint_has_the_rows_that_its_frame_computes_or_is_refused(made, tmp_path, seed):
    asked = Counter()
    names = list(made)
    for each in range(seed * QUERIES, (seed + 1) * QUERIES):
        rng = random.Random(each)
        with quiet():
            for lines, frame in frames_of(made[names[each % len(names)]], each)[-2:]:
                try:
                    want = answer(frame.compute())
                except Exception:
                    continue  # makes no sense in pandas either
                got = stored_or_refused(frame, tmp_path / "stored", rng)
                asked["refused" if got is None else "stored"] += 1
                if got is not None:
                    assert answer(got) == want, f"# seed {each}\n" + "\n".join(lines)
                shutil.rmtree(tmp_path / "stored", ignore_errors=True)
    assert asked["stored"] > QUERIES / 2, asked
    assert asked["refused"] > 0, asked


def some_query(ddf, rng):
    """A query that goes row by row, with pixels, vectors and filters."""
    if rng.random() < 0.5:
        ddf = ddf[ddf.width > rng.choice([8, 12, 20])]
    if rng.random() < 0.7:
        ddf = ddf.images.map_batches(
            _mean,
            outputs={"mean": "float32", "vector": "list<float32>"},
            batch_size=rng.choice([1, 2, 100]),
            keep_image=rng.random() < 0.5,
        )
        if rng.random() < 0.5:
            ddf = ddf[ddf["mean"] > 120]
    if rng.random() < 0.5:
        ddf = ddf.assign(twice=ddf.height * 2)
    return ddf


def _mean(images):
    return {
        "mean": [float(image.mean()) for image in images],
        "vector": [image.mean((0, 1)) for image in images],
    }


@pytest.mark.rounds(1, nightly=30)
def test_other_boundaries_and_lost_files_change_no_row(made, tmp_path, seed, rng):
    path = tmp_path / "stored"
    paths = sorted(shard.url for shard in made["whole"].lazy.expr.frame.dataset.shards)

    def query(partition_size):
        read = dii.read_webdataset_images(
            paths, backend="pandas", size=8, partition_size=partition_size
        )
        return some_query(read, random.Random(seed))

    with quiet():
        want = answer(query(None).compute())
        for _ in range(4):
            stored = dii.checkpoint(query(rng.choice([None, 200, 500, 1000])), path)
            assert answer(stored.compute()) == want
            assert len(stored) == len(want[-1][-1])
            for file in sorted(path.glob("*.parquet")):
                if rng.random() < 0.4:
                    file.unlink()


def test_no_row_is_there_twice_where_boundaries_were_mixed(made, tmp_path):
    """Parts of a shard by two boundaries, as two machines without locks might leave them."""
    paths = [shard.url for shard in made["whole"].lazy.expr.frame.dataset.shards]
    with quiet():
        reads = [
            dii.read_webdataset_images(paths, backend="pandas", size=8, partition_size=size)
            for size in (None, 500)
        ]
        for number, read in enumerate(reads):
            dii.checkpoint(read, tmp_path / str(number))
        for file in sorted((tmp_path / "1").glob("*.parquet"))[::2]:
            shutil.copy(file, tmp_path / "0")
        stored = dii.checkpoint(reads[1], tmp_path / "0")
        assert answer(stored.compute()) == answer(reads[0].compute())
