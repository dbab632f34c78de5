"""The index of a shard, column by column: each is read when it is asked for.

The table has a row per sample: ``__key__``, and for each kind of member ``<extension>/offset`` and
``<extension>/size``; of images what their first bytes tell, as it is stored (before orientation);
of texts and labels their ``content``. What is rare, and what is known of the shard as a whole,
stands as JSON in the metadata of the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.storage import ByteReader
from dask_image_ingest.tar import Damage, Sample, Span, TarIndex, gc_paused

__all__ = [
    "FIELDS",
    "FORMAT",
    "KEY",
    "METADATA",
    "SPAN_FIELDS",
    "IndexedReader",
    "ShardFacts",
    "StoredIndex",
    "UnusableIndexError",
    "broken",
]


class IndexedReader(ByteReader):
    """Reader that takes small members from the index of a shard, and the rest from the shard."""

    def __init__(self, index: StoredIndex, content: ByteReader) -> None:
        self._index = index
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        known = self._known.get(part.start)
        if known is not None and len(known) == part.stop - part.start:
            return known
        return self._content[part]

    @cached_property
    def _known(self) -> dict[int, bytes]:
        """Offset → the member that begins there; nothing where that can't be read."""
        try:
            return self._contents()
        except UnusableIndexError:
            return {}

    def _contents(self) -> dict[int, bytes]:
        index = self._index
        return {
            offset: content
            for extension in index.extensions
            for offset, content in zip(
                index.column(extension, "offset").to_pylist(),
                index.column(extension, "content").to_pylist(),
                strict=True,
            )
            if content is not None and offset not in index.tar.sparse
        }


#: Changes with the layout: an index of another one is written anew.
FORMAT = 1

#: Where in the metadata of the schema the facts are.
METADATA = b"image-ingest.index"

KEY = "__key__"

#: Of every kind of member.
SPAN_FIELDS = {"offset": pa.int64(), "size": pa.int64()}

#: Of a kind of member, as far as it has them. A null ``needs_pillow``: the image was not measured.
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


class UnusableIndexError(Exception):
    """An index that can't be used, with the reason."""


def broken(why: str) -> UnusableIndexError:
    """Error of an index that this package can't have written as it is."""
    return UnusableIndexError(f"it is broken: {why}. write_index(overwrite=True) writes it anew")


