"""Rows of a tar shard: its samples, with columns made from their members.

The shard is opened by its index if that is valid, else by a scan of its tar headers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.predicates import Predicate
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.rows import NO_MEMBER, ImageRows
from dask_image_ingest.dataset.scan.sidecar import Sidecar
from dask_image_ingest.dataset.schema.coerce import convert, is_array_type, type_advice
from dask_image_ingest.dataset.schema.columns import (
    METADATA_COLUMNS,
    ImageMember,
    MemberColumn,
    image_member,
)
from dask_image_ingest.dataset.warning import warn_of_unusable
from dask_image_ingest.decode import (
    LONGEST_EDGE,
    SWAPPED,
    Header,
    StoredHeader,
    header_of,
)
from dask_image_ingest.errors import PartitionTooLargeError, ShardError, warn_user
from dask_image_ingest.frames import encoded_memory, references_of_fields, type_name
from dask_image_ingest.index import (
    IndexFile,
    StoredIndex,
    UnusableIndexError,
    open_stored,
)
from dask_image_ingest.storage import (
    ByteReader,
    MemoryReader,
    Shard,
    find_shards,
    has_random_access,
    open_late,
    open_shard,
)
from dask_image_ingest.tar import (
    HEAD,
    SPAN_FIELDS,
    Damage,
    ShardIndex,
    Skipped,
    Span,
    duplicate_error,
    index_head,
    index_tar,
    open_member,
    read_member,
    too_large_error,
)

# A byte range is read as a whole if at least this share of it, and this many bytes, are images.
_DENSE, _LEAST_WHOLE = 0.75, 1 << 20

_SHAPE = frozenset({"format", "height", "width", "channels"})

# The fields of a header in an index.
_STORED = ("format", *StoredHeader._fields)


class SampleRows(ImageRows):
    """The samples of one shard. Values come from the index, or else are read from the shard.

    ``member_columns`` are those that `table` can make a column of.
    """

    cached = frozenset({"keys", "spans", "headers", "_sidecar_rows"})
    of_image = frozenset({"spans", "headers"})

    def __init__(
        self,
        url: str,
        content: ByteReader,
        index: ShardIndex,
        options: ReadOptions,
        member_columns: Sequence[MemberColumn] = (),
        sidecar: Sidecar | None = None,
    ) -> None:
        super().__init__(url, len(index), options)
        self._content = content
        self._index = index
        self._max_member_bytes = options.max_member_bytes
        self._get_backend = options.get_backend
        self._member_columns = {member.column: member for member in member_columns}
        self._sidecar = sidecar

    @cached_property
    def keys(self) -> list[str]:
        keys: list[str] = self.column("__key__").to_pylist()
        return keys

    @cached_property
    def spans(self) -> list[Span | None]:
        """Offset and size of each sample's image; None without an image."""
        return self._index.spans(self._image("offset"), self._image("size"))

    @cached_property
    def headers(self) -> list[Header]:
        stored = self._stored_headers()
        self._prefetch_heads(
            span for span, header in zip(self.spans, stored, strict=True) if header is None
        )
        numbers = self.numbers.tolist()
        return [
            self._if_unique(header or self._header(number, span), number)
            for number, span, header in zip(numbers, self.spans, stored, strict=True)
        ]

    @property
    def damage(self) -> Damage | None:
        """The damage of the shard, if there is any."""
        return self._index.damage

    @property
    def skipped(self) -> Mapping[str, Skipped]:
        """Members of the shard that are not read, by a code for the reason."""
        return self._index.skipped

    def other_kinds(self, known: Set[str]) -> set[str]:
        """Extensions of members that are neither ``known`` nor the image of their sample."""
        known = {*known}.union(*(each.extensions for each in self._fields.values()))
        return set(self._index.not_preferred(self.extensions)) - known

    def image_bytes(self, row: int) -> Sequence[int] | None:
        span = self.spans[row]
        return None if span is None else read_member(self._content, self._index, span)

    def prefetch_images(self) -> None:
        """Prefetch the images of these rows; if they lie densely, the whole range at once."""
        self._prefetch(self.spans)
        spans = [span for span in self.spans if span is not None]
        if spans and not self._index.sparse:
            start, stop = min(spans)[0], max(offset + size for offset, size in spans)
            wanted = sum(size for _, size in spans)
            if max(_LEAST_WHOLE, _DENSE * (stop - start)) <= wanted:
                self._content.prefetch_into(start, stop, encoded_memory)

    def opened(self, row: int) -> Any:
        """The encoded image of one row, read lazily by slices; empty without an image."""
        return open_member(self._content, self._index, self.spans[row] or (0, 0))

    def keep(self, filters: Predicate | None) -> SampleRows:
        """The rows for which ``filters`` hold. Filters on the sidecar run first."""
        rows = self
        if filters and self._sidecar is not None:
            candidates = self._sidecar.keep(filters, lambda: self._sidecar_rows)
            rows = rows if candidates is None else rows.take(candidates)
        return super(SampleRows, rows).keep(filters)

    def table(self, columns: Sequence[str]) -> pa.Table:
        """The given metadata columns of all rows.

        Raises
        ------
        PartitionTooLargeError
            If the members to read for them are more than one partition can hold.
        """
        members = [self._member_columns[name] for name in columns if name in self._member_columns]
        spans = {member.extension: self._member_spans(member.extension) for member in members}
        self._check_size(spans)
        arrays = {m.column: self._member_column(m, spans[m.extension]) for m in members}
        return self.table_of({n: arrays[n] if n in arrays else self.column(n) for n in columns})

    def references(self) -> pa.StructArray:
        shard = self._content.listed_as(self.url)
        size, version = (None, None) if shard is None else (shard.size, shard.version)
        fields = {
            "url": self.column("__url__"),
            "shard_size": pa.repeat(pa.scalar(size, pa.int64()), len(self)),
            "version": pa.repeat(pa.scalar(version, pa.string()), len(self)),
            "number": pa.array(self.numbers),
            "key": self.column("__key__"),
            "offset": self.column("offset"),
            "nbytes": self.column("nbytes"),
            "bytes": pa.array(self._carried_bytes(), pa.large_binary()),
        }
        return references_of_fields(len(self), fields)

    def _carried_bytes(self) -> list[bytes | None]:
        """The encoded images of a shard without random access (compressed, pipe), else None."""
        if has_random_access(self.url):
            return [None] * len(self)
        return [
            None
            if span is None
            or number in self._index.duplicates
            or too_large_error(self._index, span)
            else bytes(read_member(self._content, self._index, span))
            for number, span in zip(self.numbers.tolist(), self.spans, strict=True)
        ]

    def column(self, name: str) -> pa.Array:
        if self._sidecar is not None and name in self._sidecar:
            return self._sidecar.column(name, self._sidecar_rows)
        if name == "__key__":
            return self._index.keys.take(pa.array(self.numbers))
        if name == "offset":
            return self._offsets()
        if name == "nbytes":
            return self._image("size")
        if name in _SHAPE and self._are_measured:
            return self._shape(name).cast(METADATA_COLUMNS[name])
        return super().column(name)

    @cached_property
    def _sidecar_rows(self) -> list[int]:
        if self._sidecar is None or not len(self):
            return []
        return self._sidecar.rows_of(self.keys)

    def _image(self, name: str) -> pa.Array:
        """One field of each sample's image from the index; null if not stored."""
        return self._index.preferred(self.extensions, name).take(pa.array(self.numbers))

    def _offsets(self) -> pa.Array:
        duplicates, sparse = self._index.duplicates, self._index.sparse
        if not (duplicates or sparse):
            return self._image("offset")
        # Null for sparse members, which are not one range, and duplicates, which are ambiguous.
        offsets = [
            None if span is None or number in duplicates or span[0] in sparse else span[0]
            for number, span in zip(self.numbers.tolist(), self.spans, strict=True)
        ]
        return pa.array(offsets, pa.int64())

    @property
    def _are_measured(self) -> bool:
        """True if the index has the header of every image."""
        measured, images = self._image("needs_pillow"), self._image("size")
        return bool(measured.null_count == images.null_count)

    def _shape(self, name: str) -> pa.Array:
        """A header column from the index: `header_of`, vectorized."""
        if name == "format":
            return self._image(name)
        height, width = self._image("height"), self._image("width")
        valid = pc.and_(pc.less_equal(height, LONGEST_EDGE), pc.less_equal(width, LONGEST_EDGE))
        if name == "channels":
            column = self._image(name)
        else:
            swapped = pc.is_in(self._image("orientation"), pa.array(SWAPPED, pa.int8()))
            one, other = (height, width) if name == "height" else (width, height)
            column = pc.if_else(swapped, other, one)
        return pc.if_else(valid, column, pa.scalar(None, column.type))

    def _stored_headers(self) -> list[Header | None]:
        """The headers from the index; None for images without one there."""
        measured = self._image("needs_pillow")
        if measured.null_count == len(self):
            return [None] * len(self)
        fields = (self._image(name).to_pylist() for name in _STORED)
        return [
            None
            if needs_pillow is None
            else self._decoding.validated(
                header_of(stored[0], StoredHeader(*stored[1:]), self._decoding.max_pixels)
            )
            for needs_pillow, *stored in zip(measured.to_pylist(), *fields, strict=True)
        ]

    def _header(self, number: int, span: Span | None) -> Header:
        if span is None:
            return NO_MEMBER
        if error := too_large_error(self._index, span):
            return Header(None, None, None, None, error, True)
        return self._decoding.read_header(open_member(self._content, self._index, span))

    def _if_unique(self, header: Header, number: int) -> Header:
        if header.error is None and (duplicates := self._index.duplicates.get(number)):
            return header._replace(error=duplicate_error(duplicates))
        return header

    def _prefetch_heads(self, spans: Iterable[Span | None]) -> None:
        self._prefetch(span and (span[0], min(span[1], HEAD)) for span in spans)

    def _prefetch(self, spans: Iterable[Span | None]) -> None:
        sparse = self._index.sparse
        ranges = (span for span in spans if span is not None and span[0] not in sparse)
        self._content.prefetch((offset, offset + size) for offset, size in ranges)

    def _member_spans(self, extension: str) -> list[Span | None]:
        """Offset and size of each sample's member with this extension; None without one."""
        return self._index.spans(*(self._member_field(extension, name) for name in SPAN_FIELDS))

    def _member_field(self, extension: str, name: str) -> pa.Array:
        return self._index.column(extension, name).take(pa.array(self.numbers))

    def _check_size(self, members: Mapping[str, Sequence[Span | None]]) -> None:
        """Raise `PartitionTooLargeError`, before any member is read, if they don't fit together."""
        limit = self._max_member_bytes
        nbytes = {
            extension: sum(span[1] for span in spans if span is not None and span[1] <= limit)
            for extension, spans in members.items()
        }
        if nbytes and sum(nbytes.values()) > (largest := self._get_backend().largest_partition):
            most = max(nbytes, key=nbytes.__getitem__)
            raise PartitionTooLargeError(
                f"the members of samples {self.numbers[0]}-{self.numbers[-1]} of {self.url} are "
                f"{sum(nbytes.values()) / 1e9:.1f} GB, most of them of {most!r}, and one partition "
                f"holds at most {largest / 1e9:.1f} GB here. Leave that column out, pass "
                'partition_size="64 MiB" to split shards into more parts, or max_member_bytes= to '
                "replace large members by nulls"
            )

    def _member_column(self, member: MemberColumn, spans: Sequence[Span | None]) -> pa.Array:
        """The column of a member: contents from index or shard, converted to its type."""
        limit = self._max_member_bytes
        contents = self._member_field(member.extension, "content").to_pylist()
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
            contents[row] = bytes(read_member(self._content, self._index, span))
        array, misfits = convert(contents, member.type, member.path)
        advice = "ask for another type with members= or json_fields="
        if misfits and is_array_type(member.type) and member.path is None:
            advice = type_advice(contents[misfits[0]] or b"", member.type) or advice
        is_text = member.type == pa.string() and member.path is None
        if is_text:
            advice = f"members={{..., {member.extension!r}: 'binary'}} keeps their bytes"
        problem = "not UTF-8" if is_text else f"not {type_name(member.type)}"
        self._warn_of_nulls(member, misfits, problem, advice)
        problem = f"larger than max_member_bytes={limit:,}"
        self._warn_of_nulls(member, too_large, problem, "pass a larger one to have them")
        return array

    def _warn_of_nulls(
        self, member: MemberColumn, rows: Sequence[int], problem: str, advice: str
    ) -> None:
        if rows:
            warn_user(
                f"{self.url}: {len(rows)} of {len(self)} values of {member.column!r} are "
                f"{problem} and became null, first that of {self.keys[rows[0]]!r}; {advice}"
            )


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The index of a scanned shard, and the shard as it was listed just before the scan."""

    shard: Shard
    index: ShardIndex


_of_thread = threading.local()


def hand_over(index: HandedOver) -> None:
    """Keep an index for the next step of the task in this thread, in place of an earlier one."""
    _of_thread.index = index


def handed_over_index() -> HandedOver | None:
    """The index that an earlier step of the task handed over; it is given once."""
    index: HandedOver | None = getattr(_of_thread, "index", None)
    _of_thread.index = None
    return index


# A shard is read as a whole if of its first ``_HEAD`` bytes at least ``_LEAST_SEEN`` are complete
# members, of which at most ``_MOST_UNUSED`` are bytes that the query does not need.
_HEAD, _LEAST_SEEN, _MOST_UNUSED = 4 << 20, 0.5, 0.25


@contextmanager
def open_rows(
    shard: Shard,
    index: IndexFile | None,
    options: ReadOptions,
    member_columns: Sequence[MemberColumn],
    sidecar: Sidecar,
    warn: bool,
    hands_over: bool,
    whole: Sequence[ImageMember],
) -> Iterator[SampleRows]:
    """Open all samples of the listed version of a shard; ``warn`` of an index that is not used.

    ``hands_over`` keeps what a header scan finds for the next step of the task, if each member is
    one range of the shard. ``whole`` are the image columns of which every image will be read.
    """
    url, storage_options = shard.url, options.storage_options
    with ExitStack() as opened:
        stored = known_samples(opened, index, storage_options, warn)
        if stored is not None:
            late = opened.enter_context(open_late(shard, storage_options, stored.refuse_other))
            yield SampleRows(url, late, stored, options, member_columns, sidecar)
            return
        # As a lookup of this one shard tells its version, which an export compares: a listing of
        # a folder may tell another.
        alone = find_shards(url, storage_options)[0] if hands_over else None
        content = opened.enter_context(open_shard(url, storage_options, shard))
        if whole:
            needed = functools.partial(_memory_if_needed, content, url, whole, member_columns)
            content.prefetch_into(0, len(content), needed)
        scanned = index_tar(content, url)
        in_memory, reader = content.in_memory(), content
        if len(in_memory) == len(content):
            reader = MemoryReader(in_memory, content.listed_as(url))
        yield SampleRows(url, reader, scanned, options, member_columns, sidecar)
        is_plain = alone is not None and len(content) == alone.size and not scanned.sparse
    # Only now: closing the shard raises if it changed.
    if alone is not None and is_plain:
        hand_over(HandedOver(alone, scanned))


def _memory_if_needed(
    content: ByteReader,
    url: str,
    images: Sequence[ImageMember],
    member_columns: Sequence[MemberColumn],
    nbytes: int,
) -> Any:
    """Memory for a whole shard; None if its first bytes show that much of it is not needed."""
    head = bytes(content[:_HEAD])
    index, _ = index_head(head, url)
    seen = unused = 0
    for sample in index.samples:
        wanted = {image_member(sample, image.extensions) for image in images}
        wanted.update(member.extension for member in member_columns)
        for extension, (offset, size) in sample.members.items():
            seen = max(seen, offset + size)
            unused += 0 if extension in wanted else size
    if index.sparse or seen < _LEAST_SEEN * len(head) or unused > _MOST_UNUSED * seen:
        return None
    return encoded_memory(nbytes)


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
    """Warn that a shard is read without its index, which can't be used.

    Raises
    ------
    ShardError
        If the index is required.
    """
    if index.required:
        raise ShardError(
            f"the index {index.url} can't be used: {error}. Write it with write_index(), or "
            "leave out index=True"
        ) from error
    if warn:
        warn_of_unusable(error, index)
