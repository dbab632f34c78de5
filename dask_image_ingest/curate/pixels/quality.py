"""``quality`` and ``issues``: what can be told of images without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
import numpy as np
import pandas as pd

from dask_image_ingest.arguments import check_frame
from dask_image_ingest.curate.pixels.batches import in_batches
from dask_image_ingest.curate.pixels.signals import PIXEL_SIGNALS, pixel_signals
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, backend_of

#: Issue → signal and cleanvision's threshold (0.3.7).
BELOW = {
    "dark": ("dark", 0.32),
    "light": ("light", 0.05),
    "blurry": ("blur", 0.29),
    "low_information": ("entropy", 3.0),
    "odd_aspect": ("aspect", 0.35),
}

#: Of ``quality.grayscale``: what is seen, where cleanvision looks at the file's mode.
LEAST_GRAYSCALE = 0.96

_RANGES = 3.0  # odd sizes lie so many interquartile ranges outside the quartiles

_ISSUES = (
    *(f"issue.{name}" for name in BELOW),
    "issue.odd_size",
    "issue.grayscale",
)


def quality(frame: Any) -> Any:
    """Add columns of signals of image quality, none of which needs a model.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of images and the columns ``height`` and
        ``width`` of :func:`~dask_image_ingest.read_webdataset_images`. Without images, only the
        last two signals are added.

    Returns
    -------
    dataframe
        ``frame`` with these columns, float32, the last two float64; null where there is no image.
        Lazy if ``frame`` is: signals that a query leaves out are not computed, filters on other
        columns run before any image is decoded, and ``quality.aspect`` and ``quality.area`` never
        need a decode.

        ``quality.dark``
            99th percentile of brightness, 0 to 1: low if even the brightest parts are dark.
            Brightness of a pixel is sqrt(0.241 R² + 0.691 G² + 0.068 B²) / 255 (HSP, as in
            cleanvision).
        ``quality.light``
            1 - 5th percentile of brightness, 0 to 1: low if even the darkest parts are bright.
        ``quality.blur``
            0 to 1, low if blurred: min(1 - exp(-0.01 e) + s, 1) with e the standard deviation of
            Pillow's ``FIND_EDGES`` of the luma at up to 64 × 64, and s = 1 - exp(-0.01 d), d the
            standard deviation of that picture's histogram; s up to 0.18 counts as 0 (cleanvision).
        ``quality.entropy``
            Bits of Shannon's entropy of the histogram of all channels, 0 to 9.58 (of one channel,
            0 to 8), as ``PIL.Image.entropy``.
        ``quality.contrast``
            Standard deviation of brightness, 0 to 0.5 (RMS contrast, Peli 1990).
        ``quality.grayscale``
            1 - 99th percentile of (largest - smallest channel) / 255, 0 to 1: 1 if no pixel has a
            colour, however the file stores it.
        ``quality.aspect``
            min(width / height, height / width), 0 to 1.
        ``quality.area``
            Pixels: height × width, of the image as it is stored.

    Raises
    ------
    ArgumentError
        If a column is missing.
    FunctionError
        When computed, for images of other than 1 or 3 channels.

    Notes
    -----
    Histograms are of every k-th row and column, k = ceil(longer side / 128): levels differ from
    those of all pixels by about a percent. The small picture for ``quality.blur`` is made of area
    means, of at least 3 × 3 pixels of each area if it has them, cleanvision's by Pillow's bicubic
    filter. Images that are read with ``size=`` are judged
    as they were resized.

    Examples
    --------
    >>> judged = curate.quality(ddf)
    >>> judged[["__key__", "quality.dark", "quality.blur", "quality.aspect"]].head(2).round(2)
      __key__  quality.dark  quality.blur  quality.aspect
    0    0000          0.95          0.75             1.0
    1    0001          0.89          0.67             1.0
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    check_frame(meta)
    missing = [name for name in ("height", "width") if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}: quality needs height and "
            "width, as read_webdataset_images gives them"
        )
    ratio = frame["width"] / frame["height"]
    area = frame["height"] * 1.0 * frame["width"]
    shaped = {"quality.aspect": ratio.where(ratio <= 1, 1 / ratio), "quality.area": area}
    frame = frame.assign(**shaped)
    if not any(map(backend_of(meta).is_images, meta.dtypes)):
        return frame
    outputs = {f"quality.{name}": "float32" for name in PIXEL_SIGNALS}
    return in_batches(frame, _signals, outputs)


