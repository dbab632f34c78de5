"""``measure_quality``, ``find_issues``, ``summarize_issues``: signals that need no model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import dask
import numpy as np
import pandas as pd
from PIL import Image
from tlz.itertoolz import partition_all

from dask_image_ingest.arguments import check_frame
from dask_image_ingest.curate.pixels import (
    GROUP_SIZE,
    Taps,
    area_taps,
    cubic_taps,
    in_batches,
    luma,
    luma_of_reduced_rows,
    reduced_columns,
)
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import Frame
from dask_image_ingest.dataset.plan import assign_columns, select_columns
from dask_image_ingest.decode import resized_cubic
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, image_columns
from dask_image_ingest.typedefs import AnyFrame, AnySeries, Array, ArrayModule, Series

_LEVEL_SIGNALS = (
    *("dark", "light", "clipped_dark", "clipped_light"),
    *("entropy", "contrast", "grayscale"),
)
PIXEL_SIGNALS = (*_LEVEL_SIGNALS, "blur", "sharpness", "directional_sharpness", "fine_detail")

# Signals that need no pixels.
_SHAPE_SIGNALS = ("aspect", "area")

SIGNALS = (*PIXEL_SIGNALS, *_SHAPE_SIGNALS)

#: Issue → signal and the threshold below which it holds: those of cleanvision 0.3.7, and for
#: directional sharpness that of `docs/design/curate.md`.
BELOW = {
    "dark": ("dark", 0.32),
    "light": ("light", 0.05),
    "blurry": ("directional_sharpness", 0.4),
    "low_information": ("entropy", 3.0),
    "odd_aspect": ("aspect", 0.35),
}

#: An image with less ``quality.entropy`` is a drawing, and not blurry.
_MIN_ENTROPY = 5.0

#: An image with more ``quality.clipped_light`` is too light.
MAX_CLIPPED_LIGHT = 0.08

#: Threshold of ``quality.grayscale``, which looks at pixels; cleanvision looks at the file's mode.
MIN_GRAYSCALE = 0.96

#: An image with less ``quality.fine_detail`` has been enlarged.
MIN_FINE_DETAIL = 0.12

_RANGES = 3.0  # odd sizes lie so many interquartile ranges outside the quartiles

_ISSUES = (
    *(f"issue.{name}" for name in BELOW),
    "issue.odd_size",
    "issue.grayscale",
)

# Pixels of a sample for histograms; of fewer than twice as many, all are taken.
_SAMPLED = 128 * 128

# Weights of perceived brightness (Darel Rex Finley's HSP colour model, 2006).
_BRIGHTNESS = (0.241, 0.691, 0.068)

# Longer side of the thumbnails in which blur is measured, as in cleanvision, whose scores are
# 1 - exp(-0.01 x); that of the histogram counts only above 0.18.
_BLUR_SIDE = 64
_BLUR_SCALE = 0.01
_MIN_SPREAD = 0.18

# Longer side at which sharpness is measured, in so many bands of so many rows; smaller images are
# not enlarged.
_SHARPNESS_SIDE = 512
_BANDS = 8
_BAND = 8

# Added to the variance of gradients, in levels²: less than this is noise.
_NOISE = 5.0

# The second derivative in the direction (c, s) is c² xx + s² yy + c s / 2 xy, of which xy is four
# times the mixed one; so its mean square in each of 16 directions is a sum of mean products.
_PAIRS = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
_C, _S = np.cos(np.arange(16) * np.pi / 16), np.sin(np.arange(16) * np.pi / 16)
_ALONG = np.stack(
    [_C**4, _S**4, (_C * _S) ** 2 / 4, 2 * (_C * _S) ** 2, _C**3 * _S, _C * _S**3], axis=1
)

# Channels at these levels are clipped. Pixels beyond the others are white, black or a pure colour.
_CLIPPED, _WHITE, _PURE = 253, 235, 32

# Windows in which fine detail is measured, and their side: 0.75 and 0.4 of it are whole numbers.
_WINDOWS = 16
_WINDOW = 40
_TOGETHER = 4  # windows in one matrix product

# The golden ratio, and its counterpart in two dimensions: multiples of their inverses, modulo 1,
# fill a line and a square evenly, and have no period.
_GOLDEN = (5**0.5 - 1) / 2
_PLASTIC = 1.324717957244746


def measure_quality(frame: Frame) -> Frame:
    """Add columns with signals of image quality; none needs a model.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of images, the columns ``height`` and
        ``width`` of :func:`~dask_image_ingest.read_webdataset_images`, or both. Without images,
        only the last two signals are added.

    Returns
    -------
    dataframe
        ``frame`` with these columns, added or replaced, float32, the last two float64; null where
        there is no image. Lazy if ``frame`` is: signals that a query does not use are not computed,
        filters on other columns run before any image is decoded, and ``quality.aspect`` and
        ``quality.area`` need no decode.

        ``quality.dark``
            99th percentile of brightness, 0 to 1: low if even the brightest parts are dark.
            Brightness of a pixel is sqrt(0.241 R² + 0.691 G² + 0.068 B²) / 255 (HSP, as in
            cleanvision).
        ``quality.light``
            1 - 5th percentile of brightness, 0 to 1: low if even the darkest parts are bright.
        ``quality.clipped_light``
            Share of pixels with a channel of 253 or more and another one of 32 to 234: high for an
            overexposed image. White paper and pure colours don't count, and grey images have 0.
        ``quality.clipped_dark``
            Share of pixels with a channel of 2 or less and another one of 21 to 223.
        ``quality.blur``
            0 to 1, low if blurred: min(1 - exp(-0.01 e) + s, 1) with e the standard deviation of
            Pillow's ``FIND_EDGES`` of the luma at up to 64 × 64, and s = 1 - exp(-0.01 d), d the
            standard deviation of that picture's histogram; s up to 0.18 counts as 0 (cleanvision).
            At this size a blur of some pixels is gone: take ``quality.sharpness`` to find it.
        ``quality.sharpness``
            Variance of the Laplacian of the luma at up to 512 × 512, in levels²: 4 × pixel - its 4
            neighbours. Low if blurred, or of low contrast.
        ``quality.directional_sharpness``
            Mean square of the second derivative of the same luma along a line, in that of 16
            directions in which it is least, divided by half that of the gradient plus 5 levels². 0
            or more, whatever the contrast is; low if blurred, by motion too.
        ``quality.fine_detail``
            Variance of what a reduction of the luma to 0.75 of its size and back loses, as a share
            of that of 0.4 and back, by Pillow's ``LANCZOS``. Below 0.12 the image was enlarged: an
            enlargement has no detail as fine as its pixels. 1 for an image of one colour.
        ``quality.entropy``
            Shannon entropy, in bits, of the histogram of all channels, 0 to 9.58 (of one channel,
            0 to 8), as ``PIL.Image.entropy``.
        ``quality.contrast``
            Standard deviation of brightness, 0 to 0.5 (RMS contrast, Peli 1990).
        ``quality.grayscale``
            1 - 99th percentile of (largest - smallest channel) / 255, 0 to 1: 1 if no pixel has a
            colour, even if the file stores RGB. High also for nearly black or nearly white
            images, whose colours are all faint.
        ``quality.aspect``
            min(width / height, height / width), 0 to 1.
        ``quality.area``
            Pixels: height × width of the stored image; of the image as read if the frame has no
            columns ``height`` and ``width``.

    Raises
    ------
    ArgumentError
        If the frame has neither images nor their shapes.
    FunctionError
        When computed, for images of other than 1 or 3 channels.

    Notes
    -----
    Histograms use 16,384 pixels that lie at no regular distance, or all of an image of fewer than
    32,768: levels are off by 0.03 at most, in photographs, halftones and grids of lines
    alike. Shares of pixels are off by 0.012 at most (three standard deviations), and the percentile
    of ``quality.light`` is the 4.5th to 5.5th of all pixels: of a chart or a page in which about a
    twentieth of the pixels is ink, it may be the level of the ink or that of the paper.

    The small image for ``quality.blur`` is made by a cubic filter, as in cleanvision. Sharpness
    uses 8 bands of rows, ``quality.fine_detail`` 16 windows of 40 × 40. If images are read with
    ``size=``, the resized images are measured.

    The entropy of a grey image is that of its one channel if it is read with ``mode="L"``; read as
    RGB it is that plus log2(3) = 1.58 bits, whatever mode the file has. cleanvision measures grey
    files as one channel, so for these it gives 1.58 bits less, and flags more as low information.

    Examples
    --------
    >>> found = curate.measure_quality(ddf)
    >>> columns = ["__key__", "quality.dark", "quality.blur", "quality.aspect"]
    >>> found[columns].head(2).round(2).reset_index(drop=True)
      __key__  quality.dark  quality.blur  quality.aspect
    0    0000          0.95          0.78             1.0
    1    0001          0.89          0.67             1.0
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    result = with_signals(frame, SIGNALS)
    if "quality.area" not in result.columns:
        raise ArgumentError(
            "the frame has neither images nor the columns 'height' and 'width', as "
            "read_webdataset_images gives them"
        )
    return result


