"""Fetch the encoded images of references, or only their headers, shard by shard; decode them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.scan.decode_rows import (
    ColumnDecode,
    ErrorFilter,
    check_size,
    decode_first_rows,
    decode_rows,
    kept_rows,
    slices_by_size,
)
from dask_image_ingest.dataset.scan.file_rows import for_each, missing_file, origin_of_key
from dask_image_ingest.dataset.scan.rows import NO_BYTES, NO_MEMBER
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Header, Origin, Pixels
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.frames import ImageReference, as_references, backend_of
from dask_image_ingest.storage import (
    ByteReader,
    Shard,
    open_file,
    open_shard,
)
from dask_image_ingest.tar import (
    BLOCK,
    HEAD,
    Sample,
    ShardIndex,
    duplicate_error,
    index_tar,
    open_member,
    plain_name,
    read_member,
    too_large_error,
)

# Bytes to fetch of a remote shard before ranges of it: enough to tell whether it is compressed.
_HEAD_SIZE = 512

#: Fetches encoded images with these ``storage_options``: as `fetch_encoded`.
Fetch: TypeAlias = Callable[
    [Sequence[ImageReference], dict[str, Any] | None], list[bytes | memoryview | Header]
]

# Reads an image from an open shard, given its offset and size.
_Read = Callable[[ByteReader, tuple[int, int]], bytes | memoryview | Header]


def _no_image(why: str) -> Header:
    return Header(None, None, None, None, f"missing: {why}", True)


# Without sparse members: an image with an offset is stored in one piece.
_EMPTY_INDEX = ShardIndex()

_NO_LOCATION = _no_image("the row points to no image bytes")
_OUTSIDE = _no_image("the row points beyond the end of its shard")
_NO_KEY = _no_image("the row has no offset of its image, and no __key__ to find its sample by")


def fetch(
    references: Sequence[ImageReference],
    decoding: DecodeSpec,
    storage_options: dict[str, Any] | None,
    fetch_bytes: Fetch | None = None,
) -> tuple[list[Header], list[bytes | memoryview | None]]:
    """Fetch encoded images; returns the header and the bytes of each.

    For an image that can't be found the header has an error, and the bytes are None.

    Raises
    ------
    ShardError, ShardNotFoundError
        If a shard can't be read, or is of another version than a reference names.
    """
    fetched = (fetch_bytes or fetch_encoded)(references, storage_options)
    encoded = [None if isinstance(data, Header) else data for data in fetched]
    headers = [data if isinstance(data, Header) else decoding.read_header(data) for data in fetched]
    return headers, encoded


def fetch_headers(
    references: Sequence[ImageReference],
    decoding: DecodeSpec,
    storage_options: dict[str, Any] | None,
) -> list[Header]:
    """Read the header of each image, and only the bytes that it needs.

    Raises
    ------
    ShardError, ShardNotFoundError
        As `fetch`.
    """

    def read(content: ByteReader, span: tuple[int, int]) -> Header:
        return decoding.read_header(open_member(content, _EMPTY_INDEX, span))

    fetched = fetch_encoded(references, storage_options, read, HEAD)
    return [data if isinstance(data, Header) else decoding.read_header(data) for data in fetched]


def _copied(content: ByteReader, span: tuple[int, int]) -> bytes:
    offset, size = span
    # A copy, so that the bytes are read here, and not when a view of them is decoded.
    return bytes(content[offset : offset + size])


def fetch_encoded(
    references: Sequence[ImageReference],
    storage_options: dict[str, Any] | None,
    read: _Read = _copied,
    longest: int | None = None,
    gap: int | None = None,
) -> list[bytes | memoryview | Header]:
    """Fetch encoded images, or what ``read`` makes of them; opens each shard once.

    For an image that can't be found, a header with an error. ``longest`` limits how many bytes of
    each image are prefetched; None for all. ``gap`` is as for ``ByteReader.prefetch``.

    Raises
    ------
    ShardError, ShardNotFoundError
        As `fetch`.
    """
    results: list[bytes | memoryview | Header] = [_NO_LOCATION] * len(references)
    by_shard: dict[str, list[int]] = {}
    for row, each in enumerate(references):
        if each.bytes is not None:
            results[row] = each.bytes
        elif each.url and each.nbytes is not None:
            by_shard.setdefault(each.url, []).append(row)
        elif each.url and each.offset is None:
            results[row] = NO_MEMBER
        elif not each.url:
            results[row] = NO_BYTES

    def read_shard(url: str) -> None:
        by_version: dict[Shard | None, list[int]] = {}
        for row in by_shard[url]:
            by_version.setdefault(_listed(references[row]), []).append(row)
        for listed, version_rows in by_version.items():
            of_version = {row: references[row] for row in version_rows}
            if not all(map(_is_file, of_version.values())):
                scans = any(reference.place is None for reference in of_version.values())
                head_size = None if scans else _HEAD_SIZE
                with open_shard(url, storage_options, listed, head_size) as content:
                    _read(content, url, of_version, results, read, longest, gap)
                continue
            try:
                with open_file(url, storage_options, listed) as content:
                    _read(content, url, of_version, results, read, longest, gap)
            except (ShardError, ShardNotFoundError) as error:
                for row in version_rows:
                    results[row] = missing_file(url, error)

    for_each(read_shard, by_shard, by_shard)
    return results


def _is_file(reference: ImageReference) -> bool:
    """True for an image file: no member of a tar begins at its first byte."""
    return reference.offset == 0 and reference.number is None


def _listed(reference: ImageReference) -> Shard | None:
    """The shard with the version that the reference names; None if it names none."""
    url, size, version = reference.url, reference.shard_size, reference.version
    return None if url is None or size is None or version is None else Shard(url, size, version)


def _read(
    content: ByteReader,
    url: str,
    references: Mapping[int, ImageReference],
    results: list[bytes | memoryview | Header],
    read: _Read,
    longest: int | None,
    gap: int | None,
) -> None:
    """Read the images of an open shard in the order of their offsets.

    The header before each, which is fetched with it, must not be that of another sample: an index
    of another shard with the same size and time has such references.
    """
    spans = {row: place for row, each in references.items() if (place := each.place) is not None}
    valid = {row: span for row, span in spans.items() if _is_inside(content, *span)}
    ranges = (
        (max(0, start - BLOCK), start + (size if longest is None else min(size, longest)))
        for start, size in valid.values()
    )
    content.prefetch(sorted(ranges), gap)
    samples: _Samples | None = None
    for row in sorted(spans, key=spans.__getitem__):
        if row in valid and not _follows_own_header(content, references[row]):
            samples = samples or _Samples(content, url)
            samples.check_place(references[row])
        results[row] = read(content, spans[row]) if row in valid else _OUTSIDE
    if len(spans) < len(references):
        samples = samples or _Samples(content, url)
        for row in references.keys() - spans.keys():
            results[row] = samples.image(references[row])


def _follows_own_header(content: ByteReader, reference: ImageReference) -> bool:
    """False if the bytes before an image are the header of a member of another sample.

    Also for a hard link, which lies where another sample does, and for some names in PAX headers.
    """
    start, key = reference.offset or 0, reference.key
    if key is None or start < BLOCK or reference.number is None:
        return True
    name, begin = plain_name(bytes(content[start - BLOCK : start])), f"{key}."
    # A long name is cut, and a PAX header may have replaced what is not ASCII.
    return name.startswith(begin) or begin.startswith(name) or not key.isascii()


def _is_inside(content: ByteReader, offset: int, size: int) -> bool:
    return offset >= 0 and size >= 0 and offset + size <= len(content)


class _Samples:
    """Finds images without an offset (sparse or duplicate members) by their sample and size."""

    def __init__(self, content: ByteReader, url: str) -> None:
        self._content = content
        self._url = url
        self._index = index_tar(content, url)
        self._by_key: dict[str, list[Sample]] = {}
        for sample in self._index.samples:
            self._by_key.setdefault(sample.key, []).append(sample)

    def check_place(self, reference: ImageReference) -> None:
        """Raise if the sample has no member where its reference says.

        Raises
        ------
        ShardError
        """
        samples = self._by_key.get(reference.key or "", ())
        if all(reference.place not in sample.members.values() for sample in samples):
            raise ShardError(
                f"{self._url} has no image of {reference.key!r} at byte {reference.offset}: the "
                "row comes from an index or a reference of another shard with the same size and "
                "time. Write the index again, with write_index(overwrite=True)"
            )

    def image(self, reference: ImageReference) -> bytes | memoryview | Header:
        """The encoded image, or a header that says why there is none."""
        matches = [
            (sample, span)
            for sample in self._samples(reference)
            for span in sample.members.values()
            if span[1] == reference.nbytes and (sample.duplicates or span[0] in self._index.sparse)
        ]
        if not matches or any(sample is not matches[0][0] for sample, _ in matches):
            return _NO_LOCATION if reference.key else _NO_KEY
        sample, span = matches[0]
        error = too_large_error(self._index, span)
        if sample.duplicates or error:
            return Header(None, None, None, None, error or duplicate_error(sample.duplicates), True)
        return bytes(read_member(self._content, self._index, span))

    def _samples(self, reference: ImageReference) -> Sequence[Sample]:
        samples, number = self._index.samples, reference.number
        if number is None:
            return self._by_key.get(reference.key or "", ())
        return samples[number : number + 1]


# For a null reference, such as that of an unmatched row of a merge: no image, and no error.
_NO_REFERENCE = Header(None, None, None, None, "", True)


def decode_partition(
    frame: Any,
    images: Sequence[ColumnDecode],
    only: ErrorFilter = None,
    limit: int | None = None,
    draws: np.ndarray | None = None,
    fetch_bytes: Fetch | None = None,
) -> Any:
    """Decode the references of a pandas or cuDF frame.

    ``images``, ``only`` and ``limit`` are as for `Decode`; ``draws`` (only without a limit) and
    ``fetch_bytes`` as for `FetchedImages`.

    Raises
    ------
    PartitionTooLargeError
        Before the decode, if the images exceed what a worker can hold.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    decode = functools.partial(_decode_frame, images, draws, fetch_bytes, only)
    return decode_first_rows(frame, decode, limit)