def issues(frame: Any) -> Any:
    """Add boolean columns for images that are likely to be of no use.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns of :func:`quality`, which are added where
        they are missing.

    Returns
    -------
    dataframe
        ``frame`` with boolean columns, null where the signal is. Lazy if ``frame`` is. Thresholds
        are those of cleanvision 0.3.7, but for the last:

        ``issue.dark``
            ``quality.dark`` < 0.32
        ``issue.light``
            ``quality.light`` < 0.05
        ``issue.blurry``
            ``quality.blur`` < 0.29
        ``issue.low_information``
            ``quality.entropy`` < 3 bits
        ``issue.odd_aspect``
            ``quality.aspect`` < 0.35
        ``issue.odd_size``
            sqrt(``quality.area``) lies more than 3 interquartile ranges outside the quartiles of
            this frame. Headers of all rows are read for that.
        ``issue.grayscale``
            ``quality.grayscale`` > 0.96

    Raises
    ------
    ArgumentError
        If a column is missing.

    Examples
    --------
    >>> judged = curate.issues(ddf)
    >>> good = judged[~judged["issue.dark"] & ~judged["issue.blurry"]]
    >>> len(good)
    51
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    if "quality.area" not in frame.columns:
        frame = quality(frame)
    known = {name: f"quality.{signal}" for name, (signal, _) in BELOW.items()}
    added = {
        f"issue.{name}": frame[known[name]] < threshold
        for name, (_, threshold) in BELOW.items()
        if known[name] in frame.columns
    }
    added["issue.odd_size"] = _has_odd_size(frame["quality.area"])
    if "quality.grayscale" in frame.columns:
        added["issue.grayscale"] = frame["quality.grayscale"] > LEAST_GRAYSCALE
    return frame.assign(**{name: added[name] for name in _ISSUES if name in added})


def issue_summary(frame: Any) -> pd.DataFrame:
    """Count the images that have each issue; computed at once.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns of :func:`issues`, which are added where
        they are missing.

    Returns
    -------
    pandas.DataFrame
        A row for each issue: ``rows``, int64, how many have it, and ``share``, float64, of those
        for which it could be told.

    Raises
    ------
    ArgumentError
        If a column is missing.

    Examples
    --------
    >>> curate.issue_summary(ddf)
                     rows     share
    dark                0  0.000000
    light               0  0.000000
    ...
    """
    if "issue.odd_size" not in frame.columns:
        frame = issues(frame)
    names = [name for name in _ISSUES if name in frame.columns]
    told = frame[names]
    found, known = dask.compute(told.sum(), told.count())
    found, known = (pd.Series(counts.to_dict(), dtype="int64") for counts in (found, known))
    summary = pd.DataFrame({"rows": found, "share": found / known.clip(lower=1)}).loc[names]
    return summary.rename(index=lambda name: name.removeprefix("issue."))


def _signals(groups: Sequence[Any], backend: Backend) -> dict[str, Any]:
    signals = pixel_signals(groups, backend.numpy)
    return {f"quality.{name}": values for name, values in signals.items()}


def _has_odd_size(areas: Any) -> Any:
    """Mark areas that are far from the usual ones of their column; lazy if it is."""
    if not isinstance(areas, FrameBase):
        return _is_outside(areas, _limits(_count(areas)))
    # No scalars: dask's head of a comparison would ask them for their first rows.
    limits = areas.reduction(_count, combine=_add, aggregate=_limits, meta=_limits(_NO_COUNTS))
    meta = _is_outside(areas._meta, limits._meta)
    return areas.map_partitions(_is_outside, limits, meta=meta, align_dataframes=False)


def _is_outside(areas: Any, limits: pd.DataFrame) -> Any:
    side = areas**0.5
    low, high = limits["side"]
    return (side < low) | (side > high)


_NO_COUNTS = pd.DataFrame({"side": np.empty(0), "rows": np.empty(0, "int64")})


def _count(areas: Any) -> pd.DataFrame:
    """Count each side, on the host: exact, whatever the partitions are."""
    counts = areas.dropna().value_counts()
    counts = counts.to_pandas() if hasattr(counts, "to_pandas") else counts
    side = counts.index.to_numpy("float64") ** 0.5
    return pd.DataFrame({"side": side, "rows": counts.to_numpy("int64")})


def _add(counts: pd.DataFrame) -> pd.DataFrame:
    return counts.groupby("side", as_index=False)["rows"].sum()


def _limits(counts: pd.DataFrame) -> pd.DataFrame:
    """The least and the largest usual side."""
    if not len(counts):
        return pd.DataFrame({"side": [np.nan, np.nan]})
    counts = _add(counts)
    first, third = _quantile(counts, 0.25), _quantile(counts, 0.75)
    beyond = _RANGES * (third - first)
    return pd.DataFrame({"side": [first - beyond, third + beyond]})


def _quantile(counts: pd.DataFrame, share: float) -> float:
    """As ``numpy.percentile`` of the values themselves."""
    ends = counts["rows"].to_numpy().cumsum()
    place = share * (ends[-1] - 1)
    around = np.searchsorted(ends, [int(place), int(np.ceil(place))], "right")
    below, above = counts["side"].to_numpy()[around]
    return float(below + (above - below) * (place % 1))