def with_signals(frame: AnyFrame, signals: Sequence[str]) -> AnyFrame:
    """Add those of ``signals`` that the frame's columns allow."""
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    has_images = bool(image_columns(meta))
    shape = [name for name in signals if name in _SHAPE_SIGNALS]
    pixels = [name for name in signals if name not in _SHAPE_SIGNALS] if has_images else []
    if shape and {"height", "width"} <= set(frame.columns):
        ratio = frame["width"] / frame["height"]
        columns = {
            "aspect": ratio.where(ratio <= 1, 1 / ratio),
            "area": frame["height"] * 1.0 * frame["width"],
        }
        frame = assign_columns(frame, {f"quality.{name}": columns[name] for name in shape})
    elif has_images:
        pixels += shape
    if not pixels:
        return frame
    outputs = {
        f"quality.{name}": "float64" if name in _SHAPE_SIGNALS else "float32" for name in pixels
    }
    return in_batches(frame, "measure_quality", _signals, outputs, names=tuple(pixels))


def find_issues(frame: Frame) -> Frame:
    """Add boolean columns that flag images likely to be useless.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns of :func:`measure_quality`; missing ones
        are computed from its images, except ``quality.blur`` and ``quality.fine_detail``, which no
        issue uses. Without images, it gets the issues of the signals it has.

    Returns
    -------
    dataframe
        ``frame`` with these signals and these boolean columns, added or replaced, null where the
        signal is. Lazy if ``frame`` is. Thresholds are those of cleanvision 0.3.7, except of
        blurry, grayscale, and clipped light:

        ``issue.dark``
            ``quality.dark`` < 0.32
        ``issue.light``
            ``quality.light`` < 0.05, or ``quality.clipped_light`` > 0.08
        ``issue.blurry``
            ``quality.directional_sharpness`` < 0.4, and ``quality.entropy`` of 5 bits or more:
            drawings, whose edges may all have one direction, are not blurry.
        ``issue.low_information``
            ``quality.entropy`` < 3 bits
        ``issue.odd_aspect``
            ``quality.aspect`` < 0.35
        ``issue.odd_size``
            sqrt(``quality.area``) lies more than 3 interquartile ranges outside the quartiles of
            this frame. That reads the headers of all rows.
        ``issue.grayscale``
            ``quality.grayscale`` > 0.96. cleanvision looks at the mode of the file. This also finds
            grey images stored as RGB, and flags nearly black or white ones.

    Raises
    ------
    ArgumentError
        If the frame has neither images nor signals nor shapes.

    Examples
    --------
    >>> found = curate.find_issues(ddf)
    >>> good = found[~found["issue.dark"] & ~found["issue.blurry"]]
    >>> len(good)
    51
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    # No issue uses these two, which take half of the time of all; the others cost nothing more.
    wanted = [name for name in SIGNALS if name not in ("blur", "fine_detail")]
    frame = with_signals(frame, [n for n in wanted if f"quality.{n}" not in frame.columns])
    available = {name for name in SIGNALS if f"quality.{name}" in frame.columns}
    if not available:
        raise ArgumentError(
            "the frame has neither images nor signals of measure_quality(), nor the columns "
            "'height' and 'width', as read_webdataset_images gives them"
        )
    added = {
        f"issue.{name}": frame[f"quality.{signal}"] < threshold
        for name, (signal, threshold) in BELOW.items()
        if signal in available
    }
    if "clipped_light" in available and "light" in available:
        added["issue.light"] |= frame["quality.clipped_light"] > MAX_CLIPPED_LIGHT
    if "entropy" in available and "directional_sharpness" in available:
        added["issue.blurry"] &= frame["quality.entropy"] >= _MIN_ENTROPY
    if "area" in available:
        added["issue.odd_size"] = _has_odd_size(frame["quality.area"])
    if "grayscale" in available:
        added["issue.grayscale"] = frame["quality.grayscale"] > MIN_GRAYSCALE
    return assign_columns(frame, {name: added[name] for name in _ISSUES if name in added})


def summarize_issues(frame: AnyFrame) -> pd.DataFrame:
    """Count the images that have each issue; computed at once.

    If the frame has images but no signals, this decodes all images, and later uses decode them
    again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns of :func:`find_issues`; if it has none,
        they are computed.

    Returns
    -------
    pandas.DataFrame
        A row for each issue: ``rows``, int64, the rows that have it; ``share``, float64, of the
        rows where it is not null; ``unknown``, int64, the rows where it is null, such as images
        that cannot be decoded.

    Raises
    ------
    ArgumentError
        If the frame has neither images nor signals nor shapes.

    Examples
    --------
    >>> curate.summarize_issues(ddf)
                     rows     share  unknown
    dark                0  0.000000        1
    light               1  0.019608        1
    ...
    """
    if not any(name in frame.columns for name in _ISSUES):
        frame = find_issues(frame)
    names = [name for name in _ISSUES if name in frame.columns]
    flags = select_columns(frame, names)
    true, valid, rows = dask.compute(flags.sum(), flags.count(), flags.index.size)
    true, valid = (pd.Series(counts.to_dict(), dtype="int64") for counts in (true, valid))
    columns = {"rows": true, "share": true / valid.clip(lower=1), "unknown": int(rows) - valid}
    summary = pd.DataFrame(columns).loc[names]
    return summary.rename(index=lambda name: name.removeprefix("issue."))


def _has_odd_size(areas: AnySeries) -> AnySeries:
    """Flag the outliers of a column of areas; lazy if it is."""
    if isinstance(areas, FrameBase):
        # Simplified by itself, so that it reads headers. In a query for pixels, the limits would
        # wait for all of these, and hold them.
        limits = new_collection(areas.expr.simplify()).reduction(
            _count, combine=_add, aggregate=_limits, meta=_limits(_NO_COUNTS)
        )["area"]
        low, high = limits.min(), limits.max()
    else:
        low, high = _limits(_count(areas))["area"]
    return (areas < low) | (areas > high)


_NO_COUNTS = pd.DataFrame({"area": np.empty(0), "rows": np.empty(0, "int64")})


def _count(areas: Series) -> pd.DataFrame:
    """Count the rows of each area, on the host: exact for any partitions."""
    counts = areas.dropna().value_counts()
    counts = counts.to_pandas() if hasattr(counts, "to_pandas") else counts
    area = counts.index.to_numpy("float64")
    return pd.DataFrame({"area": area, "rows": counts.to_numpy("int64")})


def _add(counts: pd.DataFrame) -> pd.DataFrame:
    return counts.groupby("area", as_index=False)["rows"].sum()


def _limits(counts: pd.DataFrame) -> pd.DataFrame:
    """The smallest and the largest area that is not an outlier, in two rows; NaN of no rows."""
    if not len(counts):
        return pd.DataFrame({"area": [np.nan, np.nan]})
    counts = _add(counts)
    sides = counts["area"] ** 0.5
    first, third = (_quantile(sides, counts["rows"], share) for share in (0.25, 0.75))
    margin = _RANGES * (third - first)
    inside = counts["area"][(sides >= first - margin) & (sides <= third + margin)]
    return pd.DataFrame({"area": [inside.min(), inside.max()]})


def _quantile(values: pd.Series, rows: pd.Series, share: float) -> float:
    """Quantile of counted values in order, interpolated as by ``numpy.percentile``."""
    ends = rows.to_numpy().cumsum()
    position = share * (ends[-1] - 1)
    around = np.searchsorted(ends, [int(position), int(np.ceil(position))], "right")
    below, above = values.to_numpy()[around]
    return float(below + (above - below) * (position % 1))


def _signals(groups: Sequence[Array], backend: Backend, names: tuple[str, ...]) -> dict[str, Any]:
    pixels = [name for name in names if name in PIXEL_SIGNALS]
    signals = pixel_signals(groups, backend.numpy, pixels)
    if set(names) & set(_SHAPE_SIGNALS):
        shapes = np.array([group.shape[1:3] for group in groups for _ in group], np.float64)
        signals["aspect"] = backend.numpy.asarray(shapes.min(axis=1) / shapes.max(axis=1))
        signals["area"] = backend.numpy.asarray(shapes.prod(axis=1))
    return {f"quality.{name}": signals[name] for name in names}


def pixel_signals(
    groups: Sequence[Array], xp: ArrayModule, names: Sequence[str] = PIXEL_SIGNALS
) -> dict[str, Any]:
    """Compute those of ``PIXEL_SIGNALS``, float32 (n,), on NumPy or CuPy.

    ``groups`` are images of one shape each, uint8 (n, height, width, channels), all of 1 or all of
    3 channels.
    """
    signals: dict[str, Any] = {}
    levels = [name for name in names if name in _LEVEL_SIGNALS]
    if levels:
        few = max(GROUP_SIZE // len(groups[0]), 1) if xp is np else len(groups)
        parts = [_level_signals(some, xp, levels) for some in partition_all(few, groups)]
        signals = {name: xp.concatenate([part[name] for part in parts]) for name in levels}
    of_images = {
        ("blur",): _blur,
        ("sharpness", "directional_sharpness"): _sharpness,
        ("fine_detail",): _fine_detail,
    }
    for some, function in of_images.items():
        if not set(some).isdisjoint(names):
            found = [function(images, xp).reshape(len(some), -1) for images in groups]
            signals.update(zip(some, xp.concatenate(found, axis=1), strict=True))
    return {name: signals[name].astype(xp.float32) for name in names}


def _level_signals(
    groups: Sequence[Array], xp: ArrayModule, names: Sequence[str]
) -> dict[str, Any]:
    """Signals of histograms of a sample of pixels."""
    # The images are computed in one array of pixels, with the number of each pixel's image: array
    # calls for each image would take longer than their work.
    count, channels = sum(map(len, groups)), groups[0].shape[3]
    samples = [_sampled(images, xp) for images in groups]
    pixels = xp.concatenate([sample.reshape(-1, channels) for sample in samples])
    image_numbers = np.repeat(
        np.arange(count),
        np.repeat([sample.shape[1] for sample in samples], [*map(len, samples)]),
    )
    offsets = xp.asarray(image_numbers * 256)
    bands = [pixels[:, channel] for channel in range(channels)]
    signals: dict[str, Any] = {}
    if not {"dark", "light", "contrast"}.isdisjoint(names):
        brightness = _histograms(_brightness(bands, xp), offsets, count, xp)
        signals["dark"] = _percentile(brightness, 99, xp)
        signals["light"] = 1 - _percentile(brightness, 5, xp)
        signals["contrast"] = _deviation(brightness, xp)
    if "entropy" in names:
        entropies = [_entropy(_histograms(band, offsets, count, xp), xp) for band in bands]
        signals["entropy"] = sum(entropies) / channels + np.log2(channels)
    if not {"clipped_dark", "clipped_light", "grayscale"}.isdisjoint(names):
        # NumPy's max over an axis of three takes 15 times as long.
        least, most = functools.reduce(xp.minimum, bands), functools.reduce(xp.maximum, bands)
        spread = _histograms(most - least, offsets, count, xp)
        signals["grayscale"] = 1 - _percentile(spread, 99, xp)
        is_light = (most >= _CLIPPED) & (least < _WHITE) & (least >= _PURE)
        is_dark = (least <= 255 - _CLIPPED) & (most > 255 - _WHITE) & (most <= 255 - _PURE)
        clipped = _histograms(
            is_light.view(xp.uint8) + 2 * is_dark.view(xp.uint8), offsets, count, xp
        )
        shares = clipped / clipped.sum(axis=1, keepdims=True)
        signals["clipped_light"], signals["clipped_dark"] = shares[:, 1], shares[:, 2]
    return signals


def _sampled(images: Array, xp: ArrayModule) -> Array:
    """A sample of the pixels of images of one shape: (n, pixels, channels)."""
    count, height, width, channels = images.shape
    if height * width < 2 * _SAMPLED:
        return images.reshape(count, height * width, channels)
    pixels = _sampled_pixels(height, width)
    if xp is np and images.flags.c_contiguous:
        # View each pixel as one item: copying three channels one by one takes twice the time.
        items = images.view(f"V{channels}").reshape(count, height * width)
        return items.take(pixels, axis=1).view(np.uint8).reshape(count, len(pixels), channels)
    return images.reshape(count, height * width, channels)[:, xp.asarray(pixels)]


@functools.lru_cache(maxsize=256)
def _sampled_pixels(height: int, width: int) -> np.ndarray:
    """Numbers, row by row, of pixels at random distances, one from each stretch: int32 (n,).

    Every row has its share, and a pattern of whatever period all of its phases.
    """
    stretch = height * width / _SAMPLED
    # The same in any process: a fixed seed, and a generator whose stream NumPy keeps.
    inside = np.random.PCG64(0).random_raw(_SAMPLED) / 2**64
    return ((np.arange(_SAMPLED) + inside) * stretch).astype(np.int32)


def _brightness(bands: Sequence[Array], xp: ArrayModule) -> Array:
    if len(bands) == 1:
        return bands[0]
    squares = sum(
        xp.square(band.astype(xp.float32)) * xp.float32(weight)
        for band, weight in zip(bands, _BRIGHTNESS, strict=True)
    )
    return (xp.sqrt(squares) + 0.5).astype(xp.uint8)


def _percentile(counts: Array, percent: int, xp: ArrayModule) -> Array:
    """Percentile of each histogram, 0 to 1: the lowest level with ``percent`` at or below it."""
    below = xp.cumsum(counts, axis=1)
    return (below * 100 < percent * below[:, -1:]).sum(axis=1) / 255


def _entropy(counts: Array, xp: ArrayModule) -> Array:
    """Shannon entropy of each histogram, in bits."""
    share = counts / counts.sum(axis=1, keepdims=True)
    return -(share * xp.log2(xp.where(share > 0, share, 1))).sum(axis=1)


def _deviation(counts: Array, xp: ArrayModule) -> Array:
    """Standard deviation of the levels, 0 to 1, of each histogram."""
    share = counts / counts.sum(axis=1, keepdims=True)
    levels = xp.arange(256) / 255
    mean = share @ levels
    return xp.sqrt((share * (levels - mean[:, None]) ** 2).sum(axis=1))


def _histograms(values: Array, offsets: Array, count: int, xp: ArrayModule) -> Array:
    """Histograms (count, 256) of uint8 values; ``offsets``: 256 times each value's image number."""
    return xp.bincount((values + offsets).reshape(-1), minlength=256 * count).reshape(count, 256)


