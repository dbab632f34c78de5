"""Index file format: parquet with a row per sample, and facts about the shards in the footer.

Columns are ``__key__``, and for each kind of member ``<extension>/offset`` and
``<extension>/size``; for images also what their headers say (before orientation), for texts and
labels their ``content``. Damage is detected by checksums of the pages and a digest of the footer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import KeysView, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.storage import LazyBytes, Shard

KEY = "__key__"

# Key of the facts in the metadata of the parquet file.
_METADATA = b"image-ingest.index"

# Version of the format; an index of another version is not used.
_FORMAT = 3

_DIGEST_BYTES = 16

# Small shards share a row group of at most so many rows, and bytes in memory.
_GROUP_ROWS, _GROUP_BYTES = 10_000, 16 << 20


class UnusableIndexError(Exception):
    """Error of an index that can't be used, with the reason."""


@dataclass
class ShardFacts:
    """Facts about a shard, and rare ones about its samples; JSON in the footer of an index.

    Attributes
    ----------
    size, version
        Of the shard when it was indexed.
    samples
        Number of samples.
    members, pax, damage, interleaved, repeated
        As in `ShardIndex`.
    extensions
        Extension → fields that are stored as columns.
    rest
        Row, extension, offset and size of each member whose extension has no columns.
    duplicates
        Row and extensions of each sample that has members twice.
    sparse
        Offset, expanded size and pieces of each sparse member.
    skipped
        As in `ShardIndex`: code → number, and name of the first.
    links
        Row, extension and description of each link in place of a sample's member.
    group, row
        Where the shard's rows begin in the file: the row group, and the row within it.
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
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    links: list[list[Any]] = field(default_factory=list)
    group: int = 0
    row: int = 0


class IndexWriter:
    """Writer of an index file of one or many shards."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._file = file
        self._writer = parquet.ParquetWriter(
            file, schema, compression="zstd", write_page_checksum=True
        )
        self._facts: dict[str, ShardFacts] = {}
        #: Row groups that were written.
        self._groups = 0
        #: The next row group, with its rows and bytes.
        self._pending: list[pa.Table] = []
        self._rows = self._nbytes = 0

    def add(self, name: str, rows: pa.Table, facts: ShardFacts) -> None:
        """Add a shard by its name, which is empty in an index of one shard."""
        nbytes = rows.nbytes
        if self._rows + len(rows) > _GROUP_ROWS or self._nbytes + nbytes > _GROUP_BYTES:
            self._write_group()
        self._facts[name] = replace(facts, group=self._groups, row=self._rows)
        self._pending.append(rows)
        self._rows, self._nbytes = self._rows + len(rows), self._nbytes + nbytes

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the file, unless there was an error."""
        if kind is not None:
            with suppress(Exception):  # the disk may still be full
                self._writer.close()
            return
        self._write_group()
        self._writer.add_key_value_metadata({_METADATA: _as_json(self._facts)})
        self._writer.close()
        _sign(self._file)

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(pa.concat_tables(self._pending), row_group_size=self._rows)
            self._groups += 1
        self._pending, self._rows, self._nbytes = [], 0, 0


def _as_json(shards: Mapping[str, ShardFacts]) -> bytes:
    """Facts as compact JSON: without empty ones, and with each set of extensions stored once."""
    kinds: dict[str, int] = {}
    entries = {}
    for name, facts in shards.items():
        number = kinds.setdefault(json.dumps(facts.extensions), len(kinds))
        nonempty = {key: value for key, value in asdict(facts).items() if value}
        required = {"size": facts.size, "version": facts.version, "extensions": number}
        entries[name] = nonempty | required
    whole = {"format": _FORMAT, "kinds": [json.loads(kind) for kind in kinds], "shards": entries}
    return json.dumps(whole, separators=(",", ":")).encode()


class IndexTable:
    """The parsed footer of an index file.

    Attributes
    ----------
    file
        The file as a listing would show it; None if it has no version.
    nbytes
        Size of the file.
    metadata
        Parquet's metadata of row groups and columns.

    Raises
    ------
    UnusableIndexError
        If it is damaged, or another release of this package has written it.
    """

    def __init__(self, content: LazyBytes, file: Shard | None = None) -> None:
        self.file = file
        self.nbytes = len(content)
        self.metadata = parquet.read_metadata(pa.BufferReader(_signed_footer(content)))
        facts = json.loads(self.metadata.metadata[_METADATA])
        if facts["format"] != _FORMAT:
            raise UnusableIndexError("another release of this package has written it")
        self._kinds = facts["kinds"]
        self._shards = facts["shards"]

    @property
    def names(self) -> KeysView[str]:
        """The names of its shards; a single empty one in an index of one shard."""
        return self._shards.keys()

    def holds(self, name: str, shard: Shard) -> bool:
        """True if it has the listed version of a shard."""
        facts = self._shards.get(name)
        indexed = facts and (facts["size"], facts["version"])
        return indexed == (shard.size, shard.version)

    def samples(self, name: str) -> int | None:
        """Number of samples of a shard; None for a damaged one, which must be read for a warning.

        An undamaged shard without the entry has none: empty facts are not stored.
        """
        facts = self._shards[name]
        return None if "damage" in facts else facts.get("samples", 0)

    def facts(self, name: str) -> ShardFacts:
        """The facts about a shard."""
        facts = self._shards[name]
        return ShardFacts(**facts | {"extensions": self._kinds[facts["extensions"]]})


def _sign(file: BinaryIO) -> None:
    """Insert the digest of the footer before it, in a place that parquet readers skip."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 8)
    start = size - 8 - int.from_bytes(file.read(4), "little")
    file.seek(start)
    footer = file.read()
    file.seek(start)
    file.write(_digest(footer) + footer)


def _signed_footer(content: LazyBytes) -> bytes:
    """The footer of an index file; raises if its digest is wrong or missing."""
    size = len(content)
    start = size - 8 - int.from_bytes(content[max(0, size - 8) : size][:4], "little")
    if start >= _DIGEST_BYTES:
        footer = bytes(content[start:size])
        if content[start - _DIGEST_BYTES : start] == _digest(footer):
            return footer
    raise UnusableIndexError(
        "it is damaged, or another release of this package has written it. write_index() rewrites "
        "it"
    )


def _digest(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=_DIGEST_BYTES).digest()
