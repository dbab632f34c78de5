"""Which requests to make for which byte ranges."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Range", "merge", "split"]

#: Start and stop.
Range = tuple[int, int]


def merge(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Join ranges that overlap, touch, or lie no more than ``gap`` bytes apart; in order."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def split(start: int, stop: int, largest: int) -> list[Range]:
    """Cut a range into pieces of ``largest`` bytes at most."""
    return [(at, min(at + largest, stop)) for at in range(start, stop, largest)]
