"""Rows drawn by weights, or equally often for each value of a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import check_flag, shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.order import Sample, digest_of

# How many rows to draw, None for as many as a pass has, to the sample.
MakeSample = Callable[[int | None], Sample]


def make_sample(
    weights: str | None,
    balance: str | None,
    replacement: bool,
    columns: Sequence[str],
    compute: Callable[[str], pd.Series],
) -> MakeSample | None:
    """The sample that ``weights=`` or ``balance=`` asks for; None for all rows.

    Parameters
    ----------
    weights, balance, replacement
        As for ``iter_batches``.
    columns
        Names of the frame's columns.
    compute
        Gives a column of all rows; called when the first rows are asked for.

    Raises
    ------
    ArgumentError
    """
    check_flag("replacement", replacement)
    if weights is None and balance is None:
        if not replacement:
            raise ArgumentError("replacement=False is for weights= or balance=")
        return None
    if weights is not None and balance is not None:
        raise ArgumentError("weights= and balance= each decide how often rows come: pass one")
    argument, name = ("weights", weights) if balance is None else ("balance", balance)
    if not isinstance(name, str) or name not in columns:
        raise ArgumentError(
            f"{argument}={shown(name)}: pass the name of a column, one of "
            f"{', '.join(map(repr, columns))}"
        )

    def make(count: int | None) -> Sample:
        values = compute(str(name))
        chances = _weights(values, str(name)) if balance is None else _balanced(values)
        return _sample(chances, count, replacement, f"{argument}={name!r}")

    return make


def _weights(values: pd.Series, name: str) -> np.ndarray:
    try:
        weights = values.to_numpy(np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        weights = np.full(len(values), np.nan)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise ArgumentError(
            f"weights={name!r}: row {row} has {shown(values.iloc[row])}; each weight has to be a "
            "number from 0: fill nulls, or filter these rows"
        )
    return weights


def _balanced(values: pd.Series) -> np.ndarray:
    codes, _ = pd.factorize(values)
    counts = np.bincount(codes[codes >= 0])
    return np.where(codes < 0, 0.0, 1 / counts[codes] if len(counts) else 0.0)


# Rows of an epoch that are drawn in memory.
_MOST_DRAWN = 2**32


def _sample(weights: np.ndarray, count: int | None, replacement: bool, argument: str) -> Sample:
    count = len(weights) if count is None else count
    if count > _MOST_DRAWN:
        raise ArgumentError(
            f"{argument}: an epoch of {count:,} rows is more than can be drawn: pass fewer steps=, "
            "or a smaller batch_size"
        )
    possible = np.flatnonzero(weights)
    digest = digest_of(weights, str(replacement))
    if count and not len(possible):
        raise ArgumentError(f"{argument}: no row has a weight above 0")
    if replacement:
        edges = np.cumsum(weights[possible] / weights.sum())

        def draw(random: np.random.Generator) -> np.ndarray:
            at = np.searchsorted(edges, random.random(count) * edges[-1], "right")
            return np.sort(possible[np.minimum(at, len(possible) - 1)])

        return Sample(draw, count, digest)
    if count > len(possible):
        raise ArgumentError(
            f"{argument}, replacement=False: an epoch of {count:,} rows, of which "
            f"{len(possible):,} have a weight above 0: pass fewer steps=, or replacement=True"
        )
    chances = weights[possible]

    def choose(random: np.random.Generator) -> np.ndarray:
        # The smallest of exponential variables: Efraimidis and Spirakis, 2006.
        keys = random.exponential(size=len(possible)) / chances
        return np.sort(possible[np.argpartition(keys, count - 1)[:count]])

    return Sample(choose, count, digest)
