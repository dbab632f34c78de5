"""Fetch the encoded images of references, shard by shard, also ahead of their decode."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.dataset.references.parts import resolve
from dask_image_ingest.dataset.scan.file_rows import for_each, missing_file, origin_of_key
from dask_image_ingest.dataset.scan.rows import (
    NO_BYTES,
    NO_MEMBER,
    ColumnDecode,
    ErrorFilter,
    decode_rows,
    missing_image,
)
from dask_image_ingest.decode import (
    BadImage,
    DecodeSpec,
    EncodedImages,
    Header,
    OpenTiff,
    Origin,
    Part,
    is_tiff,
)
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.frames import (
    BackendName,
    ImageReference,
    as_references,
    backend_of,
    converted,
)
from dask_image_ingest.storage import (
    SIGNATURE_BYTES,
    ByteReader,
    Shard,
    open_file,
    open_shard,
)
from dask_image_ingest.tar import BLOCK, index_tar, plain_name
from dask_image_ingest.typedefs import DataFrame

# Bytes to fetch of a remote shard before ranges of it: enough to tell whether it is compressed.
_HEAD_SIZE = 512

# Bytes between two images that are fetched with them ahead of a decode: their headers, captions and
# labels. Images between them are not, since another process decodes these.
_GAP = 8 << 10

# Ranges that are fetched at once, ahead of a decode.
_AT_ONCE = 16

# Bytes of an image above which a TIFF is not fetched for parts of it, and its first bytes to fetch:
# most have their directory there, or at the end.
_LARGE, _TIFF_HEAD = 1 << 20, 16 << 10

#: An encoded image, or a header with the reason why there is none.
Fetched: TypeAlias = bytes | memoryview | OpenTiff | Header

#: Fetches encoded images with these ``storage_options``: as `fetch_encoded`.
Fetch: TypeAlias = Callable[[Sequence[ImageReference], dict[str, Any] | None], list[Fetched]]

_NO_LOCATION = missing_image("the row points to no image bytes")
_OUTSIDE = missing_image("the row points beyond the end of its shard")

# For a null reference, such as that of an unmatched row of a merge: no image, and no error.
_NO_REFERENCE = Header(None, None, None, None, "", True)


def decode_partition(
    frame: DataFrame,
    images: Sequence[ColumnDecode],
    only: ErrorFilter = None,
    limit: int | None = None,
    draws: np.ndarray | None = None,
    fetch_bytes: Fetch | None = None,
    backend: BackendName | None = None,
) -> DataFrame:
    """Decode the references of a pandas or cuDF frame.

    ``images``, ``only`` and ``limit`` are as for `Decode`; ``draws`` (only without a limit) and
    ``fetch_bytes`` as for `fetch_images`. ``backend`` is that of the result; None for that of the
    frame.

    Raises
    ------
    PartitionTooLargeError
        Before the decode, if the images exceed what a worker can hold.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """

    def open_images(rows: DataFrame) -> tuple[Any, list[EncodedImages]]:
        encoded = [fetch_images(rows, column, draws, fetch_bytes) for column in images]
        return _on_backend(rows, images, backend), encoded

    return _ordered(decode_rows(frame, images, open_images, only, limit), frame)


def _on_backend(
    rows: DataFrame, images: Sequence[ColumnDecode], backend: BackendName | None
) -> DataFrame:
    """Rows for a backend; for another one than theirs without the columns that the decode makes."""
    if backend in (None, backend_of(rows).name):
        return rows
    made = {name for column in images for name in column.made}
    return converted(rows[[name for name in rows.columns if name not in made]], backend)


def _ordered(decoded: DataFrame, rows: DataFrame) -> DataFrame:
    """The columns in the order of the rows: on another backend, what is decoded comes last."""
    names = [n for n in dict.fromkeys([*rows.columns, *decoded.columns]) if n in decoded.columns]
    return decoded if names == [*decoded.columns] else decoded[names]


def fetch_images(
    frame: DataFrame,
    column: ColumnDecode,
    draws: np.ndarray | None = None,
    fetch_bytes: Fetch | None = None,
) -> EncodedImages:
    """The encoded images of a frame's references, in memory; repeated references share one.

    Parameters
    ----------
    frame, column
        Rows with a column of references, and its decode.
    draws : array of uint64, shape (n,), or None
        Which random numbers each row gets (`Origin.draw`); None for those of a read. All image
        columns of a row get the same.
    fetch_bytes
        Fetches the images; None for `fetch_encoded`.
    """
    rows = reference_rows(references_of(frame, column.image))
    # A merge may repeat a reference, or leave it null.
    distinct: dict[ImageReference, int] = {}
    places = [-1 if row is None else distinct.setdefault(row, len(distinct)) for row in rows]
    headers, encoded, parts = fetch(
        list(distinct), column.decoding, column.storage_options, fetch_bytes
    )
    # The last is that of null.
    headers, encoded, parts = [*headers, _NO_REFERENCE], [*encoded, None], [*parts, None]

    def origin(row: int) -> Origin:
        origin = _origin(rows[row])
        return origin if draws is None else origin._replace(draw=int(draws[row]))

    pictures = np.array(places, np.int64)
    if draws is not None and column.decoding.is_random:
        pairs = np.rec.fromarrays([pictures, draws])
        pictures = np.unique(pairs, return_inverse=True)[1].reshape(-1)
    return EncodedImages(
        [headers[place] for place in places],
        lambda row: encoded[places[row]],
        origin,
        f"the {len(rows)} images of a partition",
        pictures=pictures if len(np.unique(pictures)) < len(rows) else None,
        source=tuple(rows),
        parts=[parts[place] for place in places] if any(parts) else None,
    )


def fetch(
    references: Sequence[ImageReference],
    decoding: DecodeSpec,
    storage_options: dict[str, Any] | None,
    fetch_bytes: Fetch | None = None,
) -> tuple[list[Header], list[bytes | memoryview | OpenTiff | None], list[Part | None]]:
    """Fetch encoded images; returns the header, the bytes and the part of each.

    Of a picture the bytes are fetched once, and the header of each page is read once. For an image
    that can't be found the header has an error, and the bytes are None.

    Raises
    ------
    ShardError, ShardNotFoundError
        If a shard can't be read, or is of another version than a reference names.
    """
    pictures: dict[ImageReference, int] = {}
    numbers = [pictures.setdefault(one.picture, len(pictures)) for one in references]
    fetched = (fetch_bytes or fetch_encoded)(list(pictures), storage_options)
    pages: dict[tuple[int, int | None], Header] = {}
    needed: dict[ByteReader, list[tuple[OpenTiff, Part]]] = {}
    headers: list[Header] = []
    parts: list[Part | None] = []
    for reference, number in zip(references, numbers, strict=True):
        data, page = fetched[number], reference.page or 0 if reference.has_part else None
        header, part = pages.get((number, page)), None
        if header is None:
            header = data if isinstance(data, Header) else decoding.read_header(data, page)
            pages[number, page] = header
        if reference.has_part:
            header, part = resolve(reference, number, header, decoding)
            if part and isinstance(data, OpenTiff) and isinstance(data.content, ByteReader):
                needed.setdefault(data.content, []).append((data, part))
        headers.append(header)
        parts.append(part)
    for content, of_shard in needed.items():
        # All that the parts need, at once; a local shard does not ask what.
        content.prefetch((place for tiff, part in of_shard for place in tiff.ranges(part)), _GAP)
    found = [None if isinstance(data, Header) else data for data in fetched]
    return headers, [found[number] for number in numbers], parts


def fetch_encoded(
    references: Sequence[ImageReference],
    storage_options: dict[str, Any] | None,
    gap: int | None = None,
) -> list[Fetched]:
    """Fetch encoded images; opens each shard once.

    For an image that can't be found, a header with an error. A TIFF of which parts are wanted is an
    `OpenTiff`; a large one is not fetched, and its shard stays open as long as it is needed.
    ``gap`` is as for ``ByteReader.prefetch``.

    Raises
    ------
    ShardError, ShardNotFoundError
        As `fetch`.
    """
    results: dict[int, Fetched] = dict.fromkeys(range(len(references)), _NO_LOCATION)
    by_shard: dict[str, list[int]] = {}
    for row, reference in enumerate(references):
        if reference.error is not None:
            results[row] = NO_MEMBER._replace(error=reference.error)
        elif reference.bytes is not None:
            results[row] = _opened(reference.bytes, reference)
        elif not reference.url:
            results[row] = NO_BYTES
        elif reference.place is not None:
            by_shard.setdefault(reference.url, []).append(row)
        elif reference.nbytes is None and reference.offset is None:
            results[row] = NO_MEMBER

    def read_shard(url: str) -> None:
        by_version: dict[Shard | None, dict[int, ImageReference]] = {}
        for row in by_shard[url]:
            by_version.setdefault(_listed(references[row]), {})[row] = references[row]
        for listed, of_version in by_version.items():
            if not all(map(_is_file, of_version.values())):
                results_of(open_shard(url, storage_options, listed, _HEAD_SIZE), url, of_version)
                continue
            head_size = _HEAD_SIZE if any(map(_is_of_parts, of_version.values())) else None
            try:
                results_of(open_file(url, storage_options, listed, head_size), url, of_version)
            except (ShardError, ShardNotFoundError) as error:
                for row in of_version:
                    results[row] = missing_file(url, error)

    def results_of(
        shard: AbstractContextManager[ByteReader], url: str, wanted: dict[int, ImageReference]
    ) -> None:
        with ExitStack() as opened:
            content = opened.enter_context(shard)
            found = dict(_read(content, url, wanted, gap))
            tiffs = [data for data in found.values() if isinstance(data, OpenTiff)]
            if tiffs := [tiff for tiff in tiffs if tiff.content is content]:
                # The shard is closed when they are gone, and this with them.
                lease = opened.pop_all()
                for tiff in tiffs:
                    tiff.lease = lease
        results.update(found)

    for_each(read_shard, by_shard, by_shard)
    return list(results.values())


def fetch_rows(
    references: Sequence[ImageReference], storage_options: dict[str, Any] | None
) -> list[Fetched]:
    """Fetch encoded images as `fetch_encoded` does, and next to nothing between them."""
    return fetch_encoded(references, storage_options, _GAP)


def _is_file(reference: ImageReference) -> bool:
    """True for an image file: no member of a tar begins at its first byte."""
    return reference.offset == 0 and reference.number is None


def _is_of_parts(reference: ImageReference) -> bool:
    """True if parts of an image are wanted, and it is so large that they may be much less."""
    return reference.has_part and (reference.nbytes or 0) > _LARGE


def _opened(data: bytes | memoryview, reference: ImageReference) -> Fetched:
    """An encoded image; a TIFF of which parts are wanted as one that knows its pages."""
    if reference.has_part and is_tiff(data):
        with suppress(BadImage):
            return OpenTiff(data)
    return data


def _listed(reference: ImageReference) -> Shard | None:
    """The shard with the version that the reference names; None if it names none."""
    url, size, version = reference.url, reference.shard_size, reference.version
    return None if url is None or size is None or version is None else Shard(url, size, version)


def _read(
    content: ByteReader, url: str, references: dict[int, ImageReference], gap: int | None
) -> Iterator[tuple[int, Fetched]]:
    """Read images of an open shard, in the order of their offsets.

    The header before each, which is fetched with it, must not be that of another sample: an index
    of another shard with the same size and time has such references.
    """
    spans = {
        row: place
        for row, reference in references.items()
        if (place := reference.place) is not None
    }
    end = len(content)
    inside = {row for row, (at, size) in spans.items() if at >= 0 <= size and at + size <= end}
    in_parts = {row for row in inside if _is_of_parts(references[row])}
    ends = {row: sum(spans[row]) for row in inside}
    ends |= {row: spans[row][0] + _TIFF_HEAD for row in in_parts}
    ranges = [(max(0, spans[row][0] - BLOCK), stop) for row, stop in ends.items()]
    content.prefetch(sorted(ranges), gap)
    tiffs = {}
    for row in in_parts:
        at, size = spans[row]
        if is_tiff(content[at : at + SIGNATURE_BYTES]):
            tiffs[row] = OpenTiff(content, at, size)
    if len(tiffs) < len(in_parts):
        whole = (spans[row] for row in inside - {*tiffs})
        content.prefetch(sorted((max(0, at - BLOCK), at + size) for at, size in whole), gap)
    doubtful = []
    for row in sorted(spans, key=spans.__getitem__):
        if row not in inside:
            yield row, _OUTSIDE
            continue
        at, size = spans[row]
        if not _follows_own_header(content, references[row]):
            doubtful.append(references[row])
        if row in tiffs:
            yield row, tiffs[row]
            continue
        # A copy, so that the bytes are read here, and not when a view of them is decoded.
        yield row, _opened(bytes(content[at : at + size]), references[row])
    if doubtful:
        _check_places(content, url, doubtful)


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


def _check_places(content: ByteReader, url: str, references: Sequence[ImageReference]) -> None:
    """Raise `ShardError` if a sample of the shard has no member where its reference says."""
    places: dict[str, set[tuple[int, int]]] = {}
    for sample in index_tar(content, url).samples:
        places.setdefault(sample.key, set()).update(sample.members.values())
    for reference in references:
        if reference.place not in places.get(reference.key or "", ()):
            raise ShardError(
                f"{url} has no image of {reference.key!r} at byte {reference.offset}: the "
                "row comes from an index or a reference of another shard with the same size and "
                "time. Write the index again, with write_index(overwrite=True)"
            )


def reference_rows(references: pa.ChunkedArray) -> list[ImageReference | None]:
    """The reference of each row, None for null; carried bytes are views, not copies."""
    carried = [
        # Arrow's buffers have the format "b", and memoryviews copy only between equal formats.
        None if not value.is_valid else memoryview(value.as_buffer()).cast("B")
        for value in field_of(references, "bytes")
    ]
    others = {field.name: field_of(references, field.name) for field in references.type}
    fields = {
        name: values.to_pylist()
        for name, values in others.items()
        if name != "bytes" and values.null_count < len(values)
    }
    fields |= {"url": others["url"].to_pylist(), "bytes": carried}
    return [
        ImageReference(**dict(zip(fields, values, strict=True))) if valid else None
        for valid, *values in zip(references.is_valid().to_pylist(), *fields.values(), strict=True)
    ]


def field_of(references: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """One field of an array of references; null for null references."""
    return references.flatten()[references.type.get_field_index(name)]


def references_of(frame: DataFrame, image: Hashable) -> pa.ChunkedArray:
    """A column of references as an Arrow array on the host; carried bytes are not copied."""
    (column,) = backend_of(frame).to_arrow(frame[[image]]).columns
    return as_references(column)


def encoded_sizes(frame: DataFrame, images: ColumnDecode) -> np.ndarray:
    """Encoded bytes that each row adds, 0 if unknown; shape (n,), int64.

    Of rows with one picture the first has them all: they are fetched once.
    """
    references = references_of(frame, images.image)
    fields = {name: field_of(references, name) for name in ("url", "offset", "nbytes")}
    places = pd.DataFrame({name: values.to_pandas() for name, values in fields.items()})
    again = places.duplicated() & places["offset"].notna()
    return np.where(again, 0, fields["nbytes"].fill_null(0).to_numpy())


def _origin(reference: ImageReference | None) -> Origin:
    """The identity of an image, for errors and for the seed of random transforms.

    All images of a sample have the same seed, so it depends on the sample alone: shard and number,
    or else the key. Within a shard the key is not used, since it may repeat. Parts of an image have
    other seeds than the image, and the same parts of two images of a sample have one.
    """
    if reference is None:
        return Origin("", 0, "no image")
    origin = _origin_of_sample(reference)
    if not reference.has_part:
        return origin
    page, top, left, height, width, in_shares = reference.part
    name = f"page {page} of {origin.name}" if page else origin.name
    if top is not None:
        unit = " (shares)" if in_shares else ""
        name = f"the part {width:g} x {height:g} at {left:g}, {top:g}{unit} of {name}"
    seed = zlib.crc32(repr((origin.number, reference.part)).encode())
    return origin._replace(number=seed, name=name)


def _origin_of_sample(reference: ImageReference) -> Origin:
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


class EncodedAhead:
    """Fetches encoded images in background threads, and holds them until they are taken.

    Calls come from one thread.
    """

    def __init__(self, images: Sequence[ColumnDecode]) -> None:
        self._images = images
        self._threads = ThreadPoolExecutor(_AT_ONCE, "image-ingest-ahead")
        self._requested: dict[ImageReference, Future[Fetched]] = {}
        # Rows that were requested and are yet to be taken, by picture: parts may share one.
        self._awaited: Counter[ImageReference] = Counter()
        # No request begins after `close`: nothing would end its futures.
        self._lock = threading.Lock()
        self._closed = False

    def mean_size(self, rows: DataFrame) -> float:
        """Encoded bytes of a row of a frame, on average."""
        sizes = [encoded_sizes(rows, column) for column in self._images]
        return float(sum(nbytes.sum() for nbytes in sizes)) / max(1, len(rows))

    def request(self, rows: DataFrame) -> None:
        """Start fetching the images of a frame, by one request for all that are adjacent."""
        wanted = self._references(rows)
        new = {
            reference: Future[Fetched]() for reference in wanted if reference not in self._requested
        }
        self._awaited += wanted
        with self._lock:
            if new and not self._closed:
                self._threads.submit(self._fetch, new)
                self._requested |= new

    def take(self, rows: DataFrame) -> Fetch:
        """Hand over the images of a frame: a function for `fetch_images`, which waits for them.

        Those that were not requested are fetched by that function.
        """
        requested = self._requested
        wanted = self._references(rows)
        taken = {reference: requested[reference] for reference in wanted if reference in requested}
        self._awaited -= wanted
        for reference in taken:
            if reference not in self._awaited:
                requested.pop(reference, None)

        def fetch(
            references: Sequence[ImageReference], storage_options: dict[str, Any] | None
        ) -> list[Fetched]:
            self._check_open()
            others = [reference for reference in references if reference not in taken]
            fetched = dict(zip(others, fetch_rows(others, storage_options), strict=True))
            return [
                taken[reference].result() if reference in taken else fetched[reference]
                for reference in references
            ]

        return fetch

    def close(self) -> None:
        """Drop all images, and end the threads without waiting for them."""
        with self._lock:
            self._closed = True
            self._requested.clear()
        self._threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise ShardError("the iteration was closed while images were fetched")

    def _references(self, rows: DataFrame) -> Counter[ImageReference]:
        """References to pictures in shards that one set of ``storage_options`` opens."""
        options = self._images[0].storage_options
        return Counter(
            reference.picture
            for column in self._images
            if column.storage_options == options
            for reference in reference_rows(references_of(rows, column.image))
            if reference is not None and reference.bytes is None
        )

    def _fetch(self, futures: dict[ImageReference, Future[Fetched]]) -> None:
        try:
            self._check_open()
            fetched = fetch_rows(list(futures), self._images[0].storage_options)
        except BaseException as error:
            for future in futures.values():
                future.set_exception(error)
        else:
            for future, image in zip(futures.values(), fetched, strict=True):
                future.set_result(image)
