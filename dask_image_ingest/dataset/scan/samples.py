"""The samples of one shard, whose images and columns are members of a tar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.filters import Filters
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.scan.rows import NO_MEMBER, ImageRows
from dask_image_ingest.dataset.scan.sidecar import Sidecar
from dask_image_ingest.dataset.schema.array_members import is_array_type, type_advice
from dask_image_ingest.dataset.schema.coerce import convert
from dask_image_ingest.dataset.schema.columns import POINTER_COLUMNS, Component
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.decode import (
    LONGEST_EDGE,
    SWAPPED,
    Header,
    Stored,
    header_of,
    read_header,
)
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames import encoded_memory, references_of_fields
from dask_image_ingest.storage import (
    ByteReader,
    has_random_access,
)
from dask_image_ingest.tar import (
    HEAD,
    SPAN_FIELDS,
    Damage,
    ShardIndex,
    Span,
    duplicate_error,
    open_member,
    read_member,
    too_large_error,
)

# How much of a range the images in it have to be, and how large, for all of it to be read at once.
_DENSE, _LEAST_AHEAD = 0.75, 1 << 20

_SHAPE = frozenset({"format", "height", "width", "channels"})
_STORED = ("format", *Stored._fields)


class SampleRows(ImageRows):
    """The samples of one shard.

    What the index knows is taken from there, all else is read from the shard.
    """

    cached = frozenset({"keys", "spans", "headers", "_sidecar_rows"})
    of_image = frozenset({"spans", "headers"})

    def __init__(
        self,
        url: str,
        content: ByteReader,
        index: ShardIndex,
        options: ReadOptions,
        components: Sequence[Component] = (),
        sidecar: Sidecar | None = None,
    ) -> None:
        super().__init__(url, len(index), options)
        self._content = content
        self._index = index
        self._max_member_bytes = options.max_member_bytes
        self._get_backend = options.get_backend
        self._components = {component.column: component for component in components}
        self._sidecar = sidecar

    @cached_property
    def keys(self) -> list[str]:
        keys: list[str] = self.column("__key__").to_pylist()
        return keys

    @cached_property
    def spans(self) -> list[Span | None]:
        """Offset and size of each sample's image; None where it has none."""
        return self._index.spans(self._image("offset"), self._image("size"))

    @cached_property
    def headers(self) -> list[Header]:
        found = self._stored_headers()
        self._announce_heads(
            span for span, header in zip(self.spans, found, strict=True) if header is None
        )
        numbers = self.numbers.tolist()
        return [
            self._header(number, span) if header is None else self._judged(header, number)
            for number, span, header in zip(numbers, self.spans, found, strict=True)
        ]

    @property
    def damage(self) -> Damage | None:
        return self._index.damage

    def other_kinds(self, known: Set[str]) -> set[str]:
        """The kinds of members that are not ``known``, and not the image of each sample."""
        known = {*known}.union(*(each.extensions for each in self._fields.values()))
        return set(self._index.not_preferred(self.extensions)) - known

    def image_bytes(self, row: int) -> Sequence[int] | None:
        span = self.spans[row]
        return None if span is None else read_member(self._content, self._index, span)

    def announce_images(self) -> None:
        """Have the images of these rows fetched, since they will be read soon."""
        self._announce(self.spans)
        spans = [span for span in self.spans if span is not None]
        if spans and not self._index.sparse:
            start, stop = min(spans)[0], max(offset + size for offset, size in spans)
            wanted = sum(size for _, size in spans)
            if max(_LEAST_AHEAD, _DENSE * (stop - start)) <= wanted:
                self._content.prefetch_into(start, stop, encoded_memory)

    def opened(self, row: int) -> Any:
        """The encoded image of one row, read where it is sliced; only of a row that has one."""
        return open_member(self._content, self._index, self.spans[row] or (0, 0))

    def keep(self, filters: Filters | None) -> SampleRows:
        """The rows for which ``filters`` hold, judged by their metadata; first by the sidecar."""
        rows = self
        if filters and self._sidecar is not None:
            kept = self._sidecar.keep(filters, lambda: self._sidecar_rows)
            rows = rows if kept is None else rows.take(kept)
        return super(SampleRows, rows).keep(filters)

    def table(self, columns: Sequence[str]) -> pa.Table:
        """The given metadata columns of every row.

        Raises
        ------
        PartitionTooLargeError
            If the members that are read for them are more than one partition can hold.
        """
        asked = [self._components[name] for name in columns if name in self._components]
        members = {each.extension: self._members(each.extension) for each in asked}
        self._check_size(members)
        made = {each.column: self._component(each, members[each.extension]) for each in asked}
        return self.table_of({n: made[n] if n in made else self.column(n) for n in columns})

    def references(self) -> pa.StructArray:
        shard = self._content.listed_as(self.url)
        size, version = (None, None) if shard is None else (shard.size, shard.version)
        told = {
            "url": self.column("__url__"),
            "shard_size": pa.repeat(pa.scalar(size, pa.int64()), len(self)),
            "version": pa.repeat(pa.scalar(version, pa.string()), len(self)),
            "number": pa.array(self.numbers),
            "key": self.column("__key__"),
            "offset": self.column("offset"),
            "nbytes": self.column("nbytes"),
            "bytes": pa.array(self._carried(), pa.large_binary()),
        }
        return references_of_fields(len(self), told)

    def _carried(self) -> list[bytes | None]:
        """The encoded images where a shard is read from its beginning for each of them."""
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
            return self._shape(name).cast(POINTER_COLUMNS[name])
        return super().column(name)

    @cached_property
    def _sidecar_rows(self) -> list[int]:
        if self._sidecar is None or not len(self):
            return []
        return self._sidecar.rows_of(self.keys)

    def _image(self, name: str) -> pa.Array:
        """One field of each sample's image, as far as the index knows it."""
        return self._index.preferred(self.extensions, name).take(pa.array(self.numbers))

    def _offsets(self) -> pa.Array:
        duplicates, sparse = self._index.duplicates, self._index.sparse
        if not (duplicates or sparse):
            return self._image("offset")
        # No range of bytes in the shard is the content of a sparse member, or of which of two.
        offsets = [
            None if span is None or number in duplicates or span[0] in sparse else span[0]
            for number, span in zip(self.numbers.tolist(), self.spans, strict=True)
        ]
        return pa.array(offsets, pa.int64())

    @property
    def _are_measured(self) -> bool:
        measured, there = self._image("needs_pillow"), self._image("size")
        return bool(measured.null_count == there.null_count)

    def _shape(self, name: str) -> pa.Array:
        """As `header_of` finds it, for all rows at once."""
        if name == "format":
            return self._image(name)
        height, width = self._image("height"), self._image("width")
        known = pc.and_(pc.less_equal(height, LONGEST_EDGE), pc.less_equal(width, LONGEST_EDGE))
        if name == "channels":
            column = self._image(name)
        else:
            swapped = pc.is_in(self._image("orientation"), pa.array(SWAPPED, pa.int8()))
            one, other = (height, width) if name == "height" else (width, height)
            column = pc.if_else(swapped, other, one)
        return pc.if_else(known, column, pa.scalar(None, column.type))

    def _stored_headers(self) -> list[Header | None]:
        """The headers that the index knows."""
        measured = self._image("needs_pillow")
        if measured.null_count == len(self):
            return [None] * len(self)
        fields = (self._image(name).to_pylist() for name in _STORED)
        return [
            None
            if known is None
            else header_of(field[0], Stored(*field[1:]), self._decoding.max_pixels)
            for known, field in zip(measured.to_pylist(), zip(*fields, strict=True), strict=True)
        ]

    def _header(self, number: int, span: Span | None) -> Header:
        if span is None:
            return NO_MEMBER
        if error := too_large_error(self._index, span):
            return Header(None, None, None, None, error, True)
        content = open_member(self._content, self._index, span)
        return self._judged(read_header(content, self._decoding.max_pixels), number)

    def _judged(self, header: Header, number: int) -> Header:
        header = self._decoding.validated(header)
        if header.error is None and (twice := self._index.duplicates.get(number)):
            return header._replace(error=duplicate_error(twice))
        return header

    def _announce_heads(self, spans: Iterable[Span | None]) -> None:
        self._announce(span and (span[0], min(span[1], HEAD)) for span in spans)

    def _announce(self, spans: Iterable[Span | None]) -> None:
        sparse = self._index.sparse
        found = (span for span in spans if span is not None and span[0] not in sparse)
        self._content.prefetch((offset, offset + size) for offset, size in found)

    def _members(self, extension: str) -> list[Span | None]:
        """Offset and size of each sample's member of a kind."""
        return self._index.spans(*(self._of_kind(extension, name) for name in SPAN_FIELDS))

    def _of_kind(self, extension: str, name: str) -> pa.Array:
        return self._index.column(extension, name).take(pa.array(self.numbers))

    def _check_size(self, members: Mapping[str, Sequence[Span | None]]) -> None:
        """Refuse members that can't be held together, before any is read."""
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
                "have large members as nulls"
            )

    def _component(self, component: Component, spans: Sequence[Span | None]) -> pa.Array:
        limit = self._max_member_bytes
        contents = self._of_kind(component.extension, "content").to_pylist()
        too_large = [row for row, span in enumerate(spans) if span is not None and span[1] > limit]
        unknown = [
            (row, span)
            for row, (span, known) in enumerate(zip(spans, contents, strict=True))
            if span is not None and span[1] <= limit and known is None
        ]
        for row in too_large:
            contents[row] = None
        self._announce(span for _, span in unknown)
        for row, span in unknown:
            contents[row] = bytes(read_member(self._content, self._index, span))
        array, misfits = convert(contents, component.type, component.path)
        advice = "ask for another type with components= or json_fields="
        if misfits and is_array_type(component.type) and component.path is None:
            advice = type_advice(contents[misfits[0]] or b"", component.type) or advice
        self._warn_of_nulls(component, misfits, f"not {component.type}", advice)
        what = f"larger than max_member_bytes={limit:,}", "pass a larger one to have them"
        self._warn_of_nulls(component, too_large, *what)
        return array

    def _warn_of_nulls(
        self, component: Component, rows: Sequence[int], are: str, advice: str
    ) -> None:
        if rows:
            warn_user(
                f"{self.url}: {len(rows)} of {len(self)} values of {component.column!r} are {are} "
                f"and became null, first that of {self.keys[rows[0]]!r}; {advice}"
            )
