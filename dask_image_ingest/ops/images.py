"""Images of a partition: stacked, counted, resized and encoded; lists as one array."""

from __future__ import annotations

import io
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import DTypeLike
from PIL import Image

from dask_image_ingest.arguments import check_unique, shown
from dask_image_ingest.decode import (
    VALUE_TYPES,
    DecodeSpec,
    Header,
    ImageShape,
    Pixels,
    make_decode_spec,
    resize_arrays,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import as_uint8, backend_of, stack_views
from dask_image_ingest.typedefs import Array, DataFrame, Series

_LEVELS = np.arange(256)
_STATISTICS = {"mean": "float64", "std": "float64", "min": "int64", "max": "int64"}


def level_histograms(frame: DataFrame, image: str) -> pd.DataFrame:
    """Histograms of a partition's pixel values: a row of 256 counts for each channel.

    Integer counts add up exactly, for any number and order of partitions, and all statistics follow
    from them.
    """
    backend = backend_of(frame)
    by_channels: dict[int, list[Any]] = {}
    for array in backend.arrays(frame[image]):
        if array is not None and array.dtype != np.uint8:
            raise ArgumentError(
                f"channel_stats counts values of uint8, and an image is of {array.dtype}: compute "
                "statistics of each image with map_batches, and combine them"
            )
        if array is not None:
            by_channels.setdefault(array.shape[2], []).append(array)
    parts = [pd.DataFrame(backend.count_levels(images)) for images in by_channels.values()]
    counts = pd.concat(parts) if parts else pd.DataFrame(np.empty((0, 256), np.int64))
    counts.index = counts.index.astype("int64").rename("channel")
    return add_levels(counts)


def add_levels(counts: pd.DataFrame) -> pd.DataFrame:
    """Add up the histograms of several partitions."""
    return counts.groupby(level=0).sum()


def statistics(counts: pd.DataFrame) -> pd.DataFrame:
    """Statistics of each channel: ``mean``, ``std``, ``min``, ``max`` and number of ``pixels``."""
    rows = {channel: _statistics(row.to_numpy()) for channel, row in add_levels(counts).iterrows()}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*_STATISTICS, "pixels"]).astype(
        {**_STATISTICS, "pixels": "int64"}
    )
    frame.index = frame.index.astype("int64").rename("channel")
    return frame


def _statistics(counts: np.ndarray) -> tuple[float, float, int, int, int]:
    pixels = int(counts.sum())
    mean = float(counts @ _LEVELS) / pixels
    # Centred, since E[x²] - E[x]² loses precision.
    variance = float(counts @ (_LEVELS - mean) ** 2) / pixels
    present = np.flatnonzero(counts)
    return mean, variance**0.5, int(present[0]), int(present[-1]), pixels


def stack(
    frame: DataFrame,
    image: str,
    shape: ImageShape | None = None,
    first: DataFrame | None = None,
    dtype: np.dtype | None = None,
) -> Array:
    """Stack the images of a pandas or cuDF frame into one array, (n, height, width, channels).

    ``shape`` and ``dtype`` are required of each image, None for edges and types that are not known;
    ``first`` is a frame with the first image of any partition, whose shape is required too.
    """
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    required = (None, None, None) if shape is None else shape
    if not arrays:
        return backend.numpy.empty((0, *_empty_shape(required, first, image)), dtype or np.uint8)
    if any(array is None for array in arrays):
        missing = next(row for row, array in enumerate(arrays) if array is None)
        raise ArgumentError(
            f"stack: row {missing} of a partition has no image: drop such rows first, "
            "ddf[ddf.error.isna()]"
        )
    other = next((a for a in arrays if a.dtype != (dtype or arrays[0].dtype)), None)
    if other is not None:
        raise ArgumentError(
            f"stack: an image is of {other.dtype}, and not {dtype or arrays[0].dtype}: pass "
            "dtype=, and make the values of one type with map_batches if they differ"
        )
    images = stack_views(arrays, backend)
    if isinstance(images, list):
        other = next(a.shape for a in images if a.shape != images[0].shape)
        raise ArgumentError(
            f"stack: the images of a partition differ in shape, {images[0].shape} and {other}: "
            "read with size="
        )
    shape_here = images.shape[1:]
    if any(edge not in (None, here) for edge, here in zip(required, shape_here, strict=True)):
        raise ArgumentError(
            f"stack: the images of a partition have the shape {shape_here}, and not {required}"
        )
    first_shape = _first_shape(first, image)
    if first_shape not in (None, shape_here):
        raise ArgumentError(
            f"stack: the images of partitions differ in shape, {first_shape} and {shape_here}: "
            "read with size="
        )
    return images


