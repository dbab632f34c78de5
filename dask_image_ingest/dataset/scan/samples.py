"""Rows of a tar shard: its samples, with columns made from their members.

The shard is opened by its index if that is valid, else by a scan of its tar headers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.predicates import Predicate
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.parquet_rows import Sidecar
from dask_image_ingest.dataset.scan.rows import NO_MEMBER, ImageRows
from dask_image_ingest.dataset.schema.coerce import convert, is_array_type, type_advice
from dask_image_ingest.dataset.schema.columns import (
    HEADERS,
    METADATA_COLUMNS,
    ImageMember,
    MemberColumn,
)
from dask_image_ingest.decode import (
    LONGEST_EDGE,
    SWAPPED,
    Header,
    StoredHeader,
    header_of,
)
from dask_image_ingest.errors import PartitionTooLargeError, ShardError, this_worker, warn_user
from dask_image_ingest.frames import encoded_memory, get_backend, references_of_fields, type_name
from dask_image_ingest.index import (
    IndexFile,
    StoredIndex,
    UnusableIndexError,
    open_stored,
    way_out,
)
from dask_image_ingest.storage import (
    ByteReader,
    MemoryReader,
    Shard,
    has_random_access,
    open_late,
    open_shard,
)
from dask_image_ingest.tar import (
    HEAD,
    LINKS,
    SPAN_FIELDS,
    ShardIndex,
    Span,
    duplicate_error,
    index_tar,
    open_member,
    read_member,
    too_large_error,
)

logger = logging.getLogger("dask_image_ingest")

# A byte range is read as a whole if at least this share of it, and this many bytes, are images.
_DENSE, _LEAST_WHOLE = 0.75, 1 << 20

# The fields of a header in an index.
_STORED = ("format", *StoredHeader._fields)


class SampleRows(ImageRows):
    """The samples of one shard. Values come from the index, or else are read from the shard.

    ``member_columns`` are those that `table` can make a column of.
    """

    def __init__(
        self,
        url: str,
        content: ByteReader,
        index: ShardIndex,
        options: ReadOptions,
        member_columns: Sequence[MemberColumn] = (),
        sidecar: Sidecar | None = None,
    ) -> None:
        super().__init__(url, np.arange(len(index)), options)
        self.index = index
        self._content = content
        self._member_columns = {column.column: column for column in member_columns}
        self._sidecar = sidecar

    def keep(self, numbers: np.ndarray, filters: Predicate | None) -> np.ndarray:
        """The rows for which ``filters`` hold. Filters on the sidecar run first."""
        if filters and self._sidecar is not None:
            candidates = self._sidecar.keep(filters, lambda: self._sidecar_rows[numbers])
            numbers = numbers if candidates is None else numbers[candidates]
        return super().keep(numbers, filters)

    def table(self, columns: Sequence[str], numbers: np.ndarray) -> pa.Table:
        """Metadata columns.

        Raises
        ------
        PartitionTooLargeError
            If the members to read for them are more than one partition can hold.
        """
        members = [self._member_columns[name] for name in columns if name in self._member_columns]
        self._check_size({member.extension for member in members}, numbers)
        return super().table(columns, numbers)

    def column(self, name: str, numbers: np.ndarray) -> pa.Array:
        if name in self._member_columns:
            return self._member_column(self._member_columns[name], numbers)
        if self._sidecar is not None and name in self._sidecar:
            return self._sidecar.column(name, self._sidecar_rows[numbers])
        if name == "__key__":
            return self.index.keys.take(pa.array(numbers))
        return super().column(name, numbers)

    @cached_property
    def _sidecar_rows(self) -> np.ndarray:
        """The row of the sidecar for each sample of the shard; -1 if it has none."""
        if self._sidecar is None or not len(self.numbers):
            return self.numbers
        return np.array(self._sidecar.rows_of(self.keys(self.numbers)), np.int64)

    def field(self, member: ImageMember, name: str, numbers: np.ndarray) -> pa.Array:
        if name == "offset":
            return self._offsets(member, numbers)
        if name == "nbytes":
            return self._field(member.extensions, "size", numbers)
        if name in HEADERS and self._are_measured(member, numbers):
            return self._shape(member, name, numbers).cast(METADATA_COLUMNS[name])
        return super().field(member, name, numbers)

    def _field(self, extensions: Sequence[str], name: str, numbers: np.ndarray) -> pa.Array:
        """One field of each sample's member, the first of these extensions; null if unknown."""
        return self.index.preferred(extensions, name).take(pa.array(numbers))

    def _spans(self, extensions: Sequence[str], numbers: np.ndarray) -> list[Span | None]:
        """Offset and size of each sample's member; None without one."""
        fields = (self._field(extensions, name, numbers) for name in SPAN_FIELDS)
        return self.index.spans(*fields)

    def _offsets(self, member: ImageMember, numbers: np.ndarray) -> pa.Array:
        duplicates, sparse = self.index.duplicates, self.index.sparse
        if not (duplicates or sparse):
            return self._field(member.extensions, "offset", numbers)
        # Null for sparse members, which are not one range, and duplicates, which are ambiguous.
        offsets = [
            None if span is None or number in duplicates or span[0] in sparse else span[0]
            for number, span in zip(
                numbers.tolist(), self._spans(member.extensions, numbers), strict=True
            )
        ]
        return pa.array(offsets, pa.int64())

    def references(self, member: ImageMember, numbers: np.ndarray) -> pa.StructArray:
        shard = self._content.listed_as(self.url)
        size, version = (None, None) if shard is None else (shard.size, shard.version)
        count = len(numbers)
        fields = {
            "url": self.column("__url__", numbers),
            "shard_size": pa.repeat(pa.scalar(size, pa.int64()), count),
            "version": pa.repeat(pa.scalar(version, pa.string()), count),
            "number": pa.array(numbers),
            "key": self.column("__key__", numbers),
            "offset": self._offsets(member, numbers),
            "nbytes": self._field(member.extensions, "size", numbers),
        }
        index, carries_all = self.index, not has_random_access(self.url)
        if carries_all or index.sparse or index.duplicates:
            spans = self._spans(member.extensions, numbers)
            errors = list(map(self._refused, numbers.tolist(), spans))
            fields["error"] = pa.array(errors, pa.string())
            # What is no range of the shard, or would have to be decompressed again.
            carried = [
                bytes(read_member(self._content, index, span))
                if span is not None and error is None and (carries_all or span[0] in index.sparse)
                else None
                for span, error in zip(spans, errors, strict=True)
            ]
            fields["bytes"] = pa.array(carried, pa.large_binary())
        return references_of_fields(count, fields)

    def _refused(self, number: int, span: Span | None) -> str | None:
        """The error of an image that is not read, whatever its bytes are."""
        if span is None:
            return None
        if duplicates := self.index.duplicates.get(number):
            return duplicate_error(duplicates)
        return too_large_error(self.index, span)

    def _are_measured(self, member: ImageMember, numbers: np.ndarray) -> bool:
        """True if the index has the header of every image."""
        measured = self._field(member.extensions, "needs_pillow", numbers)
        return bool(
            measured.null_count == self._field(member.extensions, "size", numbers).null_count
        )

    def _shape(self, member: ImageMember, name: str, numbers: np.ndarray) -> pa.Array:
        """A header column from the index: `header_of`, vectorized."""
        if name == "format":
            return self._field(member.extensions, name, numbers)
        height, width = (
            self._field(member.extensions, edge, numbers) for edge in ("height", "width")
        )
        valid = pc.and_(pc.less_equal(height, LONGEST_EDGE), pc.less_equal(width, LONGEST_EDGE))
        if name in ("height", "width"):
            orientation = self._field(member.extensions, "orientation", numbers)
            swapped = pc.is_in(orientation, pa.array(SWAPPED, pa.int8()))
            one, other = (height, width) if name == "height" else (width, height)
            column = pc.if_else(swapped, other, one)
        else:
            column = self._field(member.extensions, name, numbers)
        return pc.if_else(valid, column, pa.scalar(None, column.type))

    def _read_headers(self, member: ImageMember, numbers: np.ndarray) -> list[Header]:
        spans, decoding = self._spans(member.extensions, numbers), member.decoding
        stored = self._stored_headers(member, numbers)
        self._prefetch(
            span and (span[0], min(span[1], HEAD))
            for span, header in zip(spans, stored, strict=True)
            if header is None
        )

        def header_of_row(number: int, span: Span | None, header: Header | None) -> Header:
            if span is None:
                return NO_MEMBER
            error = self._refused(number, span)
            if header is None and error is not None and span[0] in self.index.sparse:
                return NO_MEMBER._replace(error=error)
            if header is None:
                header = decoding.read_header(open_member(self._content, self.index, span))
            return header if error is None or header.error else header._replace(error=error)

        return list(map(header_of_row, numbers.tolist(), spans, stored))

    def _stored_headers(self, member: ImageMember, numbers: np.ndarray) -> list[Header | None]:
        """The headers from the index; None for images without one there."""
        measured = self._field(member.extensions, "needs_pillow", numbers)
        if measured.null_count == len(numbers):
            return [None] * len(numbers)
        fields = (self._field(member.extensions, name, numbers).to_pylist() for name in _STORED)
        decoding = member.decoding
        return [
            None
            if needs_pillow is None
            else decoding.validated(
                header_of(stored[0], StoredHeader(*stored[1:]), decoding.max_pixels)
            )
            for needs_pillow, *stored in zip(measured.to_pylist(), *fields, strict=True)
        ]

    def _reader(
        self, member: ImageMember, numbers: np.ndarray
    ) -> tuple[Callable[[int], Any], Callable[[], None]]:
        spans = self._spans(member.extensions, numbers)

        def read(row: int) -> Any:
            span = spans[row]
            return None if span is None else read_member(self._content, self.index, span)

        return read, functools.partial(self._prefetch_images, spans)

    def opened(self, member: ImageMember, numbers: np.ndarray) -> Iterator[Any]:
        """The encoded image of each row, read lazily by slices; empty without an image."""
        for span in self._spans(member.extensions, numbers):
            yield open_member(self._content, self.index, span or (0, 0))

    def _prefetch_images(self, spans: Sequence[Span | None]) -> None:
        """Prefetch images; if they lie densely, the whole range at once."""
        self._prefetch(spans)
        present = [span for span in spans if span is not None]
        if present and not self.index.sparse:
            start, stop = min(present)[0], max(offset + size for offset, size in present)
            wanted = sum(size for _, size in present)
            if max(_LEAST_WHOLE, _DENSE * (stop - start)) <= wanted:
                self._content.prefetch_into(start, stop, encoded_memory)

    def _prefetch(self, spans: Iterable[Span | None]) -> None:
        sparse = self.index.sparse
        ranges = (span for span in spans if span is not None and span[0] not in sparse)
        self._content.prefetch((offset, offset + size) for offset, size in ranges)

    def _check_size(self, extensions: Iterable[str], numbers: np.ndarray) -> None:
        """Raise `PartitionTooLargeError`, before any member is read, if they don't fit together."""
        limit = self.options.max_member_bytes
        nbytes: dict[str, int] = {}
        for extension in extensions:
            sizes = self._field([extension], "size", numbers)
            small = sizes.filter(pc.less_equal(sizes, limit))
            nbytes[extension] = pc.sum(small).as_py() or 0
        total, largest = sum(nbytes.values()), get_backend(self.options.backend).largest_partition
        if total > largest:
            most = max(nbytes, key=nbytes.__getitem__)
            raise PartitionTooLargeError(
                f"the members of samples {numbers[0]}-{numbers[-1]} of {self.url} are "
                f"{total / 1e9:.1f} GB, most of them of {most!r}, and one partition "
                f"holds at most {largest / 1e9:.1f} GB here. Leave that column out, pass "
                'partition_size="64 MiB" to split shards into more parts, or max_member_bytes= to '
                "replace large members by nulls"
            )

    def _member_column(self, column: MemberColumn, numbers: np.ndarray) -> pa.Array:
        """The column of a member: contents from index or shard, converted to its type."""
        limit = self.options.max_member_bytes
        spans = self._spans([column.extension], numbers)
        contents = self._field([column.extension], "content", numbers).to_pylist()
        too_large = [row for row, span in enumerate(spans) if span is not None and span[1] > limit]
        to_read = [
            (row, span)
            for row, (span, content) in enumerate(zip(spans, contents, strict=True))
            if span is not None and span[1] <= limit and content is None
        ]
        for row in too_large:
            contents[row] = None
        self._prefetch(span for _, span in to_read)
        for row, span in to_read:
            contents[row] = bytes(read_member(self._content, self.index, span))
        array, misfits = convert(contents, column.type, column.path)
        advice = "ask for another type with members= or json_fields="
        if misfits and is_array_type(column.type) and column.path is None:
            advice = type_advice(contents[misfits[0]] or b"", column.type) or advice
        is_text = column.type == pa.string() and column.path is None
        if is_text:
            advice = f"members={{..., {column.extension!r}: 'binary'}} keeps their bytes"
        problem = "not UTF-8" if is_text else f"not {type_name(column.type)}"
        larger = f"larger than max_member_bytes={limit:,}"
        for rows, what, do in (
            (misfits, problem, advice),
            (too_large, larger, "pass a larger one to have them"),
        ):
            if rows:
                (key,) = self.keys(numbers[rows[:1]])
                warn_user(
                    f"{self.url}: {len(rows)} of {len(numbers)} values of {column.column!r} are "
                    f"{what} and became null, first that of {key!r}; {do}"
                )
        return array


