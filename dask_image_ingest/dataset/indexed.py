"""The samples of a shard that has an index: columns come from there, and no tar is opened."""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.schema import POINTER_COLUMNS, Component
from dask_image_ingest.dataset.sidecar import Sidecar
from dask_image_ingest.decode import LONGEST_EDGE, SWAPPED, Header, Stored, header_of
from dask_image_ingest.index import FIELDS, StoredIndex
from dask_image_ingest.storage import LazyBytes
from dask_image_ingest.tar import Sample, Span

__all__ = ["IndexedRows"]

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
        content: LazyBytes,
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
        """Where each sample's image lies; None where it has none."""
        return self._stored.joined(self._image("offset"), self._image("size"))

    @cached_property
    def headers(self) -> list[Header]:
        """What the first bytes of each image tell."""
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
        """Whether each sample has a member of one of these kinds."""
        none = pa.repeat(pa.scalar(False), len(self._stored))
        return functools.reduce(pc.or_, map(self._stored.has, extensions), none)

    def _image(self, name: str) -> pa.Array:
        """What is known of each sample's image."""
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
