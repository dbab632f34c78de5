"""References → pixels: the one decode of rows, wherever they are when their pixels are needed."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.late.fetch import fetch
from dask_image_ingest.dataset.scan.decode_rows import (
    Decoded,
    ImageDecode,
    Kept,
    check_size,
    cuts,
    decode_rows,
    first_errors,
    first_rows,
)
from dask_image_ingest.dataset.schema.columns import POINTER_COLUMNS
from dask_image_ingest.decode import Header, Origin, Pixels
from dask_image_ingest.frames import ImageReference, as_references, backend_of

# A merge that found nothing on one side: no image, and nothing wrong with it.
_NOTHING = Header(None, None, None, None, "", True)


def decode_partition(
    frame: Any,
    images: Sequence[ImageDecode],
    keep: Kept = None,
    limit: int | None = None,
    headers: Sequence[str] = (),
) -> Any:
    """Decode the images that the rows of a pandas or cuDF frame refer to.

    ``keep`` and ``limit`` say which rows are left by the errors of their images. ``headers``
    are columns of the frame that get what the headers of its only images tell.

    Raises
    ------
    PartitionTooLargeError
        Where they would decode to more than a worker can hold; before they do.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    return first_rows(frame, functools.partial(_decoded, images, headers), keep, limit)


def _decoded(images: Sequence[ImageDecode], headers: Sequence[str], frame: Any) -> Decoded:
    encoded = [EncodedImages(frame, each) for each in images]
    nbytes = int(sum(each.nbytes.sum() for each in encoded if each.images.pixels))
    largest = backend_of(frame).largest_partition
    check_size(f"the {len(frame)} images of a partition", nbytes, largest)
    rows, errors = np.arange(len(frame)), []
    for each in encoded:
        decoded = each.decode(rows)
        errors.append(decoded.errors)
        frame = each.images.into(frame, decoded)
        frame = with_headers(frame, headers, each.headers, each.sizes)
    return frame, first_errors(errors)


def decoded_meta(meta: Any, images: Sequence[ImageDecode]) -> Any:
    """The empty frame that a decode makes of one."""
    for each in images:
        meta = each.into(meta, Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), []))
    return meta


def reference_rows(references: pa.ChunkedArray) -> list[ImageReference | None]:
    """The reference of each row; the bytes that it carries are views of the column's memory."""
    carried = [
        # Arrow's are signed; a memoryview is copied only to one of its own format.
        None if not value.is_valid else memoryview(value.as_buffer()).cast("B")
        for value in field_of(references, "bytes")
    ]
    others = [field.name for field in references.type if field.name != "bytes"]
    fields = {name: field_of(references, name).to_pylist() for name in others}
    fields["bytes"] = carried
    return [
        ImageReference(**dict(zip(fields, values, strict=True))) if valid else None
        for valid, *values in zip(references.is_valid().to_pylist(), *fields.values(), strict=True)
    ]


def with_headers(
    frame: Any,
    columns: Sequence[str],
    headers: Sequence[Header],
    sizes: Sequence[int | None],
) -> Any:
    """A frame with columns of what the header of each row's image tells, and of its size."""
    backend = backend_of(frame)
    for name in columns:
        told = sizes if name == "nbytes" else [getattr(header, name) for header in headers]
        rows = [row for row, value in enumerate(told) if value is not None]
        type_ = POINTER_COLUMNS[name]
        values: Any = [told[row] for row in rows]
        if pa.types.is_integer(type_):
            values = np.array(values, type_.to_pandas_dtype())
        frame = backend.with_columns(frame, {name: (values, type_)}, rows)
    return frame