# URL → open version and index of the shards that were scanned last in this process.
_scanned: dict[str, tuple[Shard, ShardIndex]] = {}
_MOST_SCANNED = 4


def scanned_index(url: str) -> tuple[Shard, ShardIndex] | None:
    """Version and index of a shard that was scanned a moment ago in this process.

    None also for a shard with members that are no range of it.
    """
    return _scanned.get(url)


@contextmanager
def open_samples(
    shard: Shard,
    index: IndexFile | None,
    options: ReadOptions,
    member_columns: Sequence[MemberColumn] = (),
    sidecar: Sidecar | None = None,
    warn: bool = False,
) -> Iterator[SampleRows]:
    """Open all samples of the listed version of a shard; ``warn`` of an index that is not used."""
    url, storage_options = shard.url, options.storage_options
    with ExitStack() as opened:
        stored = known_samples(opened, index, storage_options, warn)
        if stored is not None:
            late = opened.enter_context(open_late(shard, storage_options, stored.check))
            yield SampleRows(url, late, stored, options, member_columns, sidecar)
            return
        content = opened.enter_context(open_shard(url, storage_options, shard))
        scanned = index_tar(content, url)
        version, in_memory, reader = content.listed_as(url), content.in_memory(), content
        if len(in_memory) == len(content):
            reader = MemoryReader(in_memory, version)
        yield SampleRows(url, reader, scanned, options, member_columns, sidecar)
    # Only now: closing the shard raises if it changed.
    if version is not None and not scanned.sparse:
        _scanned.pop(url, None)
        _scanned[url] = version, scanned
        for oldest in list(_scanned)[:-_MOST_SCANNED]:
            _scanned.pop(oldest, None)