def _blur(images: Array, xp: ArrayModule) -> Array:
    """Score of blur as in cleanvision: low if edges are weak and the histogram is even."""
    gray, count = _thumbnails(images, xp), len(images)
    counts = _histograms(gray.reshape(count, -1), xp.arange(count)[:, None] * 256, count, xp)
    edges = 1 - xp.exp(-_BLUR_SCALE * _edges(gray, xp).reshape(count, -1).std(axis=1))
    spread = 1 - xp.exp(-_BLUR_SCALE * counts.std(axis=1))
    return xp.minimum(edges + xp.where(spread > _MIN_SPREAD, spread, 0), 1)


def _thumbnails(images: Array, xp: ArrayModule) -> Array:
    """Luma of images of one shape at no more than 64 × 64, uint8 (n, height, width)."""
    _, height, width, _ = images.shape
    ratio = max(height, width, _BLUR_SIDE) / _BLUR_SIDE
    shape = max(int(height / ratio), 1), max(int(width / ratio), 1)
    if xp is np:
        return luma(np.stack([resized_cubic(image, shape) for image in images]), np)
    narrow = cubic_taps(height, shape[0], xp).reduce_rows(images, xp)
    small = cubic_taps(width, shape[1], xp).reduce_rows(xp.swapaxes(narrow, 1, 2), xp)
    return luma(xp.swapaxes(small, 1, 2), xp)