def field_of(references: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """One field of references, null where there is none."""
    return references.flatten()[references.type.get_field_index(name)]


def references_of(frame: Any, image: Any) -> pa.ChunkedArray:
    """The references in a column of a pandas or cuDF frame, on the host; their bytes not copied."""
    (column,) = backend_of(frame).to_arrow(frame[[image]]).columns
    return as_references(column)


def decode_pieces(frame: Any, images: Sequence[ImageDecode], largest: int) -> Iterator[Any]:
    """The same rows, decoded in pieces of about ``largest`` bytes of pixels at most.

    Nor are there more bytes of encoded images in memory at a time.
    """
    for rows in cuts([encoded_sizes(frame, each) for each in images], largest):
        part = frame.iloc[rows]
        encoded = [EncodedImages(part, each) for each in images]
        for places in cuts([each.nbytes for each in encoded], largest):
            piece = part.iloc[places]
            for each in encoded:
                decoded = each.decode(np.arange(len(part))[places])
                piece = each.images.into(piece, decoded)
            yield piece


def encoded_sizes(frame: Any, images: ImageDecode) -> np.ndarray:
    """The bytes of each encoded image that the rows of a frame refer to; 0 where none are known."""
    nbytes = field_of(references_of(frame, images.image), "nbytes")
    return nbytes.fill_null(0).to_numpy()


class EncodedImages:
    """The encoded images that the rows of a frame refer to, in memory; each of them once."""

    def __init__(self, frame: Any, images: ImageDecode) -> None:
        self.images = images
        self._backend = backend_of(frame)
        rows = reference_rows(references_of(frame, images.image))
        # A merge may have many rows of one image, and rows of none.
        known: dict[ImageReference, int] = {}
        which = [-1 if row is None else known.setdefault(row, len(known)) for row in rows]
        self._references = list(known)
        self._which = np.array(which, np.int64)
        self._which[self._which < 0] = len(known)
        self._headers, self._encoded = fetch(
            self._references, images.decoding, images.storage_options
        )
        self._headers.append(_NOTHING)
        self._encoded.append(None)
        sizes = [images.decoding.nbytes(header) for header in self._headers]
        self.nbytes = np.array(sizes, np.int64)[self._which]

    @property
    def headers(self) -> list[Header]:
        """The header of each row's image."""
        return [self._headers[one] for one in self._which.tolist()]

    @property
    def sizes(self) -> list[int | None]:
        """The bytes of each row's encoded image; None where they are not known."""
        sizes = [*(each.nbytes for each in self._references), None]
        return [sizes[one] for one in self._which.tolist()]

    def decode(self, rows: np.ndarray) -> Pixels:
        """The images of the given rows."""
        which, places = np.unique(self._which[rows], return_index=True)
        order = which[np.argsort(places)]
        made = self._decode(order)
        if len(order) == len(rows):
            return made
        position = np.zeros(len(self._headers), np.int64)
        position[order] = np.arange(len(order))
        return made.take(position[self._which[rows]])

    def _decode(self, order: np.ndarray) -> Pixels:
        wanted = order.tolist()
        headers = [self._headers[one] for one in wanted]

        def image_bytes(row: int) -> Any:
            return self._encoded[wanted[row]]

        def origin(row: int) -> Origin:
            one = wanted[row]
            return _origin(self._references[one] if one < len(self._references) else None)

        return decode_rows(
            headers,
            image_bytes,
            origin,
            self.images.decoding,
            self.images.errors,
            self._backend,
            what=f"{len(headers)} images",
            pixels=self.images.pixels,
        )


def _origin(reference: ImageReference | None) -> Origin:
    """The identity of an image for its errors and random numbers.

    All images of a sample have the same numbers: they share the place of the sample (shard and
    number), or else its key. Keys repeat in shards, so there they do not count.
    """
    if reference is None:
        return Origin("", 0, "no image")
    url, number, key = reference.url or "", reference.number, reference.key
    if number is None and (reference.bytes is not None or reference.offset == 0):
        # A file of its own, or bytes of no shard.
        where = f" of {url}" if url else ""
        if key is not None:
            return Origin("", _digest(key), f"sample {key!r}{where}")
        if reference.bytes is not None:
            told = f"the image of {len(reference.bytes):,} bytes{where}"
            return Origin("", zlib.crc32(reference.bytes), told)
    offset = reference.offset or 0
    name = f"the image at byte {offset}" if key is None else f"sample {key!r}"
    return Origin(url, offset if number is None else number, name)


def _digest(key: str) -> int:
    data = key.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