@dataclass
class ShardFacts:
    """Facts about a shard as a whole, and rare ones about its samples, as JSON has them.

    Attributes
    ----------
    size, version
        Those of the shard when the index was made.
    samples, members, pax, damage, interleaved, repeated
        As in `TarIndex`.
    extensions
        The kinds of members, and the fields that each has as columns.
    rest
        Row, extension, offset and size of members whose kind has no columns.
    duplicates
        Row and extensions of the samples that have members twice.
    sparse
        Offset, size and pieces of members that are stored with holes.
    """

    size: int
    version: str
    samples: int = 0
    members: int = 0
    pax: int = 0
    damage: dict[str, Any] | None = None
    interleaved: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    extensions: dict[str, list[str]] = field(default_factory=dict)
    rest: list[list[Any]] = field(default_factory=list)
    duplicates: list[list[Any]] = field(default_factory=list)
    sparse: list[list[Any]] = field(default_factory=list)
    format: int = FORMAT

    def described(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


class StoredIndex:
    """Index of a shard, whose columns are read when they are used.

    Parameters
    ----------
    facts
        What the metadata hold.
    nbytes
        The size of its file.
    read
        Gives a column by its name.
    """

    def __init__(self, facts: ShardFacts, nbytes: int, read: Callable[[str], pa.Array]) -> None:
        self.facts = facts
        self.nbytes = nbytes
        self._read = read
        self._columns: dict[str, pa.Array] = {}

    def __len__(self) -> int:
        return self.facts.samples

    @property
    def keys(self) -> pa.Array:
        """The key of each sample."""
        keys = self._column(KEY)
        if keys.null_count:
            raise broken(f"{keys.null_count} of its samples have no key")
        return keys

    @cached_property
    def extensions(self) -> list[str]:
        """The kinds of members that its samples have."""
        rest = (extension for _, extension, _, _ in self.facts.rest)
        return list(dict.fromkeys([*self.facts.extensions, *rest]))

    def column(self, extension: str, name: str) -> pa.Array:
        """A fact about the members of a kind: a value for each sample, null if unknown."""
        if name in self.facts.extensions.get(extension, ()):
            return self._column(f"{extension}/{name}")
        if name in SPAN_FIELDS and extension not in self.facts.extensions:
            return self._rest(extension, name)
        return pa.nulls(len(self), FIELDS[name])

    def has(self, extension: str) -> pa.Array:
        """True for each sample that has a member of this kind."""
        return pc.is_valid(self.column(extension, "offset"))

    @cached_property
    def duplicates(self) -> dict[int, tuple[str, ...]]:
        """Row → extensions that it has more than once."""
        return {row: tuple(extensions) for row, extensions in self.facts.duplicates}

    @cached_property
    def tar(self) -> TarIndex:
        """All but the samples."""
        facts = self.facts
        return TarIndex(
            sparse={
                offset: tuple((start, length) for start, length in pieces)
                for offset, _, pieces in facts.sparse
            },
            damage=None if facts.damage is None else Damage(**facts.damage),
            interleaved=tuple(facts.interleaved),
            repeated=tuple(facts.repeated),
            members=facts.members,
            pax=facts.pax,
        )

    def samples(self, rows: np.ndarray) -> list[Sample]:
        """The samples of some rows."""
        taken = pa.array(rows)
        with gc_paused():
            found = [Sample(key, {}) for key in self.keys.take(taken).to_pylist()]
            for extension in self.extensions:
                for sample, span in zip(found, self.spans(extension, taken), strict=True):
                    if span is not None:
                        sample.members[extension] = span
            for sample in found:
                if len(sample.members) > 1:
                    # In the order of the shard, in which a scan finds them.
                    sample.members = dict(sorted(sample.members.items(), key=_offset))
        for row, sample in zip(rows.tolist(), found, strict=True) if self.duplicates else ():
            sample.duplicates = self.duplicates.get(row, ())
        return found

    def whole(self) -> TarIndex:
        """The index of all samples, as a scan of the tar gives it."""
        return replace(self.tar, samples=self.samples(np.arange(len(self))))

    def spans(self, extension: str, rows: pa.Array) -> list[Span | None]:
        """Spans of the members of a kind, of some rows."""
        offsets = self.column(extension, "offset").take(rows)
        sizes = self.column(extension, "size").take(rows)
        return self.joined(offsets, sizes)

    def joined(self, offsets: pa.Array, sizes: pa.Array) -> list[Span | None]:
        """Offsets and sizes, as columns have them, as spans."""
        if not offsets.is_valid().equals(sizes.is_valid()):
            raise broken("some of its members have a place and no size, or the reverse")
        pairs = zip(offsets.to_pylist(), sizes.to_pylist(), strict=True)
        if not self._sparse_sizes:
            return [None if offset is None else (offset, size) for offset, size in pairs]
        true = self._sparse_sizes
        return [None if at is None else (at, true.get(at, size)) for at, size in pairs]

    @cached_property
    def _sparse_sizes(self) -> dict[int, int]:
        # They may claim more than a column can hold.
        return {offset: size for offset, size, _ in self.facts.sparse}

    def _column(self, name: str) -> pa.Array:
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def _rest(self, extension: str, name: str) -> pa.Array:
        values: list[int | None] = [None] * len(self)
        number = 2 + list(SPAN_FIELDS).index(name)
        for entry in self.facts.rest:
            if entry[1] == extension:
                values[entry[0]] = entry[number]
        return pa.array(values, SPAN_FIELDS[name])


def _offset(member: tuple[str, Span]) -> int:
    return member[1][0]