def _edges(gray: Array, xp: ArrayModule) -> Array:
    """Pillow's ``FIND_EDGES``: 8 × pixel - its neighbours, 0 to 255; the border is unchanged."""
    edges = gray.astype(xp.float32)
    if min(gray.shape[1:]) < 3:
        return edges
    rows = edges[:, :-2] + edges[:, 1:-1] + edges[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]  # 3 × 3, the pixel included: 9 × it
    edges[:, 1:-1, 1:-1] = xp.clip(9 * edges[:, 1:-1, 1:-1] - sums, 0, 255)
    return edges


def _sharpness(images: Array, xp: ArrayModule) -> Array:
    """Variance of the Laplacian, and directional sharpness: float64 (2, n).

    Both of the luma at no more than 512 × 512, in bands of rows.
    """
    _, height, width, _ = images.shape
    ratio = max(height, width, _SHARPNESS_SIDE) / _SHARPNESS_SIDE
    rows = max(int(height / ratio), 1)
    if min(rows, int(width / ratio)) < 3:
        return xp.zeros((2, len(images)), xp.float64)
    banded, inner = _banded_taps(height, rows, xp)
    narrow = luma_of_reduced_rows(images, banded, xp)
    gray = reduced_columns(narrow, area_taps(width, int(width / ratio), xp), xp)
    above, here, below = (gray[:, inner + row] for row in range(3))
    down, twice = below - above, 2 * here[:, :, 1:-1]
    left, right = here[:, :, :-2], here[:, :, 2:]
    # Differences of central pixels are twice the gradient, those of corners 4 times ∂²/∂x∂y.
    derivatives = (
        left + right - twice,
        (above + below)[:, :, 1:-1] - twice,
        down[:, :, 2:] - down[:, :, :-2],
        right - left,
        down[:, :, 1:-1],
    )
    xx, yy, xy, x, y = (values.reshape(len(images), -1) for values in derivatives)
    second = (xx, yy, xy)
    products = xp.stack([_mean_product(second[i], second[j], xp) for i, j in _PAIRS])
    gradient = (_mean_product(x, x, xp) + _mean_product(y, y, xp)) / 8
    least = (xp.asarray(_ALONG) @ products).min(axis=0)
    # The mean of the Laplacian, which is small, counts as variance.
    laplacian = products[0] + products[1] + 2 * products[3]
    return xp.stack([laplacian, least / (gradient + _NOISE)])


