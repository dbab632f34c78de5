"""The index of a shard in an index file; columns are read on first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.index.index_file import KEY, ShardFacts, UnusableIndexError
from dask_image_ingest.storage import ByteReader
from dask_image_ingest.tar import SPAN_FIELDS, Damage, Places, ShardIndex, Skipped, SparseMember


class IndexedReader(ByteReader):
    """Reader that takes small members from the index, and all other bytes from the shard."""

    def __init__(self, index: StoredIndex, content: ByteReader) -> None:
        self._index = index
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        stored = self._stored.get(part.start)
        if stored is not None and len(stored) == part.stop - part.start:
            return stored
        return self._content[part]

    @cached_property
    def _stored(self) -> dict[int, bytes]:
        """Offset → member; empty if the index is damaged: the shard has the bytes, too."""
        try:
            return self._stored_members()
        except UnusableIndexError:
            return {}

    def _stored_members(self) -> dict[int, bytes]:
        index = self._index
        return {
            offset: content
            for extension in index.extensions
            for offset, content in zip(
                index.column(extension, "offset").to_pylist(),
                index.column(extension, "content").to_pylist(),
                strict=True,
            )
            if content is not None and offset not in index.sparse
        }


class StoredIndex(ShardIndex):
    """Index of a shard in an index file of ``nbytes``; ``read`` reads a column by its name."""

    def __init__(self, facts: ShardFacts, nbytes: int, read: Callable[[str], pa.Array]) -> None:
        super().__init__(
            places=_places_without_columns(facts.rest),
            duplicates={row: tuple(extensions) for row, extensions in facts.duplicates},
            sparse={
                offset: SparseMember(size, tuple((start, length) for start, length in pieces))
                for offset, size, pieces in facts.sparse
            },
            damage=None if facts.damage is None else Damage(**facts.damage),
            interleaved=tuple(facts.interleaved),
            repeated=tuple(facts.repeated),
            members=facts.members,
            pax=facts.pax,
            skipped={code: Skipped(*members) for code, members in facts.skipped.items()},
            links=_links(facts.links),
        )
        self.nbytes = nbytes
        self.facts = facts
        self._fields = facts.extensions
        self._read = read
        self._loaded: dict[str, pa.Array] = {}

    def __len__(self) -> int:
        return self.facts.samples

    @cached_property
    def keys(self) -> pa.Array:
        """The key of each sample."""
        return self._read(KEY)

    @cached_property
    def extensions(self) -> list[str]:
        """The extensions, those without columns last."""
        return [*self._fields, *self._places]

    def places(self, extension: str) -> Places:
        """Rows, offsets and sizes of the members of an extension."""
        if extension not in self._fields:
            return super().places(extension)
        offsets, sizes = (self.column(extension, name) for name in SPAN_FIELDS)
        rows = np.flatnonzero(offsets.is_valid().to_numpy(zero_copy_only=False))
        return Places(rows, offsets.drop_null().to_numpy(), sizes.drop_null().to_numpy())

    def column(self, extension: str, name: str) -> pa.Array:
        """A field of an extension's members: one value per sample, null if unknown."""
        if name not in self._fields.get(extension, ()):
            return super().column(extension, name)
        name = f"{extension}/{name}"
        if name not in self._loaded:
            self._loaded[name] = self._read(name)
        return self._loaded[name]


def _links(entries: list[list[Any]]) -> dict[int, dict[str, str]]:
    """`ShardFacts.links` as the links of each row."""
    links: dict[int, dict[str, str]] = {}
    for row, extension, description in entries:
        links.setdefault(row, {})[extension] = description
    return links


def _places_without_columns(entries: list[list[Any]]) -> dict[str, Places]:
    """`ShardFacts.rest` as the places of each extension."""
    places: dict[str, list[list[int]]] = {}
    for row, extension, offset, size in entries:
        places.setdefault(extension, []).append([row, offset, size])
    return {name: Places(*np.array(members, np.int64).T) for name, members in places.items()}
