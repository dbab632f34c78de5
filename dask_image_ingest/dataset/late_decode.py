"""``decode_images``: pixels for rows that were filtered, joined or shuffled without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_choice, check_frame, check_storage_options
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.every_row import EveryRow
from dask_image_ingest.dataset.options import ErrorPolicy
from dask_image_ingest.dataset.partition import check_size
from dask_image_ingest.dataset.pointers import POINTER, checked_pointers, read_encoded
from dask_image_ingest.dataset.warning import logger
from dask_image_ingest.decode import (
    MAX_PIXELS,
    Decoding,
    Header,
    Origin,
    Pixels,
    decode,
    make_decoding,
    read_header,
)
from dask_image_ingest.errors import ArgumentError, ImageDecodeError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.storage import with_permission

_MADE = frozenset({"image", "error"})


def decode_images(
    frame: Any,
    *,
    size: int | tuple[int, int] | None = None,
    resize: Literal["stretch", "crop", "pad", "shorter", "longer"] = "stretch",
    transform: Callable[..., Any] | None = None,
    mode: Literal["RGB", "L"] = "RGB",
    errors: ErrorPolicy = "null",
    max_pixels: int | None = MAX_PIXELS,
    allow_pipes: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """Add pixels to a frame whose rows still point to their encoded images.

    Ask the metadata first (filter, join, sort, sample, shuffle: no image is decoded for that), then
    decode what is left. Only the bytes of these images are read, shard by shard, in the order in
    which they lie there. A shard that was replaced since is not noticed, for the columns do not say
    which version they are of: its rows get what lies at their places now.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__url__``, ``offset`` and ``nbytes`` of
        :func:`read_webdataset_images`.
    size, resize, transform, mode, errors, max_pixels, allow_pipes, storage_options
        As for :func:`read_webdataset_images`.

    Returns
    -------
    dataframe
        ``frame`` with the columns ``image`` and ``error``, which replace those it had. Lazy if
        ``frame`` is: columns and filters asked of it later are pushed below the decode.

    Raises
    ------
    ArgumentError
        If a column is missing, or arguments contradict each other.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    PartitionTooLargeError
        Where the images of a partition would decode to more than it can hold, before they do.

    Examples
    --------
    >>> table = read_webdataset_images("train-{000..003}.tar").drop(columns=["image", "error"])
    >>> cats = table[table.txt.str.contains("cat")]
    >>> decode_images(cats, size=224).images.stack().compute().shape
    (4, 224, 224, 3)
    """
    lazy = isinstance(frame, FrameBase)
    meta = frame._meta if lazy else frame
    check_frame(meta)
    missing = [name for name in POINTER if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}: decode_images needs "
            f"{', '.join(POINTER)}, which say where each image is"
        )
    _pointers(meta.iloc[:0])
    check_choice("errors", errors, ("null", "raise", "drop"))
    check_storage_options(storage_options)
    storage_options = with_permission(storage_options, allow_pipes)
    decoding = make_decoding(
        device=backend_of(meta).device,
        size=size,
        resize=resize,
        mode=mode,
        transform=transform,
        max_pixels=max_pixels,
    )
    if not lazy:
        return _decode_and_report(frame, decoding, errors, storage_options)
    kind = DecodeOrDrop if errors == "drop" else DecodeImages
    return new_collection(kind(frame.expr, decoding, errors, storage_options))


def decode_frame(
    frame: Any, decoding: Decoding, storage_options: dict[str, Any] | None = None
) -> Any:
    """Decode the images that one pandas or cuDF frame points to."""
    backend = backend_of(frame)
    pointers = _pointers(frame)
    encoded = read_encoded(pointers, storage_options)
    headers = [
        data
        if isinstance(data, Header)
        else decoding.judged(read_header(data, decoding.max_pixels))
        for data in encoded
    ]
    nbytes = sum(map(decoding.nbytes, headers))
    check_size(f"the {len(headers)} images of a partition", nbytes, backend.largest_partition)
    buffer = backend.pixel_buffer(nbytes)
    pixels = decode(headers, encoded.__getitem__, decoding, buffer, partial(_origin, pointers))
    return backend.with_images(frame, pixels)


def _pointers(frame: Any) -> pa.Table:
    names = [name for name in (*POINTER, "__key__") if name in frame.columns]
    try:
        table = backend_of(frame).to_arrow(frame[names])
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ArgumentError(
            f"the columns {', '.join(names)} of the frame are not those of read_webdataset_images: "
            f"{error}"
        ) from error
    return checked_pointers(table)


def _origin(pointers: pa.Table, row: int) -> Origin:
    told = {name: pointers.column(name)[row].as_py() for name in pointers.column_names}
    url, offset = told["__url__"], told["offset"]
    key = told.get("__key__")
    name = f"the image at byte {offset}" if key is None else f"sample {key!r}"
    return Origin(url or "", offset or 0, name)


def _decode_and_report(
    frame: Any, decoding: Decoding, errors: ErrorPolicy, storage_options: dict[str, Any] | None
) -> Any:
    """Decode a partition, and say how many of its images are bad."""
    decoded = decode_frame(frame, decoding, storage_options)
    told = backend_of(frame).to_arrow(decoded[["__url__", "offset", "error"]])
    bad = told.filter(pc.field("error").is_valid())
    if len(bad):
        url, offset, error = (column[0].as_py() for column in bad.columns)
        first = f"{url}: the image at byte {offset} can't be decoded: {error}"
        if errors == "raise":
            raise ImageDecodeError(
                f"{first}. Pass errors='null' to get it as a row without an image"
            )
        logger.warning("%d of %d images are bad; %s", len(bad), len(frame), first)
    return decoded[decoded["error"].isna()] if errors == "drop" else decoded


class LateDecode(AddsColumns):
    """Late decode of a lazy frame; what needs no pixels goes below it."""

    _parameters: ClassVar = ["frame", "decoding", "errors", "storage_options"]
    operation = staticmethod(_decode_and_report)
    added = _MADE

    @functools.cached_property
    def _meta(self) -> Any:
        nothing = Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), [])
        return backend_of(self.frame._meta).with_images(self.frame._meta, nothing)

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if self._is_length_preserving and not wanted & _MADE:
            return type(parent)(self.frame, *parent.operands[1:])
        wanted = wanted | {*POINTER, "__key__"}
        needed = [name for name in self.frame.columns if name in wanted - _MADE]
        if needed == self.frame.columns:
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])


class DecodeImages(LateDecode, EveryRow):
    """A late decode that keeps every row."""


class DecodeOrDrop(LateDecode):
    """A late decode that drops the rows of bad images.

    A filter of its result would do as well, but dask joins it with those that follow, and then none
    of them goes below the decode.
    """

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        # Whatever counts or adds up rows has to count those that are left.
        return super()._filter_passthrough_available(parent, dependents) and row_by_row(
            parent.predicate, self
        )


# What raises for no row, whatever is in it, as astype("int64") does of a null.
_RAISE_FOR_NO_ROW = (
    *(dx.EQ, dx.NE, dx.LT, dx.LE, dx.GT, dx.GE),
    *(dx.And, dx.Or, dx.XOr, dx.Invert),
    *(dx.IsNa, dx.NotNull, dx.Isin, dx.Projection),
)


def row_by_row(predicate: dx.Expr, frame: dx.Expr) -> bool:
    """Whether a predicate can be asked of more rows of ``frame`` than there are in the end.

    What it says of a row must depend on that row alone, and it must not raise for the others. A
    mask of another frame may say nothing of them.
    """
    if predicate._name == frame._name:
        return True
    if predicate.ndim == 0 and all(node._name != frame._name for node in predicate.walk()):
        return True
    return isinstance(predicate, _RAISE_FOR_NO_ROW) and all(
        row_by_row(part, frame) for part in predicate.dependencies()
    )


__all__ = ["LateDecode", "decode_images"]