def _mean_product(one: Array, other: Array, xp: ArrayModule) -> Array:
    # In float64 sums do not depend on the batch: rows may be ranked by them.
    return (one * other).mean(axis=1, dtype=xp.float64)


@functools.lru_cache(maxsize=1024)
def _banded_taps(height: int, rows: int, xp: ArrayModule) -> tuple[Taps, Any]:
    """Area means for bands of the ``rows``, and which of their inner rows have both neighbours."""
    taps = area_taps(height, rows, xp)
    if rows <= _BANDS * _BAND:
        return taps, xp.arange(rows - 2)
    number = np.arange(_BANDS)
    start = ((number + number * _GOLDEN % 1) / _BANDS * (rows - _BAND + 1)).astype(int)
    chosen = np.unique(start[:, None] + np.arange(_BAND))
    inner = np.flatnonzero(chosen[2:] - chosen[:-2] == 2)
    chosen = xp.asarray(chosen)
    return Taps(taps.pixels[chosen], taps.weights[chosen]), xp.asarray(inner)


def _fine_detail(images: Array, xp: ArrayModule) -> Array:
    """Variance of what a reduction to 0.75 and back loses, as a share of that of 0.4 and back.

    The luma of windows is reduced and enlarged, by Pillow's ``LANCZOS``. Enlarging adds no
    frequencies: those that the first loses are hardly there. 1 for an image of one colour.
    """
    count, side = len(images), _WINDOW
    for axis in (1, 2):  # a smaller image repeats its last row and column
        length = images.shape[axis]
        if length < side:
            images = xp.take(images, xp.asarray(np.minimum(np.arange(side), length - 1)), axis)
    # (n, group, row, window, column): the windows of a group are one matrix in both directions, and
    # so small that BLAS starts no threads, which would compete with those that decode.
    shape = (count, _WINDOWS // _TOGETHER, side, _TOGETHER, side)
    windows = xp.empty((*shape, images.shape[3]), xp.uint8)
    for number, (top, left) in enumerate(_corners(*images.shape[1:3])):
        group, place = divmod(number, _TOGETHER)
        windows[:, group, :, place] = images[:, top : top + side, left : left + side]
    gray = luma(windows, xp).astype(xp.float32)
    lost = []
    for there_and_back in _reductions(xp):
        back = there_and_back @ gray.reshape(*shape[:3], -1)
        back = back.reshape(*shape[:2], -1, side) @ there_and_back.T
        difference = gray.reshape(count, -1) - back.reshape(count, -1)
        lost.append(difference.var(axis=1, dtype=xp.float64))
    # Rounding alone: one level in one of all pixels loses more.
    is_plain = lost[1] < 1e-6
    return xp.where(is_plain, 1, lost[0] / (lost[1] + is_plain))


@functools.lru_cache(maxsize=1024)
def _corners(height: int, width: int) -> list[tuple[int, int]]:
    """Top and left of windows, spread evenly."""
    number = np.arange(_WINDOWS)
    top = (0.5 + number / _PLASTIC) % 1 * (height - _WINDOW + 1)
    left = (0.5 + number / _PLASTIC**2) % 1 * (width - _WINDOW + 1)
    return list(zip(top.astype(int).tolist(), left.astype(int).tolist(), strict=True))


@functools.lru_cache(maxsize=1)
def _reductions(xp: ArrayModule) -> list[Any]:
    """Matrices that reduce an axis of a window to 0.75 and 0.4 of it, and enlarge it again."""
    matrices = []
    for side in (_WINDOW * 3 // 4, _WINDOW * 2 // 5):
        axis = Image.fromarray(np.eye(_WINDOW, dtype=np.float32))
        narrow = axis.resize((_WINDOW, side), Image.Resampling.LANCZOS)
        back = narrow.resize((_WINDOW, _WINDOW), Image.Resampling.LANCZOS)
        matrices.append(xp.asarray(np.asarray(back)))
    return matrices