def _decode_frame(
    images: Sequence[ColumnDecode],
    draws: np.ndarray | None,
    fetch_bytes: Fetch | None,
    only: ErrorFilter,
    frame: Any,
) -> Any:
    encoded = [FetchedImages(frame, each, draws, fetch_bytes) for each in images]
    nbytes = int(sum(each.nbytes.sum() for each in encoded if each.images.pixels))
    largest = backend_of(frame).largest_partition
    check_size(f"the {len(frame)} images of a partition", nbytes, largest)
    decoded = [each.decode(np.arange(len(frame))) for each in encoded]
    kept = kept_rows(decoded, only)
    if kept is not None:
        frame, decoded = frame.iloc[kept], [pixels.take(kept) for pixels in decoded]
    for each, pixels in zip(images, decoded, strict=True):
        frame = each.into(frame, pixels)
    return frame


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

    Parameters
    ----------
    frame, images
        Rows with a column of references, and its decode.
    draws : array of uint64, shape (n,), or None
        Which random numbers each row gets (`Origin.draw`); None for those of a read. All image
        columns of a row get the same.
    fetch_bytes
        Fetches the images; None for `fetch_encoded`.

    Attributes
    ----------
    nbytes : array of int64, shape (n,)
        Decoded bytes of each row's image.
    """

    def __init__(
        self,
        frame: Any,
        images: ColumnDecode,
        draws: np.ndarray | None = None,
        fetch_bytes: Fetch | None = None,
    ) -> None:
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
        #: Row → a number that only rows with the same pixels share.
        self._pictures = self._indices
        self._draws = draws if draws is not None and images.decoding.is_random else None
        if self._draws is not None:
            pairs = np.rec.fromarrays([self._indices, self._draws])
            self._pictures = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        self._headers, self._encoded = fetch(
            self._references, images.decoding, images.storage_options, fetch_bytes
        )
        self._headers.append(_NO_REFERENCE)
        self._encoded.append(None)
        sizes = [images.decoding.nbytes(header) for header in self._headers]
        self.nbytes = np.array(sizes, np.int64)[self._indices]

    def decode(self, rows: np.ndarray) -> Pixels:
        """Decode the images of the given rows, a repeated one once unless its draws differ."""
        _, firsts, inverse = np.unique(self._pictures[rows], return_index=True, return_inverse=True)
        in_row_order = np.argsort(firsts)
        decoded = self._decode_distinct(rows[firsts[in_row_order]].tolist())
        if len(firsts) == len(rows):
            return decoded
        positions = np.empty(len(firsts), np.int64)
        positions[in_row_order] = np.arange(len(firsts))
        return decoded.take(positions[inverse.reshape(-1)])

    def _decode_distinct(self, rows: list[int]) -> Pixels:
        indices = self._indices[rows].tolist()

        def read(position: int) -> Any:
            return self._encoded[indices[position]]

        def origin(position: int) -> Origin:
            index = indices[position]
            origin = _origin(self._references[index] if index < len(self._references) else None)
            if self._draws is None:
                return origin
            return origin._replace(draw=int(self._draws[rows[position]]))

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