def parse_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Parse the argument ``dtype=`` of ``stack``."""
    if dtype is None:
        return None
    with suppress(TypeError):
        if np.dtype(dtype) in VALUE_TYPES.values():
            return np.dtype(dtype)
    raise ArgumentError(f"dtype={shown(dtype)}; pass 'uint8', 'uint16' or 'float32'")


def parse_shape(shape: Iterable[Any] | None) -> ImageShape | None:
    """Parse the argument ``shape=`` of ``stack``."""
    if shape is None:
        return None
    try:
        height, width, channels = map(operator.index, shape)
    except (TypeError, ValueError):
        height = width = channels = 0
    if min(height, width, channels) < 1:
        raise ArgumentError(f"shape={shape!r}; pass (height, width, channels) of each image")
    return height, width, channels


def _empty_shape(required: ImageShape, first: DataFrame | None, image: str) -> tuple[int, ...]:
    """Image shape of an empty partition, so that it can be concatenated with the others."""
    known = _first_shape(first, image) or (0, 0, 0)
    return tuple(own if edge is None else edge for edge, own in zip(required, known, strict=True))


def _first_shape(first: DataFrame | None, image: str) -> tuple[int, ...] | None:
    """Shape of the first image of any partition; None if it is not known."""
    arrays = [] if first is None else backend_of(first).arrays(first[image])
    return tuple(arrays[0].shape) if arrays and arrays[0] is not None else None


def vectors(frame: DataFrame, column: str, first: DataFrame | None = None) -> Array:
    """A column of lists or arrays of a pandas or cuDF frame as an array (n, ...).

    ``first`` is a frame with the first row of any partition, whose shape is required.
    """
    if column not in frame.columns:
        raise ArgumentError(f"the frame has no column {column!r}")
    check_unique([column], frame.columns)
    backend = backend_of(frame)
    values = backend.values(frame[column])
    if values is not None and (values.ndim < 2 or values.dtype.kind not in "biuf"):
        raise ArgumentError(f"column {column!r} is no column of lists of numbers")
    if values is None:
        raise ArgumentError(
            f"the lists of {column!r} differ in length, or some are null: drop these rows first, "
            f"frame[frame[{column!r}].notnull()]"
        )
    first_list = None if first is None else backend.values(first[column])
    shape = None if first_list is None or not len(first_list) else first_list.shape[1:]
    if shape is None:
        return values
    if len(values) == 0:
        return values.reshape(0, *shape)
    if shape != values.shape[1:]:
        raise ArgumentError(
            f"the lists of {column!r} differ in length, {shape[0]} in one partition and "
            f"{values.shape[1]} in another"
        )
    return values


def first_row(frame: DataFrame) -> DataFrame:
    """The first row that is not null, of a frame with one column."""
    return frame[frame[frame.columns[0]].notna()].head(1)


#: Formats that pixels are encoded in → numbers of channels: grey, grey and alpha, RGB, RGBA.
ENCODED_FORMATS: Final = {"jpeg": (1, 3), "png": (1, 2, 3, 4), "webp": (1, 2, 3, 4)}


def small_images(
    frame: DataFrame,
    image: str,
    size: int | tuple[int, int],
    resize: str,
    *,
    smooth: bool = False,
) -> DataFrame:
    """Resize the images of a pandas or cuDF frame, and convert them to uint8, for display.

    If all images have one channel, they may be labels, and the nearest pixel is taken, unless
    ``smooth``.
    """
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    nearest = not smooth and all(array is None or array.shape[2] == 1 for array in arrays)
    decoding = make_decode_spec(
        device=backend.device,
        size=size,
        resize=resize,
        mode="labels" if nearest else "RGB",
        transform=None,
        max_pixels=None,
    )
    errors = [_error(array, decoding) for array in arrays]
    present = [row for row, error in enumerate(errors) if error is None]
    shapes = np.zeros((len(arrays), 3), np.int32)
    buffer = backend.pixel_buffer(0)
    images = [as_uint8(backend.host(arrays[row])) for row in present]
    shapes[present] = resize_arrays(images, decoding, buffer)
    return backend.with_images(frame, Pixels(buffer.finish(), shapes, errors), image, None)


def _error(array: Array | None, decoding: DecodeSpec) -> str | None:
    if array is None:
        return "missing"
    height, width, channels = array.shape
    return decoding.validated(Header(None, height, width, channels, None, False)).error


def encoded_images(
    frame: DataFrame, image: str, format: str, quality: int, **options: Any
) -> Series:
    """Encode the images of a pandas or cuDF frame: a series of bytes.

    ``options`` are Pillow's for the format.
    """
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    rows = [row for row, array in enumerate(arrays) if array is not None]
    values = [encode(backend.host(arrays[row]), format, quality, **options) for row in rows]
    return backend.with_columns(frame[[]], {image: (values, pa.binary())}, rows)[image]


def encode(array: np.ndarray, format: str, quality: int, **options: Any) -> bytes:
    """Encode one image (height, width, channels).

    Raises
    ------
    ArgumentError
        If the format does not support the image's dtype, channels or size.
    """
    is_16_bit_png = array.dtype == np.uint16 and format == "png" and array.shape[2] == 1
    if array.dtype != np.uint8 and not is_16_bit_png:
        raise ArgumentError(
            f"encode: an image is of {array.dtype} with {array.shape[2]} channels, and {format} "
            "takes uint8; png takes uint16 of one channel too. Make such images first with "
            "map_batches, or write them as parquet, which keeps any"
        )
    channels, supported = array.shape[2], ENCODED_FORMATS[format]
    if channels not in supported:
        raise ArgumentError(
            f"encode: an image has {channels} channels, and {format} takes "
            f"{', '.join(map(str, supported[:-1]))} or {supported[-1]}: make such images first, as "
            "map_batches(lambda images: [image[..., :3] for image in images], {'image': 'image'}) "
            "does, or pass another format"
        )
    if format == "webp" and channels != 3:
        # Lossless: grey values and alpha are often data, such as labels or masks.
        options = {"lossless": True, "exact": True}
    file = io.BytesIO()
    pixels = array[:, :, 0] if array.shape[2] == 1 else array
    try:
        Image.fromarray(pixels).save(file, format, quality=quality, **options)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"encode: an image of {array.shape[0]} × {array.shape[1]} pixels can't be a {format}: "
            f"{error}"
        ) from error
    return file.getvalue()
