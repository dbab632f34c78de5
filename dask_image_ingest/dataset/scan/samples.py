"""The samples of one shard as a table of metadata: all about an image except its pixels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.filters import Filters, columns_of, matching
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.scan.sidecar import Sidecar
from dask_image_ingest.dataset.schema.coerce import convert
from dask_image_ingest.dataset.schema.columns import POINTER_COLUMNS, Component, image_member
from dask_image_ingest.dataset.schema.image_columns import ImageMember
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.decode import (
    LONGEST_EDGE,
    SWAPPED,
    Header,
    Origin,
    Stored,
    header_of,
    read_header,
)
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames import REFERENCE, encoded_memory
from dask_image_ingest.index import FIELDS, StoredIndex
from dask_image_ingest.storage import (
    ByteReader,
    has_random_access,
)
from dask_image_ingest.tar import (
    HEAD,
    Damage,
    Sample,
    Span,
    TarIndex,
    duplicate_error,
    gc_paused,
    open_member,
    read_member,
    too_large_error,
)

__all__ = ["IndexedRows"]

# The properties of SampleRows that are computed once, and keep their values when rows are taken.
_CACHED = frozenset({"samples", "spans", "headers", "_sidecar_rows"})
_OF_IMAGE = frozenset({"spans", "headers"})

# How much of a range the images in it have to be, and how large, for all of it to be read at once.
_DENSE, _LEAST_AHEAD = 0.75, 1 << 20

#: What is known of an image that its sample does not have.
NO_MEMBER = Header(
    None, None, None, None, "missing: the sample has no image member", needs_pillow=True
)

_LARGEST_INT64 = 2**63 - 1
_HEADER_COLUMNS = frozenset(Header._fields) & frozenset(POINTER_COLUMNS)


class SampleRows:
    """The samples of one shard, whose columns are made when they are asked for.

    ``keep`` and ``take`` give some of them, with what is known already, so that no byte is looked
    at twice and none for rows that are gone.
    """

    def __init__(
        self,
        url: str,
        content: ByteReader,
        index: TarIndex,
        options: ReadOptions,
        components: Sequence[Component] = (),
        sidecar: Sidecar | None = None,
    ) -> None:
        self.url = url
        self.numbers = np.arange(len(index.samples))
        self._content = content
        self._index = index
        self._image_extensions = options.image_extensions
        self._decoding = options.decoding
        self._max_member_bytes = options.max_member_bytes
        self._get_backend = options.get_backend
        self._components = {component.column: component for component in components}
        self._sidecar = sidecar
        self._fields = {f: each for each in options.other_images for f in each.fields()}
        self._others: dict[str, SampleRows] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples of these rows."""
        samples = self._index.samples
        return [samples[number] for number in self.numbers.tolist()]

    @cached_property
    def spans(self) -> list[Span | None]:
        """Offset and size of each sample's image; None where it has none."""
        extensions = self._image_extensions
        return [
            sample.members[extension] if (extension := image_member(sample, extensions)) else None
            for sample in self.samples
        ]

    @cached_property
    def headers(self) -> list[Header]:
        """The header of each image."""
        self._announce_heads(self.spans)
        with gc_paused():
            return [
                self._header(sample, span)
                for sample, span in zip(self.samples, self.spans, strict=True)
            ]

    def of(self, member: ImageMember) -> SampleRows:
        """The same rows, whose image is another member."""
        rows = self._others.get(member.column)
        if rows is None:
            rows = copy.copy(self)
            rows._image_extensions, rows._decoding = member.extensions, member.decoding
            rows._fields, rows._others = {}, {}
            for name in _OF_IMAGE & rows.__dict__.keys():
                del rows.__dict__[name]
            self._others[member.column] = rows
        return rows

    @property
    def damage(self) -> Damage | None:
        """The damage of the shard."""
        return self._index.damage

    def other_kinds(self, known: Set[str]) -> set[str]:
        """The kinds of members that are not ``known``, and not the image of each sample."""
        others: set[str] = set()
        known = {*known}.union(*(each.extensions for each in self._fields.values()))
        kinds = others.union(*[sample.members for sample in self.samples])
        images = kinds.intersection(self._image_extensions)
        if len(images) < 2:  # where there is one, it is the image of each sample that has it
            return kinds - known - images
        for sample in self.samples:
            if unknown := sample.members.keys() - known:
                others.update(unknown - {image_member(sample, self._image_extensions)})
        return others

    def image_bytes(self, row: int) -> Sequence[int] | None:
        """The encoded image of one row."""
        span = self.spans[row]
        return None if span is None else read_member(self._content, self._index, span)

    def decoded_bytes(self) -> int:
        """Bytes that all images of these rows decode to, by their headers."""
        nbytes = sum(map(self._decoding.nbytes, self.headers))
        members = {each.column: each for each in self._fields.values()}
        return nbytes + sum(self.of(each).decoded_bytes() for each in members.values())

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

    def origin(self, row: int) -> Origin:
        """The shard and the sample of a row."""
        return Origin(self.url, int(self.numbers[row]), f"sample {self.samples[row].key!r}")

    def keep(self, filters: Filters | None) -> SampleRows:
        """The rows for which ``filters`` hold, judged by their metadata."""
        if not filters:
            return self
        rows = self
        if self._sidecar is not None:
            kept = self._sidecar.keep(filters, lambda: self._sidecar_rows)
            rows = rows if kept is None else rows.take(kept)
        return rows.take(matching(rows.table(sorted(columns_of(filters))), filters))

    def take(self, rows: np.ndarray | range) -> SampleRows:
        """The given rows, by position."""
        positions = np.asarray(rows, dtype=np.int64)
        if len(positions) == len(self):
            return self
        taken = copy.copy(self)
        taken.numbers = self.numbers[positions]
        for name in _CACHED & self.__dict__.keys():
            values = self.__dict__[name]
            taken.__dict__[name] = [values[position] for position in positions.tolist()]
        taken._others = {name: each.take(positions) for name, each in self._others.items()}
        return taken

    def table(self, columns: Sequence[str]) -> pa.Table:
        """The given metadata columns of every row.

        Raises
        ------
        PartitionTooLargeError
            If the members that are read for them are more than one partition can hold.
        """
        with gc_paused():
            asked = [self._components[name] for name in columns if name in self._components]
            members = {each.extension: self._members(each.extension) for each in asked}
            self._check_size(members)
            made = {each.column: self._component(each, members[each.extension]) for each in asked}
            arrays = [made[name] if name in made else self.column(name) for name in columns]
        if not arrays:
            return pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table(arrays, names=list(columns))

    def references(self) -> pa.StructArray:
        """A reference to the image of each row, for a decode that comes later."""
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
        fields = [told[field.name].cast(field.type) for field in REFERENCE]
        return pa.StructArray.from_arrays(fields, fields=list(REFERENCE))

    def _carried(self) -> list[bytes | None]:
        """The encoded images where a shard is read from its beginning for each of them."""
        if has_random_access(self.url):
            return [None] * len(self)
        return [
            None
            if span is None or sample.duplicates or too_large_error(self._index, span)
            else bytes(read_member(self._content, self._index, span))
            for sample, span in zip(self.samples, self.spans, strict=True)
        ]

    def column(self, name: str) -> pa.Array:
        """One metadata column, other than those of members."""
        if name == "__key__":
            return pa.array([sample.key for sample in self.samples], pa.string())
        if name == "__url__":
            return pa.repeat(pa.scalar(self.url, pa.string()), len(self))
        if name == "offset":
            return pa.array(map(self._offset, self.samples, self.spans), pa.int64())
        if name == "nbytes":
            sizes = [span and min(span[1], _LARGEST_INT64) for span in self.spans]
            return pa.array(sizes, pa.int64())
        if name in _HEADER_COLUMNS:
            position = Header._fields.index(name)
            return pa.array([header[position] for header in self.headers], POINTER_COLUMNS[name])
        if (member := self._fields.get(name)) is not None:
            return self.of(member).column(name.removeprefix(f"{member.column}."))
        if self._sidecar is None:
            raise KeyError(name)
        return self._sidecar.column(name, self._sidecar_rows)

    @cached_property
    def _sidecar_rows(self) -> list[int]:
        if self._sidecar is None or not len(self):
            return []
        return self._sidecar.rows([sample.key for sample in self.samples])

    def _offset(self, sample: Sample, span: Span | None) -> int | None:
        # No range of bytes in the shard is the content of a sparse member, or of which of two.
        if span is None or sample.duplicates or span[0] in self._index.sparse:
            return None
        return span[0]

    def _header(self, sample: Sample, span: Span | None) -> Header:
        if span is None:
            return NO_MEMBER
        if error := too_large_error(self._index, span):
            return Header(None, None, None, None, error, True)
        content = open_member(self._content, self._index, span)
        return self._judged(read_header(content, self._decoding.max_pixels), sample)

    def _judged(self, header: Header, sample: Sample) -> Header:
        header = self._decoding.judged(header)
        if sample.duplicates and header.error is None:
            return header._replace(error=duplicate_error(sample))
        return header

    def _announce_heads(self, spans: Iterable[Span | None]) -> None:
        self._announce(span and (span[0], min(span[1], HEAD)) for span in spans)

    def _announce(self, spans: Iterable[Span | None]) -> None:
        sparse = self._index.sparse
        found = (span for span in spans if span is not None and span[0] not in sparse)
        self._content.prefetch((offset, offset + size) for offset, size in found)

    def _members(self, extension: str) -> list[Span | None]:
        """Offset and size of each sample's member of a kind."""
        return [sample.members.get(extension) for sample in self.samples]

    def _known(self, extension: str) -> list[bytes | None]:
        """The content of each of these members, as far as it is known without reading it."""
        return [None] * len(self)

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
        contents, limit = self._known(component.extension), self._max_member_bytes
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
        what = f"not {component.type}", "ask for another type with components= or json_fields="
        self._warn_of_nulls(component, misfits, *what)
        what = f"larger than max_member_bytes={limit:,}", "pass a larger one to have them"
        self._warn_of_nulls(component, too_large, *what)
        return array

    def _warn_of_nulls(
        self, component: Component, rows: Sequence[int], are: str, advice: str
    ) -> None:
        if rows:
            warn_user(
                f"{self.url}: {len(rows)} of {len(self)} values of {component.column!r} are {are} "
                f"and became null, first that of {self.samples[rows[0]].key!r}; {advice}"
            )


