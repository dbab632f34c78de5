"""Choosing rows of a frame to look at: the first ones, or some of many partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask
from dask.dataframe.dispatch import concat

from dask_image_ingest.dask_internals import FrameBase

# Partitions that spread_rows takes rows from, at most.
_SPREAD = 25


def first_rows(frame: Any, n: int, compute: Callable[..., Any] = dask.compute) -> Any:
    """The first ``n`` rows, computed from few partitions.

    ``compute`` takes lazy frames and gives a sequence of frames, as ``dask.compute`` does.
    """
    if not isinstance(frame, FrameBase):
        return frame.head(n)
    parts: list[Any] = []
    # Twice as many partitions each time, in parallel: a filter may leave many of them empty.
    start, count = 0, 1
    while start < frame.npartitions and (not parts or sum(map(len, parts)) < n):
        stop = min(start + count, frame.npartitions)
        parts += compute(*_heads(frame, range(start, stop), n))
        start, count = stop, 2 * count
    return concat(parts).head(n)


def spread_rows(frame: Any, n: int) -> Any:
    """``n`` rows from all over the frame, computed, in its order."""
    if not isinstance(frame, FrameBase):
        shown = min(n, len(frame))
        return frame.iloc[[row * len(frame) // shown for row in range(shown)]]
    count = min(frame.npartitions, n, _SPREAD)
    chosen = [frame.npartitions * i // count for i in range(count)]
    parts = dask.compute(*_heads(frame, chosen, n))
    lengths = _shares([len(part) for part in parts], n)
    rows = concat([part.head(length) for length, part in zip(lengths, parts, strict=True)])
    return rows if len(rows) == n else first_rows(frame, n)


def _shares(available: Sequence[int], n: int) -> list[int]:
    """Rows to take of each part: ``n`` in all, as equally as available."""
    shares = [0] * len(available)
    while n and shares != list(available):
        for i, most in enumerate(available):
            if n and shares[i] < most:
                shares[i], n = shares[i] + 1, n - 1
    return shares


def _heads(frame: Any, partitions: Sequence[int], n: int) -> list[Any]:
    return [frame.partitions[number].head(n, compute=False) for number in partitions]
