"""References → the encoded images that they refer to, or their headers, fetched shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dask_image_ingest.dataset.scan.rows import NO_MEMBER
from dask_image_ingest.decode import DecodeSpec, Header, read_header
from dask_image_ingest.frames import ImageReference
from dask_image_ingest.storage import (
    ByteReader,
    Shard,
    is_pipe,
    local_path,
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

# What is made of an image that is a range of an open shard: its offset and size.
_Read = Callable[[ByteReader, tuple[int, int]], bytes | memoryview | Header]

# Shards whose rows are fetched at the same time.
_REMOTE_AT_ONCE = 8


def _no_image(why: str) -> Header:
    return Header(None, None, None, None, f"missing: {why}", True)


# Of whatever an image is a range, the range is the image.
_NOTHING_SPARSE = ShardIndex()

_NO_POINTER = _no_image("the row points to no image bytes")
_OUTSIDE = _no_image("the row points beyond the end of its shard")
_NO_KEY = _no_image("the row tells no place of its image; one with its __key__ may have it found")


def fetch(
    references: Sequence[ImageReference],
    decoding: DecodeSpec,
    storage_options: dict[str, Any] | None,
) -> tuple[list[Header], list[bytes | memoryview | None]]:
    """Fetch encoded images: what the first bytes of each tell, and its bytes.

    The header of an image that is not there says why; it has no bytes.

    Raises
    ------
    ShardError, ShardNotFoundError
        If a shard can't be read, or is of another version than a reference names.
    """
    found = fetch_encoded(references, storage_options)
    encoded = [None if isinstance(data, Header) else data for data in found]
    headers = [
        data
        if isinstance(data, Header)
        else decoding.validated(read_header(data, decoding.max_pixels))
        for data in found
    ]
    return headers, encoded


def fetch_encoded(
    references: Sequence[ImageReference], storage_options: dict[str, Any] | None
) -> list[bytes | memoryview | Header]:
    """Fetch encoded images; for one that is not there, a header that says why.

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
    """Read the header of each image, and no more of it.

    Raises
    ------
    ShardError, ShardNotFoundError
        As `fetch`.
    """

    def header_of(image: Any) -> Header:
        return decoding.validated(read_header(image, decoding.max_pixels))

    def read(content: ByteReader, place: tuple[int, int]) -> Header:
        return header_of(open_member(content, _NOTHING_SPARSE, place))

    found = _visit(references, storage_options, read, HEAD)
    return [data if isinstance(data, Header) else header_of(data) for data in found]


def _copied(content: ByteReader, place: tuple[int, int]) -> bytes:
    offset, size = place
    # So that the shard is read now.
    return bytes(content[offset : offset + size])


def _visit(
    references: Sequence[ImageReference],
    storage_options: dict[str, Any] | None,
    read: _Read,
    longest: int | None,
) -> list[bytes | memoryview | Header]:
    """Read images where they are; at most the ``longest`` first bytes of each are announced."""
    found: list[bytes | memoryview | Header] = [_NO_POINTER] * len(references)
    by_shard: dict[str, list[int]] = {}
    for row, each in enumerate(references):
        if each.bytes is not None:
            found[row] = each.bytes
        elif each.url and each.nbytes is not None:
            by_shard.setdefault(each.url, []).append(row)
        elif each.url and each.offset is None:
            found[row] = NO_MEMBER

    def read_shard(url: str, rows: list[int]) -> None:
        by_version: dict[Shard | None, list[int]] = {}
        for row in rows:
            by_version.setdefault(_listed(references[row]), []).append(row)
        for listed, some in by_version.items():
            with open_shard(url, storage_options, listed) as content:
                _read(content, url, {row: references[row] for row in some}, found, read, longest)

    _each_shard(by_shard, read_shard)
    return found


def _listed(reference: ImageReference) -> Shard | None:
    """The version of the shard that a reference is of."""
    url, size, version = reference.url, reference.shard_size, reference.version
    return None if url is None or size is None or version is None else Shard(url, size, version)


def _read(
    content: ByteReader,
    url: str,
    references: Mapping[int, ImageReference],
    found: list[bytes | memoryview | Header],
    read: _Read,
    longest: int | None,
) -> None:
    """Read the images of an open shard, in the order in which they lie there."""
    places = {row: place for row, each in references.items() if (place := each.place) is not None}
    inside = {row: place for row, place in places.items() if _is_inside(content, *place)}
    wanted = (
        (start, start + (size if longest is None else min(size, longest)))
        for start, size in inside.values()
    )
    content.prefetch(sorted(wanted))
    for row in sorted(places, key=places.__getitem__):
        found[row] = read(content, places[row]) if row in inside else _OUTSIDE
    if len(places) < len(references):
        samples = _Samples(content, url)
        for row in references.keys() - places.keys():
            found[row] = samples.image(references[row])


def _is_inside(content: ByteReader, offset: int, size: int) -> bool:
    return offset >= 0 and size >= 0 and offset + size <= len(content)


def _each_shard(rows: Mapping[str, list[int]], read: Any) -> None:
    """Read the rows of each shard, of a few shards at a time: no more are ever open."""
    # A command's output is in memory as a whole, and that of one at a time is enough.
    remote = any(local_path(url) is None and not is_pipe(url) for url in rows)
    with ThreadPoolExecutor(_REMOTE_AT_ONCE if remote else 1) as threads:
        # One after the other where they are at hand: they would wait for the same disk.
        list((threads.map if remote else map)(read, rows.keys(), rows.values()))


class _Samples:
    """The images of a shard that are no range of its bytes: found by their sample and size."""

    def __init__(self, content: ByteReader, url: str) -> None:
        self._content = content
        self._index = index_tar(content, url)
        self._by_key: dict[str, list[Sample]] = {}
        for sample in self._index.samples:
            self._by_key.setdefault(sample.key, []).append(sample)

    def image(self, reference: ImageReference) -> bytes | memoryview | Header:
        """The encoded image, or a header that says why there is none."""
        found = [
            (sample, span)
            for sample in self._samples(reference)
            for span in sample.members.values()
            if span[1] == reference.nbytes and (sample.duplicates or span[0] in self._index.sparse)
        ]
        if not found or any(sample is not found[0][0] for sample, _ in found):
            return _NO_POINTER if reference.key else _NO_KEY
        sample, span = found[0]
        error = too_large_error(self._index, span)
        if sample.duplicates or error:
            return Header(None, None, None, None, error or duplicate_error(sample.duplicates), True)
        return bytes(read_member(self._content, self._index, span))

    def _samples(self, reference: ImageReference) -> Sequence[Sample]:
        samples, number = self._index.samples, reference.number
        if number is None:
            return self._by_key.get(reference.key or "", ())
        return samples[number : number + 1]