_SHAPE = frozenset({"format", "height", "width", "channels"})
_STORED = ("format", *Stored._fields)


class IndexedRows(SampleRows):
    """`SampleRows` whose facts are read off an index.

    What the index does not know (large members, images whose format not every machine reads) is
    read from the shard.
    """

    def __init__(
        self,
        url: str,
        content: ByteReader,
        index: StoredIndex,
        options: ReadOptions,
        components: Sequence[Component] = (),
        sidecar: Sidecar | None = None,
    ) -> None:
        super().__init__(url, content, index.tar, options, components, sidecar)
        self.numbers = np.arange(len(index))
        self._stored = index

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples of these rows."""
        return self._stored.samples(self.numbers)

    @cached_property
    def spans(self) -> list[Span | None]:
        """Offset and size of each sample's image; None where it has none."""
        return self._stored.joined(self._image("offset"), self._image("size"))

    @cached_property
    def headers(self) -> list[Header]:
        """The header of each image."""
        told = zip(*(self._image(name).to_pylist() for name in _STORED), strict=True)
        stored = [None if facts[_STORED.index("needs_pillow")] is None else facts for facts in told]
        unknown = (span for span, facts in zip(self.spans, stored, strict=True) if facts is None)
        self._announce_heads(unknown)
        found = []
        for sample, span, facts in zip(self.samples, self.spans, stored, strict=True):
            if facts is None:
                found.append(self._header(sample, span))
            else:
                header = header_of(facts[0], Stored(*facts[1:]), self._decoding.max_pixels)
                found.append(self._judged(header, sample))
        return found

    def other_kinds(self, known: Set[str]) -> set[str]:
        """The kinds of members that are not ``known``, and not the image of each sample."""
        others = set()
        known = {*known}.union(*(each.extensions for each in self._fields.values()))
        images = self._images
        for extension in self._stored.extensions:
            if extension in known:
                continue
            there = self._stored.has(extension)
            if extension in images:
                # It is the image of its sample, unless one is preferred.
                there = pc.and_(there, self._has_any(images[: images.index(extension)]))
            if pc.any(there).as_py():
                others.add(extension)
        return others

    def column(self, name: str) -> pa.Array:
        """One metadata column."""
        if name == "__key__":
            return self._stored.keys.take(pa.array(self.numbers))
        if name == "nbytes":
            return self._image("size")
        if name == "offset" and not (self._stored.duplicates or self._index.sparse):
            return self._image("offset")
        if name in _SHAPE and self._are_measured:
            return self._shape(name).cast(POINTER_COLUMNS[name])
        return super().column(name)

    @property
    def _images(self) -> list[str]:
        """The kinds of members that are images and occur here, the preferred one first."""
        there = set(self._stored.extensions)
        return [extension for extension in self._image_extensions if extension in there]

    def _has_any(self, extensions: Sequence[str]) -> pa.Array:
        """Mark samples that have a member of one of these kinds."""
        none = pa.repeat(pa.scalar(False), len(self._stored))
        return functools.reduce(pc.or_, map(self._stored.has, extensions), none)

    def _image(self, name: str) -> pa.Array:
        """One stored fact about each sample's image."""
        rows, images = pa.array(self.numbers), self._images
        if not images:
            return pa.nulls(len(self), FIELDS[name])
        *preferred, last = images
        column = self._stored.column(last, name).take(rows)
        for extension in reversed(preferred):
            there = self._stored.has(extension).take(rows)
            column = pc.if_else(there, self._stored.column(extension, name).take(rows), column)
        return column

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

    def _members(self, extension: str) -> list[Span | None]:
        return self._stored.spans(extension, pa.array(self.numbers))

    def _known(self, extension: str) -> list[bytes | None]:
        column = self._stored.column(extension, "content")
        known: list[bytes | None] = column.take(pa.array(self.numbers)).to_pylist()
        return known
