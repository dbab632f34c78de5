"""Fetch the encoded images of references, or only their headers, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dask_image_ingest.dataset.scan.file_rows import for_each, missing_file
from dask_image_ingest.dataset.scan.rows import NO_BYTES, NO_MEMBER
from dask_image_ingest.decode import DecodeSpec, Header, read_header
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.frames import ImageReference
from dask_image_ingest.storage import (
    ByteReader,
    Shard,
    open_file,
    open_shard,
)
from dask_image_ingest.tar import (
    HEAD,
    Sample,
    ShardIndex,
    duplicate_error,
    index_tar,
    open_member,
    read_member,
    too_large_error,
)

# Reads an image from an open shard, given its offset and size.
_Read = Callable[[ByteReader, tuple[int, int]], bytes | memoryview | Header]


def _no_image(why: str) -> Header:
    return Header(None, None, None, None, f"missing: {why}", True)


# Without sparse members: an image with an offset is stored in one piece.
_EMPTY_INDEX = ShardIndex()

_NO_BYTES = _no_image("the row points to no image bytes")
_OUTSIDE = _no_image("the row points beyond the end of its shard")
_NO_KEY = _no_image("the row has no offset of its image, and no __key__ to find its sample by")


def fetch(
    references: Sequence[ImageReference],
    decoding: DecodeSpec,
    storage_options: dict[str, Any] | None,
) -> tuple[list[Header], list[bytes | memoryview | None]]:
    """Fetch encoded images; returns the header and the bytes of each.

    For an image that can't be found the header has an error, and the bytes are None.

    Raises
    ------
    ShardError, ShardNotFoundError
        If a shard can't be read, or is of another version than a reference names.
    """
    fetched = fetch_encoded(references, storage_options)
    encoded = [None if isinstance(data, Header) else data for data in fetched]
    headers = [
        data
        if isinstance(data, Header)
        else decoding.validated(read_header(data, decoding.max_pixels))
        for data in fetched
    ]
    return headers, encoded


def fetch_encoded(
    references: Sequence[ImageReference], storage_options: dict[str, Any] | None
) -> list[bytes | memoryview | Header]:
    """Fetch encoded images; a header with an error for each that can't be found.

    Raises
    ------
    ShardError, ShardNotFoundError
        As `fetch`.
    """
    return _visit(references, storage_options, _copied, None)


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

    def header_of(image: Any) -> Header:
        return decoding.validated(read_header(image, decoding.max_pixels))

    def read(content: ByteReader, span: tuple[int, int]) -> Header:
        return header_of(open_member(content, _EMPTY_INDEX, span))

    fetched = _visit(references, storage_options, read, HEAD)
    return [data if isinstance(data, Header) else header_of(data) for data in fetched]


def _copied(content: ByteReader, span: tuple[int, int]) -> bytes:
    offset, size = span
    # A copy, so that the bytes are read here, and not when a view of them is decoded.
    return bytes(content[offset : offset + size])


def _visit(
    references: Sequence[ImageReference],
    storage_options: dict[str, Any] | None,
    read: _Read,
    longest: int | None,
) -> list[bytes | memoryview | Header]:
    """Open each shard once and apply ``read`` to its images.

    ``longest`` limits how many bytes of each image are prefetched; None for all.
    """
    results: list[bytes | memoryview | Header] = [_NO_BYTES] * len(references)
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
                with open_shard(url, storage_options, listed) as content:
                    _read(content, url, of_version, results, read, longest)
                continue
            try:
                with open_file(url, storage_options, listed) as content:
                    _read(content, url, of_version, results, read, longest)
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
) -> None:
    """Read the images of an open shard in the order of their offsets."""
    spans = {row: place for row, each in references.items() if (place := each.place) is not None}
    valid = {row: span for row, span in spans.items() if _is_inside(content, *span)}
    ranges = (
        (start, start + (size if longest is None else min(size, longest)))
        for start, size in valid.values()
    )
    content.prefetch(sorted(ranges))
    for row in sorted(spans, key=spans.__getitem__):
        results[row] = read(content, spans[row]) if row in valid else _OUTSIDE
    if len(spans) < len(references):
        samples = _Samples(content, url)
        for row in references.keys() - spans.keys():
            results[row] = samples.image(references[row])


def _is_inside(content: ByteReader, offset: int, size: int) -> bool:
    return offset >= 0 and size >= 0 and offset + size <= len(content)


class _Samples:
    """Finds images without an offset (sparse or duplicate members) by their sample and size."""

    def __init__(self, content: ByteReader, url: str) -> None:
        self._content = content
        self._index = index_tar(content, url)
        self._by_key: dict[str, list[Sample]] = {}
        for sample in self._index.samples:
            self._by_key.setdefault(sample.key, []).append(sample)

    def image(self, reference: ImageReference) -> bytes | memoryview | Header:
        """The encoded image, or a header that says why there is none."""
        matches = [
            (sample, span)
            for sample in self._samples(reference)
            for span in sample.members.values()
            if span[1] == reference.nbytes and (sample.duplicates or span[0] in self._index.sparse)
        ]
        if not matches or any(sample is not matches[0][0] for sample, _ in matches):
            return _NO_BYTES if reference.key else _NO_KEY
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
