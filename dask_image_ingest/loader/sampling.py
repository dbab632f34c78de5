"""Parts of an epoch that columns of a frame decide: the rows drawn, and the bucket of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import check_flag, is_whole, shown
from dask_image_ingest.errors import ArgumentError

# The most elongated bucket that is made of a number of pixels.
_LARGEST_RATIO = 2.0

# Gives a column of all rows.
ColumnOf = Callable[[str], pd.Series]


class Weights(NamedTuple):
    """Weights by which the rows of a pass are drawn.

    Attributes
    ----------
    values : float64 array, shape (rows,)
    length : int
        Rows of a pass.
    replacement : bool
        Whether a row may be drawn several times.
    """

    values: np.ndarray
    length: int
    replacement: bool

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw the rows of a pass: their numbers, sorted, with repetitions."""
        possible = np.flatnonzero(self.values)
        chances = self.values[possible]
        if self.replacement:
            edges = np.cumsum(chances / chances.sum())
            at = np.searchsorted(edges, random.random(self.length) * edges[-1:], "right")
            return np.sort(possible[np.minimum(at, len(possible) - 1)])
        # The smallest of exponential variables: Efraimidis and Spirakis, 2006.
        keys = random.exponential(size=len(possible)) / chances
        return np.sort(possible[np.argpartition(keys, self.length - 1)[: self.length]])


class Sampling(NamedTuple):
    """Rows drawn by a column: the arguments ``weights=`` or ``balance=``, and ``replacement=``."""

    argument: str
    column: str
    replacement: bool

    def weights(self, values: pd.Series, count: int | None) -> Weights:
        """Weights by the values of all rows, for passes of ``count`` rows; None for all."""
        name = f"{self.argument}={self.column!r}"
        weights = _weights(values, name) if self.argument == "weights" else _balanced(values)
        count = len(weights) if count is None else count
        possible = np.count_nonzero(weights)
        if count and not possible:
            raise ArgumentError(f"{name}: no row has a weight above 0")
        if not self.replacement and count > possible:
            raise ArgumentError(
                f"{name}, replacement=False: an epoch of {count:,} rows, of which {possible:,} "
                "have a weight above 0: pass fewer steps=, or replacement=True"
            )
        return Weights(weights, count, self.replacement)


def parse_sampling(
    weights: str | None, balance: str | None, replacement: bool, columns: Sequence[str]
) -> Sampling | None:
    """Parse ``weights=``, ``balance=`` and ``replacement=``; None for all rows."""
    check_flag("replacement", replacement)
    if weights is None and balance is None:
        if not replacement:
            raise ArgumentError("replacement=False is for weights= or balance=")
        return None
    if weights is not None and balance is not None:
        raise ArgumentError("weights= and balance= each decide how often rows come: pass one")
    argument, name = ("weights", weights) if balance is None else ("balance", balance)
    if not isinstance(name, str) or name not in columns:
        listed = ", ".join(map(repr, columns))
        raise ArgumentError(f"{argument}={shown(name)}: pass the name of a column, one of {listed}")
    return Sampling(argument, name, replacement)


def _weights(values: pd.Series, argument: str) -> np.ndarray:
    try:
        weights = values.to_numpy(np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        weights = np.full(len(values), np.nan)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise ArgumentError(
            f"{argument}: row {row} has {shown(values.iloc[row])}; each weight has to be a number "
            "from 0: fill nulls, or filter these rows"
        )
    return weights


def _balanced(values: pd.Series) -> np.ndarray:
    codes, _ = pd.factorize(values)
    counts = np.bincount(codes[codes >= 0])
    return np.where(codes < 0, 0.0, 1 / counts[codes] if len(counts) else 0.0)


def parse_buckets(buckets: Iterable[Any] | None, columns: Sequence[str]) -> np.ndarray | None:
    """Parse the argument ``buckets=``: height and width of each, int64 (buckets, 2)."""
    if buckets is None:
        return None
    shapes = _shapes(buckets)
    if missing := [name for name in ("height", "width") if name not in columns]:
        raise ArgumentError(
            f"buckets= is planned from the columns height and width, and the frame has no "
            f"{' and no '.join(missing)}"
        )
    return shapes


def bucket_of_rows(column: ColumnOf, shapes: np.ndarray) -> np.ndarray:
    """The bucket of each row: that whose ratio of height and width is nearest to its own."""
    height, width = (
        column(name).to_numpy(np.float64, na_value=np.nan) for name in ("height", "width")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(height / width)
    # Without a header there is no image: its row is missing from whichever batch.
    ratios = np.where(np.isfinite(ratios), ratios, 0.0)
    of_shapes = np.log(shapes[:, 0] / shapes[:, 1])
    order = np.argsort(of_shapes, kind="stable")
    borders = (of_shapes[order][1:] + of_shapes[order][:-1]) / 2
    nearest: np.ndarray = order[np.searchsorted(borders, ratios)]
    return nearest


def _shapes(buckets: Iterable[Any]) -> np.ndarray:
    error = ArgumentError(
        f"buckets={shown(buckets)}: pass a list of (height, width), none of them twice, or "
        "(pixels, multiple), such as (512 * 512, 64), for all shapes of about so many pixels whose "
        "edges are multiples"
    )
    try:
        items = list(buckets)
        if len(items) == 2 and all(map(is_whole, items)):
            items = _shapes_of(*items)
        shapes = [(height, width) for height, width in items]
    except (TypeError, ValueError):
        raise error from None
    edges = [edge for shape in shapes for edge in shape]
    if not edges or not all(is_whole(edge) and 1 <= edge < 2**15 for edge in edges):
        raise error
    if len(set(shapes)) < len(shapes):
        raise error
    return np.array(shapes, np.int64)


def _shapes_of(pixels: int, multiple: int) -> list[tuple[int, int]]:
    """For each width, the largest height that has at most so many pixels."""
    if multiple < 1:
        return []
    edges = range(multiple, pixels // multiple + 1, multiple)
    shapes = [(pixels // width // multiple * multiple, width) for width in edges]
    return [
        (height, width)
        for height, width in shapes
        if height and max(height / width, width / height) <= _LARGEST_RATIO
    ]
