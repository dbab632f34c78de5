"""Sample rows of a frame to show: the first ones, or some from all over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
from dask.dataframe.dispatch import concat

from dask_image_ingest.dask_internals import FrameBase

# Partitions that `spread_rows` computes, at most.
_MAX_PARTITIONS = 25


def first_rows(frame: Any, n: int) -> Any:
    """The first ``n`` rows, computed from few partitions."""
    if not isinstance(frame, FrameBase):
        return frame.head(n)
    parts: list[Any] = []
    # Double the number of partitions each time: a filter may leave many of them empty.
    start, count = 0, 1
    while start < frame.npartitions and (not parts or sum(map(len, parts)) < n):
        stop = min(start + count, frame.npartitions)
        parts += dask.compute(*_heads(frame, range(start, stop), n))
        start, count = stop, 2 * count
    return concat(parts).head(n)


def spread_rows(frame: Any, n: int) -> Any:
    """Compute ``n`` rows from all over the frame, in its order."""
    if not isinstance(frame, FrameBase):
        shown = min(n, len(frame))
        return frame.iloc[[row * len(frame) // shown for row in range(shown)]]
    count = min(frame.npartitions, n, _MAX_PARTITIONS)
    chosen = [frame.npartitions * i // count for i in range(count)]
    parts = dask.compute(*_heads(frame, chosen, n))
    lengths = _split_evenly([len(part) for part in parts], n)
    rows = concat([part.head(length) for length, part in zip(lengths, parts, strict=True)])
    return rows if len(rows) == n else first_rows(frame, n)


def _split_evenly(available: Sequence[int], n: int) -> list[int]:
    """Divide ``n`` as evenly as possible among parts of which so many rows are ``available``."""
    shares = [0] * len(available)
    while n and shares != list(available):
        for i, most in enumerate(available):
            if n and shares[i] < most:
                shares[i], n = shares[i] + 1, n - 1
    return shares


def _heads(frame: Any, partitions: Sequence[int], n: int) -> list[Any]:
    return [frame.partitions[number].head(n, compute=False) for number in partitions]
