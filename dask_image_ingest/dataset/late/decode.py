"""Decode references outside of a scan: fetch the encoded images, then decode them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.late.fetch import fetch
from dask_image_ingest.dataset.scan.decode_rows import (
    ColumnDecode,
    Decoded,
    ErrorFilter,
    check_size,
    decode_first_rows,
    decode_rows,
    first_errors,
    slices_by_size,
)
from dask_image_ingest.dataset.scan.file_rows import origin_of_key
from dask_image_ingest.decode import EncodedImages, Header, Origin, Pixels
from dask_image_ingest.frames import ImageReference, as_references, backend_of

# For a null reference, such as that of an unmatched row of a merge: no image, and no error.
_NO_REFERENCE = Header(None, None, None, None, "", True)


def decode_partition(
    frame: Any,
    images: Sequence[ColumnDecode],
    keep: ErrorFilter = None,
    limit: int | None = None,
) -> Any:
    """Decode the references of a pandas or cuDF frame.

    ``images``, ``keep`` and ``limit`` are as for `Decode`.

    Raises
    ------
    PartitionTooLargeError
        Before the decode, if the images exceed what a worker can hold.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    return decode_first_rows(frame, functools.partial(_decode_frame, images), keep, limit)


def _decode_frame(images: Sequence[ColumnDecode], frame: Any) -> Decoded:
    encoded = [FetchedImages(frame, each) for each in images]
    nbytes = int(sum(each.nbytes.sum() for each in encoded if each.images.pixels))
    largest = backend_of(frame).largest_partition
    check_size(f"the {len(frame)} images of a partition", nbytes, largest)
    rows, errors = np.arange(len(frame)), []
    for each in encoded:
        decoded = each.decode(rows)
        errors.append(decoded.errors)
        frame = each.images.into(frame, decoded)
    return frame, first_errors(errors)


def decoded_meta(meta: Any, images: Sequence[ColumnDecode]) -> Any:
    """The meta of a decoded frame."""
    for each in images:
        meta = each.into(meta, Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), []))
    return meta


def reference_rows(references: pa.ChunkedArray) -> list[ImageReference | None]:
    """The reference of each row, None for null; carried bytes are views, not copies."""
    carried = [
        # Arrow's buffers have the format "b", and memoryviews copy only between equal formats.
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


def field_of(references: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """One field of an array of references; null for null references."""
    return references.flatten()[references.type.get_field_index(name)]


def references_of(frame: Any, image: Any) -> pa.ChunkedArray:
    """A column of references as an Arrow array on the host; carried bytes are not copied."""
    (column,) = backend_of(frame).to_arrow(frame[[image]]).columns
    return as_references(column)


def decode_pieces(frame: Any, images: Sequence[ColumnDecode], largest: int) -> Iterator[Any]:
    """Decode a frame in pieces of about ``largest`` bytes, encoded and decoded."""
    for rows in slices_by_size([encoded_sizes(frame, each) for each in images], largest):
        part = frame.iloc[rows]
        encoded = [FetchedImages(part, each) for each in images]
        for piece_rows in slices_by_size([each.nbytes for each in encoded], largest):
            piece = part.iloc[piece_rows]
            for each in encoded:
                decoded = each.decode(np.arange(len(part))[piece_rows])
                piece = each.images.into(piece, decoded)
            yield piece


def encoded_sizes(frame: Any, images: ColumnDecode) -> np.ndarray:
    """Encoded bytes of each row's image, 0 if unknown; shape (n,), int64."""
    nbytes = field_of(references_of(frame, images.image), "nbytes")
    return nbytes.fill_null(0).to_numpy()


class FetchedImages:
    """The encoded images of a frame's references, in memory; repeated references share one.

    ``nbytes`` are the decoded bytes of each row's image; shape (n,), int64.
    """

    def __init__(self, frame: Any, images: ColumnDecode) -> None:
        self.images = images
        self._backend = backend_of(frame)
        rows = reference_rows(references_of(frame, images.image))
        # A merge may repeat a reference, or leave it null.
        distinct: dict[ImageReference, int] = {}
        indices = [-1 if row is None else distinct.setdefault(row, len(distinct)) for row in rows]
        self._references = list(distinct)
        #: Row → position in ``_headers`` and ``_encoded``; null references share the last one.
        self._indices = np.array(indices, np.int64)
        self._indices[self._indices < 0] = len(distinct)
        self._headers, self._encoded = fetch(
            self._references, images.decoding, images.storage_options
        )
        self._headers.append(_NO_REFERENCE)
        self._encoded.append(None)
        sizes = [images.decoding.nbytes(header) for header in self._headers]
        self.nbytes = np.array(sizes, np.int64)[self._indices]

    def decode(self, rows: np.ndarray) -> Pixels:
        """Decode the images of the given rows, a repeated one once."""
        indices, first_rows = np.unique(self._indices[rows], return_index=True)
        in_row_order = indices[np.argsort(first_rows)]
        decoded = self._decode_distinct(in_row_order.tolist())
        if len(in_row_order) == len(rows):
            return decoded
        positions = np.zeros(len(self._headers), np.int64)
        positions[in_row_order] = np.arange(len(in_row_order))
        return decoded.take(positions[self._indices[rows]])

    def _decode_distinct(self, indices: list[int]) -> Pixels:
        def read(row: int) -> Any:
            return self._encoded[indices[row]]

        def origin(row: int) -> Origin:
            index = indices[row]
            return _origin(self._references[index] if index < len(self._references) else None)

        encoded = EncodedImages([self._headers[index] for index in indices], read, origin)
        return decode_rows(encoded, self.images, self._backend, what=f"{len(encoded)} images")


def _origin(reference: ImageReference | None) -> Origin:
    """The identity of an image, for errors and for the seed of random transforms.

    All images of a sample have the same seed, so it depends on the sample alone: shard and number,
    or else the key. Within a shard the key is not used, since it may repeat.
    """
    if reference is None:
        return Origin("", 0, "no image")
    url, number, key = reference.url or "", reference.number, reference.key
    if number is None and (reference.bytes is not None or reference.offset == 0):
        # An image file, or encoded bytes without a shard.
        if key is not None:
            return origin_of_key(key, url)
        if reference.bytes is not None:
            where = f" of {url}" if url else ""
            name = f"the image of {len(reference.bytes):,} bytes{where}"
            return Origin("", zlib.crc32(reference.bytes), name)
    offset = reference.offset or 0
    name = f"the image at byte {offset}" if key is None else f"sample {key!r}"
    return Origin(url, offset if number is None else number, name)
