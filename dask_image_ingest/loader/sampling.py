"""Parts of an epoch that columns of a frame decide: the rows drawn, and the bucket of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import column_names, is_whole, shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, image_columns
from dask_image_ingest.loader.batch_format import as_pandas
from dask_image_ingest.typedefs import AnyFrame, Series

# The most elongated bucket that is made of a number of pixels.
_LARGEST_RATIO = 2.0


class Weights(NamedTuple):
    """Weights by which the rows of a pass are drawn.

    Attributes
    ----------
    values : float64 array, shape (rows,)
    length : int
        Rows of a pass.
    """

    values: np.ndarray
    length: int

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw the rows of a pass: their numbers, sorted, with repetitions."""
        possible = np.flatnonzero(self.values)
        chances = self.values[possible]
        edges = np.cumsum(chances / chances.sum())
        at = np.searchsorted(edges, random.random(self.length) * edges[-1:], "right")
        return np.sort(possible[np.minimum(at, len(possible) - 1)])


class Sampling(NamedTuple):
    """Rows drawn by a column: the argument ``weights=`` or ``balance=``."""

    argument: str
    column: str

    def weights(self, values: pd.Series, count: int | None) -> Weights:
        """Weights by the values of all rows, for passes of ``count`` rows; None for all."""
        name = f"{self.argument}={self.column!r}"
        weights = _weights(values, name) if self.argument == "weights" else _balanced(values)
        count = len(weights) if count is None else count
        if count and not weights.any():
            raise ArgumentError(f"{name}: no row has a weight above 0")
        return Weights(weights, count)


def parse_sampling(
    weights: str | None, balance: str | None, frames: Sequence[AnyFrame]
) -> Sampling | None:
    """Parse ``weights=`` and ``balance=``; None for all rows."""
    columns = _common(frames)
    if weights is None and balance is None:
        return None
    if weights is not None and balance is not None:
        raise ArgumentError("weights= and balance= each decide how often rows come: pass one")
    argument, name = ("weights", weights) if balance is None else ("balance", balance)
    if not isinstance(name, str) or name not in columns:
        listed = ", ".join(map(repr, columns))
        raise ArgumentError(f"{argument}={shown(name)}: pass the name of a column, one of {listed}")
    return Sampling(argument, name)


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


class Buckets(NamedTuple):
    """Rows that come together: the argument ``buckets=``.

    Attributes
    ----------
    columns : list of str
        They decide the bucket of a row.
    sizes : int64 array, shape (buckets, 2), or None
        Height and width to which the images of each bucket are decoded, by the ratio of the columns
        ``height`` and ``width``. None for a bucket of each value, and of an array each shape.
    """

    columns: list[str]
    sizes: np.ndarray | None = None

    def of_rows(self, columns: Sequence[pd.Series]) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
        """Number of each row's bucket, int64 (rows,); and what the rows of each bucket have.

        ``columns`` are those of all rows. Rows of a bucket have its size, or its values.
        """
        if self.sizes is not None:
            height, width = columns
            return _nearest(height, width, self.sizes), list(map(tuple, self.sizes.tolist()))
        try:
            codes = [
                pd.factorize(values.to_numpy(object), use_na_sentinel=False) for values in columns
            ]
        except TypeError:
            raise ArgumentError(
                f"buckets={shown(self.columns)}: a bucket is of a value, or of the shape of an "
                "array, and one of these columns has rows that are neither"
            ) from None
        numbers = np.stack([numbers for numbers, _ in codes])
        found, bucket_of = np.unique(numbers, axis=1, return_inverse=True)
        values = [
            tuple(distinct[number] for number, (_, distinct) in zip(bucket, codes, strict=True))
            for bucket in found.T.tolist()
        ]
        return bucket_of.reshape(-1), values


def parse_buckets(
    buckets: Iterable[Any] | str | None, frames: Sequence[AnyFrame]
) -> Buckets | None:
    """Parse the argument ``buckets=``."""
    if buckets is None:
        return None
    columns = _common(frames)
    named = [buckets] if isinstance(buckets, str) else buckets
    if isinstance(named, (list, tuple)) and named and all(isinstance(name, str) for name in named):
        column_names(named, columns, "buckets")
        if wrong := [name for name in named if name in image_columns(frames[0])]:
            raise ArgumentError(
                f"buckets={shown(wrong[0])}: the shapes of images are known after their decode: "
                "name columns of numbers, such as ['height', 'width']"
            )
        return Buckets(list(named))
    sizes = _sizes(buckets)
    if missing := [name for name in ("height", "width") if name not in columns]:
        raise ArgumentError(
            f"sizes as buckets= are planned from the columns height and width, and the frame has "
            f"no {' and no '.join(missing)}"
        )
    return Buckets(["height", "width"], sizes)


def _common(frames: Sequence[AnyFrame]) -> list[str]:
    """Names of the columns that all frames have."""
    first, *others = (list(frame.columns) for frame in frames)
    return [name for name in first if all(name in other for other in others)]


def values_or_shapes(column: Series) -> pd.Series:
    """The values of a column; of a column of arrays or lists, the shape of each row."""
    backend = backend_of(column)
    if shape := getattr(column.dtype, "shape", ()):
        return pd.Series([shape] * len(column), dtype=object)
    if not backend.has_rows(column.dtype):
        return as_pandas(column)
    rows = backend.rows(column)
    return pd.Series([row.shape if getattr(row, "ndim", 0) else row for row in rows], dtype=object)


def _nearest(height: pd.Series, width: pd.Series, sizes: np.ndarray) -> np.ndarray:
    """The bucket of each row: that whose ratio of height and width is nearest to its own."""
    edges = (column.to_numpy(np.float64, na_value=np.nan) for column in (height, width))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(np.divide(*edges))
    # Without a header there is no image: its row is missing from whichever batch.
    ratios = np.where(np.isfinite(ratios), ratios, 0.0)
    of_sizes = np.log(sizes[:, 0] / sizes[:, 1])
    order = np.argsort(of_sizes, kind="stable")
    borders = (of_sizes[order][1:] + of_sizes[order][:-1]) / 2
    nearest: np.ndarray = order[np.searchsorted(borders, ratios)]
    return nearest


def _sizes(buckets: Iterable[Any]) -> np.ndarray:
    error = ArgumentError(
        f"buckets={shown(buckets)}: pass a list of (height, width), none of them twice; (pixels, "
        "multiple), such as (512 * 512, 64), for all sizes of about so many pixels whose edges are "
        "multiples; or the name of a column, or a list of such names"
    )
    try:
        items = list(buckets)
        if len(items) == 2 and all(map(is_whole, items)):
            items = _sizes_of(*items)
        sizes = [(height, width) for height, width in items]
    except (TypeError, ValueError):
        raise error from None
    edges = [edge for size in sizes for edge in size]
    if not edges or not all(is_whole(edge) and 1 <= edge < 2**15 for edge in edges):
        raise error
    if len(set(sizes)) < len(sizes):
        raise error
    return np.array(sizes, np.int64)


def _sizes_of(pixels: int, multiple: int) -> list[tuple[int, int]]:
    """For each width, the largest height that has at most so many pixels."""
    if multiple < 1:
        return []
    edges = range(multiple, pixels // multiple + 1, multiple)
    sizes = [(pixels // width // multiple * multiple, width) for width in edges]
    return [
        (height, width)
        for height, width in sizes
        if height and max(height / width, width / height) <= _LARGEST_RATIO
    ]