def known_samples(
    opened: ExitStack,
    index: IndexFile | None,
    storage_options: dict[str, Any] | None,
    warn: bool,
    all_places: bool = False,
) -> StoredIndex | None:
    """The stored index of a shard, closed by ``opened``; None if there is none, or it is invalid.

    With ``all_places``, also if a column of offsets or sizes is damaged.

    Raises
    ------
    ShardError
        If an index is required, and invalid.
    """
    if index is None:
        return None
    try:
        stored = opened.enter_context(open_stored(index, storage_options))
        for extension in stored.extensions if all_places else ():
            stored.places(extension)
        return stored
    except (UnusableIndexError, ShardError) as error:
        give_up(index, error, warn)
    return None


def give_up(index: IndexFile, error: Exception, warn: bool) -> None:
    """Warn that a shard is read without its index, which can't be used; once in a read.

    Raises
    ------
    ShardError
        If the index is required.
    """
    advice = way_out(index.url, index.shard.url)
    if index.required:
        raise ShardError(
            f"the index {index.url} can't be used: {error}, and index=True wants one of "
            f"{index.shard.url}. {advice}"
        ) from error
    if not warn:
        return
    # Names the worker: others may be able to use it.
    why = (
        f"the index {index.url} is not used: {error}. {index.shard.url} is read without it"
        f"{this_worker()}"
    )
    if not index.told:
        index.told.add(index.shard.url)
        warn_user(f"{why}. {advice}. More such indexes of this read are logged (INFO)")
    elif index.shard.url not in index.told:
        logger.info("%s", why)


