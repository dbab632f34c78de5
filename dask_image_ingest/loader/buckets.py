"""Buckets: a size for each image by its aspect ratio, so that batches have one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import is_whole, shown
from dask_image_ingest.errors import ArgumentError

# The most elongated bucket that is made of a number of pixels.
_LARGEST_RATIO = 2.0


class Buckets(NamedTuple):
    """Buckets of the rows of a frame.

    Attributes
    ----------
    shapes : int64 array, shape (buckets, 2)
        Height and width.
    of_rows : callable
        Gives the bucket of each row, int64 (rows,); called when the first batch is asked for.
    """

    shapes: np.ndarray
    of_rows: Callable[[], np.ndarray]


def make_buckets(
    buckets: Any, columns: Sequence[str], compute: Callable[[str], pd.Series]
) -> Buckets | None:
    """Parse the argument ``buckets=`` of ``iter_batches``.

    Parameters
    ----------
    buckets
        The argument.
    columns
        Names of the frame's columns.
    compute
        Gives a column of all rows.

    Raises
    ------
    ArgumentError
    """
    if buckets is None:
        return None
    shapes = _shapes(buckets)
    if missing := [name for name in ("height", "width") if name not in columns]:
        raise ArgumentError(
            f"buckets= is planned from the columns height and width, and the frame has no "
            f"{' and no '.join(missing)}"
        )

    def of_rows() -> np.ndarray:
        height, width = (
            compute(name).to_numpy(np.float64, na_value=np.nan) for name in ("height", "width")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.log(height / width)
        # Without a header there is no image: its row is missing from whichever batch.
        ratios = np.where(np.isfinite(ratios), ratios, 0.0)
        return nearest_bucket(ratios, shapes)

    return Buckets(shapes, of_rows)


def nearest_bucket(ratios: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """The bucket whose logarithm of height / width is nearest to each of ``ratios``."""
    of_shapes = np.log(shapes[:, 0] / shapes[:, 1])
    order = np.argsort(of_shapes, kind="stable")
    borders = (of_shapes[order][1:] + of_shapes[order][:-1]) / 2
    nearest: np.ndarray = order[np.searchsorted(borders, ratios)]
    return nearest


def _shapes(buckets: Any) -> np.ndarray:
    advice = (
        "pass a list of (height, width), or (pixels, multiple), such as (512 * 512, 64), for all "
        "shapes of about so many pixels whose edges are multiples"
    )
    error = ArgumentError(f"buckets={shown(buckets)}: {advice}")
    if isinstance(buckets, (str, bytes)) or not isinstance(buckets, (Sequence, np.ndarray)):
        raise error
    items = list(buckets)
    if len(items) == 2 and all(is_whole(item) for item in items):
        shapes = _shapes_of(int(items[0]), int(items[1]))
    else:
        try:
            shapes = [(height, width) for height, width in items]
        except (TypeError, ValueError):
            raise error from None
    if not shapes or not all(
        is_whole(edge) and 1 <= edge < 2**15 for pair in shapes for edge in pair
    ):
        raise error
    if len(set(shapes)) < len(shapes):
        raise ArgumentError(f"buckets={shown(buckets)}: a bucket is named twice")
    return np.array(shapes, np.int64)


def _shapes_of(pixels: int, multiple: int) -> list[tuple[int, int]]:
    """For each width, the largest height that has at most so many pixels."""
    if multiple < 1 or pixels < multiple**2:
        return []
    edges = range(multiple, pixels // multiple + 1, multiple)
    shapes = [(pixels // width // multiple * multiple, width) for width in edges]
    return [
        (height, width)
        for height, width in shapes
        if height and max(height / width, width / height) <= _LARGEST_RATIO
    ]
