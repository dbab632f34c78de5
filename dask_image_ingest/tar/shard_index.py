"""The index of a shard: where its samples' members lie, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.tar.headers import SparseMember
from dask_image_ingest.tar.scan import Damage

#: Of every kind of member.
SPAN_FIELDS = {"offset": pa.int64(), "size": pa.int64()}

#: What an index may know of the members of a kind. A null ``needs_pillow``: the image was not
#: measured.
FIELDS = {
    **SPAN_FIELDS,
    "format": pa.string(),
    "height": pa.int64(),
    "width": pa.int64(),
    "channels": pa.int32(),
    "orientation": pa.int8(),
    "needs_pillow": pa.bool_(),
    "error": pa.string(),
    "content": pa.large_binary(),
}

# Offset and size of a member's bytes in the (decompressed) shard.
Span = tuple[int, int]


class Places(NamedTuple):
    """Places of the members of one kind: int64 arrays of one length, in the order of ``rows``."""

    rows: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray


_NOWHERE = Places(*(np.empty(0, np.int64) for _ in Places._fields))


@dataclass(slots=True)
class Sample:
    """The members of a shard that share a key.

    Attributes
    ----------
    key
        Folders included, extension excluded.
    members
        Extension, in lower case and without its first dot → where the bytes are; in the order of
        the shard.
    duplicates
        Extensions that occurred more than once in a row of members of this key; ``members`` has
        their first occurrence.
    """

    key: str
    members: dict[str, Span]
    duplicates: tuple[str, ...] = ()


class ShardIndex:
    """The samples of a shard, a row for each, and what is wrong with it.

    Parameters
    ----------
    keys
        The key of each sample, in the order of their first members.
    places
        Extension → where the members of this kind lie.
    duplicates
        Row → extensions that its sample has more than once.
    sparse
        Where a sparse member's bytes begin → how it is stored. Its size as a column has it ends at
        the largest int64, which some of them claim to exceed.
    damage
        None for a complete shard; every whole member before the damage is in the samples.
    interleaved
        Keys that came back after another key, and were joined to their earlier members.
    repeated
        Keys that came back with a member that they had already: each time, a sample of its own.
    members
        How many regular files there are, those included that belong to no sample.
    pax
        How many members have a PAX header of their own.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        places: Mapping[str, Places] | None = None,
        *,
        duplicates: Mapping[int, tuple[str, ...]] | None = None,
        sparse: Mapping[int, SparseMember] | None = None,
        damage: Damage | None = None,
        interleaved: tuple[str, ...] = (),
        repeated: tuple[str, ...] = (),
        members: int = 0,
        pax: int = 0,
    ) -> None:
        self.duplicates = duplicates or {}
        self.sparse = sparse or {}
        self.damage = damage
        self.interleaved = interleaved
        self.repeated = repeated
        self.members = members
        self.pax = pax
        self._keys = keys
        self._places = places or {}
        self._columns: dict[tuple[str, str], pa.Array] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @cached_property
    def keys(self) -> pa.Array:
        """The key of each sample."""
        return pa.array(self._keys, pa.string())

    @cached_property
    def extensions(self) -> list[str]:
        """The kinds of members, in the order in which the samples have them."""
        firsts = {kind: (each.rows[0], each.offsets[0]) for kind, each in self._places.items()}
        return sorted(firsts, key=firsts.__getitem__)

    def places(self, extension: str) -> Places:
        """Places of the members of a kind."""
        return self._places.get(extension, _NOWHERE)

    def all_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All members: row, number in `extensions`, offset and size; by row, then offset."""
        places = [self.places(extension) for extension in self.extensions] or [_NOWHERE]
        rows, offsets, sizes = map(np.concatenate, zip(*places, strict=True))
        kinds = np.repeat(np.arange(len(places)), [len(each.rows) for each in places])
        order = np.lexsort((offsets, rows))
        return rows[order], kinds[order], offsets[order], sizes[order]

    def column(self, extension: str, name: str) -> pa.Array:
        """A field of the members of a kind: a value for each sample, null if unknown."""
        if name not in SPAN_FIELDS:
            return pa.nulls(len(self), FIELDS[name])
        if (extension, name) not in self._columns:
            rows, offsets, sizes = self.places(extension)
            values, nulls = np.zeros(len(self), np.int64), np.ones(len(self), bool)
            values[rows] = offsets if name == "offset" else sizes
            nulls[rows] = False
            self._columns[extension, name] = pa.array(values, mask=nulls)
        return self._columns[extension, name]

    def has(self, *extensions: str) -> pa.Array:
        """True for each sample that has a member of one of these kinds."""
        there = [pc.is_valid(self.column(kind, "offset")) for kind in self._found(extensions)]
        return reduce(pc.or_, there) if there else pa.repeat(pa.scalar(False), len(self))

    def preferred(self, extensions: Sequence[str], name: str) -> pa.Array:
        """A field of each sample's first member among these kinds, the preferred one first."""
        found = self._found(extensions)
        if not found:
            return pa.nulls(len(self), FIELDS[name])
        *preferred, last = found
        column = self.column(last, name)
        for extension in reversed(preferred):
            column = pc.if_else(self.has(extension), self.column(extension, name), column)
        return column

    def not_preferred(self, *choices: Sequence[str]) -> list[str]:
        """The kinds of which a sample has a member that is the `preferred` one of no choice."""
        others = []
        for kind in self.extensions:
            chosen = [choice for choice in choices if kind in choice]
            # It is the preferred one, unless there is one before it.
            before = [self.has(*choice[: choice.index(kind)]) for choice in chosen]
            if not chosen or pc.any(reduce(pc.and_, before, self.has(kind))).as_py():
                others.append(kind)
        return others

    def first_spans(self, extension: str, count: int) -> list[Span]:
        """Offset and size of the first members of a kind."""
        _, offsets, sizes = self.places(extension)
        spans = self.spans(pa.array(offsets[:count]), pa.array(sizes[:count]))
        return [span for span in spans if span is not None]

    def spans(self, offsets: pa.Array, sizes: pa.Array) -> list[Span | None]:
        """Offsets and sizes, as columns have them, as spans; the true sizes of sparse members."""
        pairs = zip(offsets.to_pylist(), sizes.to_pylist(), strict=True)
        if not self.sparse:
            return [None if pair[0] is None else pair for pair in pairs]
        return [None if at is None else (at, self._true_size(at, size)) for at, size in pairs]

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples one by one, for what looks at all members of each."""
        found = [Sample(key, {}) for key in self.keys.to_pylist()]
        kinds = self.extensions
        members = (values.tolist() for values in self.all_places())
        for row, kind, offset, size in zip(*members, strict=True):
            size = self._true_size(offset, size) if self.sparse else size
            found[row].members[kinds[kind]] = offset, size
        for row, extensions in self.duplicates.items():
            found[row].duplicates = extensions
        return found

    def first(self, count: int) -> ShardIndex:
        """The index of the first samples, with the places of their members alone."""
        places = {extension: self.places(extension) for extension in self.extensions}
        return ShardIndex(
            self.keys.slice(0, count).to_pylist(),
            {
                extension: Places(*(values[each.rows < count] for values in each))
                for extension, each in places.items()
                if (each.rows < count).any()
            },
            duplicates={row: twice for row, twice in self.duplicates.items() if row < count},
            sparse=self.sparse,
            damage=self.damage,
            interleaved=self.interleaved,
            repeated=self.repeated,
            members=self.members,
            pax=self.pax,
        )

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(self.extensions)

    def _found(self, extensions: Sequence[str]) -> list[str]:
        return [extension for extension in extensions if extension in self._kinds]

    def _true_size(self, offset: int, size: int) -> int:
        sparse = self.sparse.get(offset)
        return size if sparse is None else sparse.size
