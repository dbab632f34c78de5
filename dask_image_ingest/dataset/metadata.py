"""One shard's samples as a table of metadata: everything about an image except its pixels."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.conversion import convert
from dask_image_ingest.dataset.filters import Filters, columns_of, matching
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.pointers import NO_MEMBER
from dask_image_ingest.dataset.row_pointers import RowPointer, as_texts
from dask_image_ingest.dataset.schema import POINTER_COLUMNS, Component, image_member
from dask_image_ingest.dataset.sidecar import Sidecar
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.decode import Header, Origin, read_header
from dask_image_ingest.storage import LazyBytes, announce, as_listed
from dask_image_ingest.tar import (
    HEAD,
    LARGEST_VALUE,
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

# The properties of SampleRows that are computed once, and keep their values when rows are taken.
_CACHED = frozenset({"samples", "spans", "headers", "_sidecar_rows"})

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
        content: LazyBytes,
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
        self._components = {component.column: component for component in components}
        self._sidecar = sidecar

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples of these rows."""
        samples = self._index.samples
        return [samples[number] for number in self.numbers.tolist()]

    @cached_property
    def spans(self) -> list[Span | None]:
        """Where each sample's image lies; None where it has none."""
        extensions = self._image_extensions
        return [
            sample.members[extension] if (extension := image_member(sample, extensions)) else None
            for sample in self.samples
        ]

    @cached_property
    def headers(self) -> list[Header]:
        """What the first bytes of each image tell."""
        self._announce_heads(self.spans)
        with gc_paused():
            return [
                self._header(sample, span)
                for sample, span in zip(self.samples, self.spans, strict=True)
            ]

    @property
    def damage(self) -> Damage | None:
        """What is wrong with the shard."""
        return self._index.damage

    def other_kinds(self, known: Set[str]) -> set[str]:
        """The kinds of members that are not ``known``, and not the image of each sample."""
        others: set[str] = set()
        for sample in self.samples:
            if unknown := sample.members.keys() - known:
                others.update(unknown - {image_member(sample, self._image_extensions)})
        return others

    def image_bytes(self, row: int) -> Sequence[int] | None:
        """The encoded image of one row."""
        span = self.spans[row]
        return None if span is None else read_member(self._content, self._index, span)

    def announce_images(self) -> None:
        """Have the images of these rows fetched, since they will be read soon."""
        self._announce(self.spans)

    def opened(self, row: int) -> Any:
        """The encoded image of one row, read where it is sliced; only of a row that has one."""
        return open_member(self._content, self._index, self.spans[row] or (0, 0))

    def origin(self, row: int) -> Origin:
        """Which sample of which shard a row is."""
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
        return taken

    def table(self, columns: Sequence[str]) -> pa.Table:
        """The given metadata columns of every row."""
        with gc_paused():
            arrays = [self.column(name) for name in columns]
        if not arrays:
            return pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table(arrays, names=list(columns))

    def pointers(self) -> pa.Array:
        """A pointer to each row, for a decode that comes later."""
        shard = as_listed(self.url, self._content)
        rows = zip(self.numbers.tolist(), self.samples, self.spans, strict=True)
        return as_texts(self._pointer(*row, shard) for row in rows)

    def _pointer(self, number: int, sample: Sample, span: Span | None, shard: Any) -> RowPointer:
        offset = self._offset(sample, span)
        place = None if span is None or offset is None else (offset, span[1])
        return RowPointer(number, place, sample.key, self.url, shard)

    def column(self, name: str) -> pa.Array:
        """One metadata column."""
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
        if self._sidecar is not None and name in self._sidecar:
            return self._sidecar.column(name, self._sidecar_rows)
        return self._component(self._components[name])

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
        announce(self._content, ((offset, offset + size) for offset, size in found))

    def _members(self, extension: str) -> list[Span | None]:
        """Where each sample's member of a kind lies."""
        return [sample.members.get(extension) for sample in self.samples]

    def _known(self, extension: str) -> list[bytes | None]:
        """What each of these members holds, where that is known without reading it."""
        return [None] * len(self)

    def _component(self, component: Component) -> pa.Array:
        spans, contents = self._members(component.extension), self._known(component.extension)
        unknown = [
            row
            for row, (span, known) in enumerate(zip(spans, contents, strict=True))
            if span is not None and known is None
        ]
        self._announce(spans[row] for row in unknown)
        failed = []
        for row in unknown:
            span = spans[row] or (0, 0)
            if span[1] > LARGEST_VALUE:
                failed.append(row)
            else:
                contents[row] = bytes(read_member(self._content, self._index, span))
        array, misfits = convert(contents, component.type, component.path)
        if failed := sorted(failed + misfits):
            warn_user(
                f"{self.url}: {len(failed)} of {len(contents)} values of {component.column!r} are "
                f"not {component.type} and became null, first that of "
                f"{self.samples[failed[0]].key!r}; ask for another type with components= or "
                "json_fields="
            )
        return array
