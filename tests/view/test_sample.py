"""Which rows are looked at: the first, or some from all over, of few partitions."""

from __future__ import annotations

import random

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from dask_image_ingest.view.thumbnails import first_rows, spread_rows


def random_frame(choose: random.Random) -> tuple[list[pd.DataFrame], dd.DataFrame]:
    """Partitions of any length, empty ones among them, and the lazy frame of them."""
    lengths = choose.choices([0, 0, 1, 2, 5, 11], k=choose.randrange(1, 40))
    ends = np.cumsum(lengths)
    frames = [
        pd.DataFrame({"row": np.arange(end - length, end)})
        for length, end in zip(lengths, ends, strict=True)
    ]
    lazy = dd.from_map(lambda number: frames[number], range(len(frames)), meta=frames[0][:0])
    return frames, lazy


@pytest.mark.rounds(5, nightly=100)
def test_first_rows_are_the_first_rows(rng, monkeypatch):
    frames, lazy = random_frame(rng)
    whole = pd.concat(frames)
    n = rng.randrange(1, 40)
    computed = []
    compute = dask.compute
    monkeypatch.setattr(dask, "compute", lambda *heads: computed.extend(heads) or compute(*heads))
    assert first_rows(lazy, n)["row"].tolist() == list(range(min(n, len(whole))))
    assert first_rows(whole, n)["row"].tolist() == whole.head(n)["row"].tolist()

    lengths = np.cumsum([len(frame) for frame in frames])
    needed = int((lengths < min(n, len(whole))).sum()) + 1
    # Numbers of partitions double: 1, 3, 7 ... in all.
    assert len(computed) < 2 * needed or n > len(whole)


@pytest.mark.rounds(5, nightly=100)
def test_spread_rows_are_in_order_none_twice_and_as_many_as_there_are(rng):
    frames, lazy = random_frame(rng)
    total = sum(map(len, frames))
    n = rng.randrange(1, 40)
    for frame in (lazy, pd.concat(frames)):
        rows = spread_rows(frame, n)["row"].tolist()
        assert len(rows) == min(n, total)
        assert rows == sorted(set(rows))
        assert set(rows) <= set(range(total))


@pytest.mark.slow
def test_rows_are_spread_evenly_and_short_partitions_are_made_up_for():
    frames = [pd.DataFrame({"part": [number] * 9}) for number in range(50)]
    frames[10] = frames[10][:1]
    lazy = dd.from_map(lambda number: frames[number], range(50), meta=frames[0][:0])
    parts = spread_rows(lazy, 50)["part"].value_counts().sort_index()
    assert parts.index.tolist() == list(range(0, 50, 2))  # 25 of the 50
    assert parts[10] == 1
    assert sorted(parts.drop(10)) == [2] * 23 + [3]


@pytest.mark.parametrize("n", [1, 3, 51, 60, 99, 100, 150])
def test_rows_of_a_frame_in_memory_come_from_all_over_it(n):
    frame = pd.DataFrame({"row": np.arange(100)})
    rows = spread_rows(frame, n)["row"].to_numpy()
    count = min(n, 100)
    # As many of each part of it, but for one.
    assert len(rows) == count
    for parts in (2, 4):
        found = np.histogram(rows, np.linspace(0, 100, parts + 1))[0]
        assert found.max() - found.min() <= 1
    assert len(spread_rows(frame[:0], n)) == 0
