"""Which rows are looked at: the first, of few partitions, or some from all over."""

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
def test_spread_rows_are_at_even_distances_whatever_the_partitions(rng):
    frames, lazy = random_frame(rng)
    whole = pd.concat(frames)
    total = len(whole)
    for n in (1, rng.randrange(1, 40), total, total + 3):
        expected = [place * total // min(n, total) for place in range(min(n, total))]
        assert spread_rows(lazy, n, [*map(len, frames)])["row"].tolist() == expected
        assert spread_rows(whole, n, [total])["row"].tolist() == expected
        for parts in (2, 4):  # as many of each part of it, but for one
            found = np.histogram(expected, np.linspace(0, total, parts + 1))[0]
            assert total % parts or found.max() - found.min() <= 1
    none = lazy[lazy["row"] < 0]
    assert len(spread_rows(none, 3, [0] * none.npartitions)) == 0


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # by Dask
def test_rows_of_many_small_files_are_at_even_distances(tmp_path):
    table = pd.DataFrame({"row": np.arange(20), **dict.fromkeys("abcdef", "x" * 100)})
    for start in range(0, 20, 4):
        table.iloc[start : start + 4].to_parquet(tmp_path / f"{start:02}.parquet", index=False)
    narrow = dd.read_parquet(tmp_path)[["row"]]
    assert len(narrow.map_partitions(len).compute()) < 5  # Dask reads several at once
    assert spread_rows(narrow, 4, [4] * 5)["row"].tolist() == [0, 5, 10, 15]