# Folders of shards with links, and extensions without a column, that were warned about already:
# once per process, not once per shard.
_warned_links: set[str] = set()
_warned_extensions: set[str] = set()


def warn_of_shard(rows: SampleRows, known_extensions: frozenset[str] | None) -> None:
    """Warn of what is lost of a shard: behind a damage, links, members that have no column.

    Not of members, if ``known_extensions`` is None.
    """
    url, index = rows.url, rows.index
    if (damage := index.damage) is not None:
        warn_user(
            f"{url} is damaged at byte {damage.offset}: {damage.reason}. "
            f"The {len(index)} samples before it are read, what follows is lost"
        )
    links = [index.skipped[code] for code in LINKS if code in index.skipped]
    folder = url.rpartition("/")[0]
    if links and folder not in _warned_links:
        _warned_links.add(folder)
        warn_user(
            f"{url}: links are not followed, {sum(link.number for link in links)} here, first "
            f"{links[0].first!r}: symbolic links, or hard links to no file before them in the "
            "shard. These members are missing; pack the files themselves (tar --dereference)"
        )
    if known_extensions is None:
        return
    image, *others = rows.options.images
    known = known_extensions.union(*(member.extensions for member in others))
    late = set(index.not_preferred(image.extensions)) - known
    new = sorted(late - _warned_extensions - {""})
    if new:
        _warned_extensions.update(new)
        few = ", ".join(map(repr, new[:3]))
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        warn_user(
            f"{url} has members with extensions that have no column: {few}{more}"
            f"{first_dot_hint(new)}. They are left out; to have them as a column, pass "
            f"members={{..., {new[0]!r}: 'string'}} (or 'binary', 'int64' ...)"
        )


def first_dot_hint(extensions: Iterable[str], least_dots: int = 1) -> str:
    """A sentence on keys for extensions with dots, a part of which may be meant for the key."""
    for extension in extensions:
        if extension.count(".") >= least_dots:
            return (
                f". A key ends at the first dot of the file name: 'name.{extension}' is the member "
                f"{extension!r} of 'name'"
            )
    return ""
