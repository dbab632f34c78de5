"""Rows of partitions, and their conversion to batches of NumPy or CuPy arrays, or torch tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.decode import ImageShape
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.frames import Backend, NullsError, image_columns, nesting, stack_views
from dask_image_ingest.typedefs import Array, DataFrame, Dtype, PerChannel, Series

Format = Literal["numpy", "cupy", "torch"]
FORMATS = ("numpy", "cupy", "torch")

Convert = Callable[[Any], Any]


def converter(format: Format, backend: Backend) -> Convert:
    """Return a function that converts an array of the backend to ``format``.

    For torch and CuPy, arrays of strings and of times become lists.
    """
    if format == "numpy":
        return lambda array: array if isinstance(array, np.ndarray) else backend.host(array)
    try:
        if format == "cupy":
            from cupy import asarray as convert
        else:
            from torch.utils.dlpack import from_dlpack as convert
    except ImportError as error:
        raise MissingDependencyError(
            f"format={format!r} needs {format}, which is not installed: see its web page for the "
            "build that fits this machine"
        ) from error

    def converted(array: Array) -> Any:
        if array.dtype.kind in "mM":
            host = backend.host(array)
            array = pd.Series(host.ravel()).astype(object).to_numpy().reshape(host.shape)
        return array.tolist() if array.dtype.kind in "OSUV" else convert(array)

    return converted


def batch_of(
    rows: BatchRows,
    image: str | None,
    backend: Backend,
    convert: Convert,
    normalize: Normalize | None,
    channels_first: bool | None,
    shape: ImageShape | None,
) -> dict[str, Any]:
    """Build a batch: images as one array, or as a list of arrays if their shapes differ.

    ``shape`` is that of the images ``image``, as far as it is known. ``channels_first`` places the
    channels of all images, by views; None leaves them last, or as ``normalize`` does.
    """
    batch: dict[str, Any] = {}
    for name, images in rows.images.items():
        if not images:
            known = shape if name == image and shape is not None else (None, None, None)
            height, width, channels = (edge or 0 for edge in known)
            if name == image and normalize is not None:
                stacked = backend.numpy.empty((0, channels, height, width), np.float32)
            else:
                stacked = backend.numpy.empty((0, height, width, channels), np.uint8)
        elif name == image and normalize is not None:
            stacked = normalize.batch(images, backend)
        else:
            stacked = stack_views(images, backend)
        is_first = name == image and normalize is not None
        if channels_first is not None and channels_first != is_first:
            stacked = _moved_channels(stacked, channels_first, backend)
        batch[name] = _converted(stacked, convert)
    return batch | {name: _converted(values, convert) for name, values in rows.columns.items()}


def _moved_channels(images: Any, to_first: bool, backend: Backend) -> Any:
    """View of images, or a list of views, with channels before the height, or back at the end."""
    if isinstance(images, list):
        return [_moved_channels(image, to_first, backend) for image in images]
    axes = (-1, -3) if to_first else (-3, -1)
    return backend.numpy.moveaxis(images, *axes)


def _converted(values: Any, convert: Convert) -> Any:
    """Arrays in any nesting, converted; Python values unchanged."""
    if isinstance(values, list):
        return [_converted(value, convert) for value in values]
    if isinstance(values, dict):
        return {name: _converted(value, convert) for name, value in values.items()}
    return convert(values) if hasattr(values, "dtype") and values.ndim else values


class Normalize(NamedTuple):
    """Normalization (value / 255 - mean) / std, as value × scale + shift.

    Both are float32 of shape (channels,), or (1,) for all channels.
    """

    scale: np.ndarray
    shift: np.ndarray

    def batch(self, images: Sequence[Array], backend: Backend) -> Any:
        """Normalize images of one shape: float32 (n, channels, height, width)."""
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            one, other = sorted(shapes)[:2]
            raise ArgumentError(
                f"normalize= needs images of one shape, and a batch has {one} and {other}: read "
                "with size= and resize='stretch', 'crop' or 'pad'"
            )
        (shape,) = shapes
        if images[0].dtype != np.uint8:
            raise ArgumentError(
                f"normalize= is for values from 0 to 255, and the images are of {images[0].dtype}: "
                "scale the batches of iter_batches"
            )
        if len(self.scale) not in (1, shape[2]):
            raise ArgumentError(
                f"normalize= gives {len(self.scale)} means, and the images have {shape[2]} "
                "channels: pass one number, or one for each channel"
            )
        return backend.normalized(images, self.scale, self.shift)


def parse_normalize(
    normalize: tuple[PerChannel, PerChannel] | None,
) -> Normalize | None:
    """Check the argument ``normalize=`` of ``iter_batches``."""
    if normalize is None:
        return None
    try:
        mean, std = (np.atleast_1d(np.asarray(part, np.float64)) for part in normalize)
        mean, std = np.broadcast_arrays(mean, std)
        valid = mean.ndim == 1 and mean.size and np.isfinite([mean, std]).all() and (std > 0).all()
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ArgumentError(
            f"normalize={shown(normalize)}: pass (mean, std) of values from 0 to 1, each a number "
            "or one for each channel, such as ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
        )
    if mean.max() > 1 or std.max() > 1:
        scaled = tuple(tuple((part / 255).round(3).tolist()) for part in (mean, std))
        raise ArgumentError(
            f"normalize={shown(normalize)}: means and deviations are of values from 0 to 1, and "
            f"these are of values from 0 to 255, it seems: divide both by 255, {scaled}"
        )
    return Normalize((1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32))


@dataclass(frozen=True)
class BatchRows:
    """Rows of a partition that have an image in each of their image columns."""

    count: int
    images: dict[str, list[Any]]
    columns: dict[str, Any]  # arrays of all other columns; lists of rows that differ in shape

    def __len__(self) -> int:
        return self.count

    def take(self, rows: range | np.ndarray) -> BatchRows:
        """Select rows by number; of a range, columns are views too."""
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        images = {name: [arrays[row] for row in rows] for name, arrays in self.images.items()}
        columns = {
            name: [values[row] for row in rows] if isinstance(values, list) else values[index]
            for name, values in self.columns.items()
        }
        return BatchRows(len(rows), images, columns)

    def copied(self) -> BatchRows:
        """Copy the rows: a copy does not keep their partition in memory."""
        images = {name: [image.copy() for image in arrays] for name, arrays in self.images.items()}
        columns = {name: copy.deepcopy(values) for name, values in self.columns.items()}
        return BatchRows(self.count, images, columns)

    @classmethod
    def of(cls, parts: Sequence[BatchRows], backend: Backend) -> BatchRows:
        """Concatenate rows."""
        if len(parts) == 1:
            return parts[0]
        columns = {
            name: _concatenate([part.columns[name] for part in parts], backend)
            for name in parts[0].columns
        }
        images = {
            name: [image for part in parts for image in part.images[name]]
            for name in parts[0].images
        }
        return cls(sum(map(len, parts)), images, columns)

    def stacked(self, shapes: dict[str, Any], meta: DataFrame, backend: Backend) -> BatchRows:
        """The rows with one array of each column whose arrays have one shape, also without rows.

        ``shapes`` are those of columns; ``meta`` is an empty frame of the declared dtypes.
        """
        columns = dict(self.columns)
        for name, shape in shapes.items():
            arrays = columns.get(name)
            if not isinstance(arrays, list) or not isinstance(shape, tuple):
                continue
            if arrays:
                columns[name] = backend.numpy.stack(arrays)
            else:
                type_ = getattr(meta[name].dtype, "pyarrow_dtype", pa.float64())
                dtype = nesting(type_)[1].to_pandas_dtype()
                columns[name] = backend.numpy.empty((0, *shape), dtype)
        return replace(self, columns=columns)


def rows_of(
    frame: DataFrame, image: str | None, backend: Backend, meta: DataFrame
) -> tuple[BatchRows, np.ndarray]:
    """The rows of a partition that have an image in every image column, and their numbers.

    ``image`` is the first image column; None for a frame without images. ``meta`` is an empty frame
    of the declared dtypes.

    Raises
    ------
    ArgumentError
        If another column has values that its dtype can't hold, such as null integers.
    """
    # The index is not that of the user's frame, if the rows were decoded from references.
    names = image_columns(frame)
    names = list(dict.fromkeys(names if image is None else [image, *names]))
    images = {name: backend.arrays(frame[name]) for name in names}
    has_all = np.ones(len(frame), bool)
    for arrays in images.values():
        has_all &= np.array([array is not None for array in arrays], bool)
    present = np.flatnonzero(has_all)
    rows = frame[[name for name in frame.columns if name not in images]]
    if len(present) < len(frame):
        rows = rows.take(present)
        images = {name: [arrays[row] for row in present] for name, arrays in images.items()}
    columns = {name: _column(rows[name], meta[name].dtype, backend) for name in rows.columns}
    return BatchRows(len(present), images, columns), present


# A partition that is being read: a call waits for it.
PendingPartition = Callable[[], Any]

# Takes rows with images from a frame, with their numbers: `rows_of` with some of its arguments.
RowsOf = Callable[[Any], tuple[BatchRows, np.ndarray]]

# Rows that are being read: a call waits for those that have an image, and for the places of these
# among all.
PendingRows = Callable[[], tuple[BatchRows, np.ndarray]]


class HeldPartition:
    """A computed partition; its rows are taken when they are first asked for."""

    def __init__(self, pending: PendingPartition, rows_of: RowsOf) -> None:
        self._pending: PendingPartition | None = pending
        self._rows_of = rows_of

    @functools.cached_property
    def rows_and_places(self) -> tuple[BatchRows, np.ndarray]:
        """The rows that have an image, and the number of each row of all among them, else -1."""
        assert self._pending is not None
        frame, self._pending = self._pending(), None
        rows, present = self._rows_of(frame)
        places = np.full(len(frame), -1)
        places[present] = np.arange(len(present))
        return rows, places


def rows_in_order(
    parts: Sequence[tuple[HeldPartition, np.ndarray]], order: np.ndarray, backend: Backend
) -> tuple[BatchRows, np.ndarray]:
    """Rows of several partitions in an order: those with an image, and their places among all."""
    taken, has_image = [], []
    for partition, numbers in parts:
        rows, places = partition.rows_and_places
        place = places[numbers]
        has_image.append(place >= 0)
        taken.append(rows.take(place[place >= 0]))
    joined = BatchRows.of(taken, backend)
    if not len(order):
        return joined, order
    # The position of each row among all; of the joined ones among themselves.
    present = np.concatenate(has_image)
    joined_place = np.cumsum(present) - 1
    here = np.flatnonzero(present[order])
    return joined.take(joined_place[order[here]]), here


def _column(series: Series, dtype: Dtype, backend: Backend) -> Any:
    """A column in the form that its declared dtype has in each batch.

    That is an array of one dtype, or a list of rows for lists, structs and Python objects.
    """
    kind = getattr(dtype, "kind", "")
    if kind in "iub" and series.isna().any():
        raise _nulls(series, dtype)
    if series.dtype != dtype and not isinstance(dtype, pd.CategoricalDtype):
        try:
            cast = series.astype(dtype)
        except (TypeError, ValueError) as error:
            raise _undeclared(series, dtype) from error
        if kind in "iub" and (cast != series).any():
            raise _undeclared(series[cast != series], dtype)
        series = cast
    if not backend.has_rows(dtype):
        values = backend.values(series)
        if values is None:
            raise _nulls(series, dtype)
        return values
    try:
        return backend.rows(series)
    except NullsError:
        raise _nulls(series, dtype, "a list of ") from None


def _nulls(series: Series, dtype: Dtype, of: str = "") -> ArgumentError:
    name = series.name
    return ArgumentError(
        f"iter_batches: {of}column {name!r} has nulls, and {dtype} has no value for these: drop "
        f"such rows before, ddf[ddf[{name!r}].notnull()], fill them, or leave the column out with "
        "columns="
    )


def _undeclared(series: Series, dtype: Dtype) -> ArgumentError:
    name, first = series.name, series.iloc[[0]].tolist()[0]
    return ArgumentError(
        f"iter_batches: column {name!r} is declared as {dtype}, and has {shown(first)} of "
        f"{series.dtype}: convert it before, ddf.astype({{{name!r}: ...}}), or correct meta= of "
        "the function that made it"
    )


def as_pandas(column: Series) -> pd.Series:
    """A column in memory as a pandas series."""
    series: pd.Series = column if isinstance(column, pd.Series) else column.to_pandas()
    return series


def _concatenate(parts: list[Any], backend: Backend) -> Any:
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    library = np if isinstance(parts[0], np.ndarray) else backend.numpy
    return library.concatenate(parts)
