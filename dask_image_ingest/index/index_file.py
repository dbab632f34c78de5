"""An index file: parquet with a row per sample, and facts about its shards in the footer.

The columns are ``__key__``, and for each kind of member ``<extension>/offset`` and
``<extension>/size``; of images what their first bytes tell, as it is stored (before orientation);
of texts and labels their ``content``. Pages have checksums, and the footer has a digest, so that
damage to a file does not go unnoticed.
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

# Where in the metadata of the file the facts are.
_METADATA = b"image-ingest.index"

# Changes with the layout: an index of another one is written anew.
_FORMAT = 2

_DIGEST_BYTES = 16

# Rows of several shards are one row group up to so many rows, and bytes in memory.
_GROUP_ROWS, _GROUP_BYTES = 10_000, 16 << 20


class UnusableIndexError(Exception):
    """An index that can't be used, with the reason."""


@dataclass
class ShardFacts:
    """Facts about a shard as a whole, and rare ones about its samples, as JSON has them.

    Attributes
    ----------
    size, version
        Those of the shard when the index was made.
    samples, members, pax, damage, interleaved, repeated
        As in `ShardIndex`; how many samples there are.
    extensions
        The kinds of members, and the fields that each has as columns.
    rest
        Row, extension, offset and size of members whose kind has no columns.
    duplicates
        Row and extensions of the samples that have members twice.
    sparse
        Offset, size and pieces of members that are stored with holes.
    group, row
        Where in the file its rows begin: the row group, and the row in that.
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
    group: int = 0
    row: int = 0


class IndexWriter:
    """Writes an index file: the rows of one shard, or of several, and the facts of each."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._file = file
        self._writer = parquet.ParquetWriter(
            file, schema, compression="zstd", write_page_checksum=True
        )
        self._facts: dict[str, ShardFacts] = {}
        self._held: list[pa.Table] = []
        self._groups = self._rows = self._nbytes = 0

    def add(self, name: str, rows: pa.Table, facts: ShardFacts) -> None:
        """Add a shard, which is found by its name; the only one of a file may have any."""
        nbytes = rows.nbytes
        if self._rows + len(rows) > _GROUP_ROWS or self._nbytes + nbytes > _GROUP_BYTES:
            self._write_group()
        self._facts[name] = replace(facts, group=self._groups, row=self._rows)
        self._held.append(rows)
        self._rows, self._nbytes = self._rows + len(rows), self._nbytes + nbytes

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the file, unless there was an error."""
        if kind is not None:
            with suppress(Exception):  # such as that of a full disk again
                self._writer.close()
            return
        self._write_group()
        self._writer.add_key_value_metadata({_METADATA: _described(self._facts)})
        self._writer.close()
        _sign(self._file)

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=self._rows)
            self._groups += 1
        self._held, self._rows, self._nbytes = [], 0, 0


def _described(shards: Mapping[str, ShardFacts]) -> bytes:
    """Facts as JSON; most shards have the same kinds of members, and nothing rare."""
    kinds: dict[str, int] = {}
    described = {}
    for name, facts in shards.items():
        number = kinds.setdefault(json.dumps(facts.extensions), len(kinds))
        told = {key: value for key, value in asdict(facts).items() if value}
        required = {"size": facts.size, "version": facts.version, "extensions": number}
        described[name] = told | required
    found = {"format": _FORMAT, "kinds": [json.loads(kind) for kind in kinds], "shards": described}
    return json.dumps(found, separators=(",", ":")).encode()


class IndexTable:
    """The footer of an index file.

    Attributes
    ----------
    file
        The file as a listing would show it; None if its version is not known.
    metadata
        Of its row groups and columns.

    Raises
    ------
    UnusableIndexError
        If it is not as this package has written it.
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
        """The names of its shards; an empty one for the only shard of a file."""
        return self._shards.keys()

    def holds(self, name: str, shard: Shard) -> bool:
        """True if it has a shard, and in the version that was listed."""
        facts = self._shards.get(name)
        known = facts and (facts["size"], facts["version"])
        return known == (shard.size, shard.version)

    def samples(self, name: str) -> int | None:
        """Number of samples of a shard; None for a damaged one, of which a read has to warn."""
        facts = self._shards[name]
        return None if "damage" in facts else facts.get("samples", 0)

    def facts(self, name: str) -> ShardFacts:
        """All that is known of a shard as a whole."""
        facts = self._shards[name]
        return ShardFacts(**facts | {"extensions": self._kinds[facts["extensions"]]})


def _sign(file: BinaryIO) -> None:
    """Put the digest of a footer before it, where no reader of parquet files looks."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 8)
    start = size - 8 - int.from_bytes(file.read(4), "little")
    file.seek(start)
    footer = file.read()
    file.seek(start)
    file.write(_digest(footer) + footer)


def _signed_footer(content: LazyBytes) -> bytes:
    size = len(content)
    start = size - 8 - int.from_bytes(content[max(0, size - 8) : size][:4], "little")
    if start >= _DIGEST_BYTES:
        footer = bytes(content[start:size])
        if content[start - _DIGEST_BYTES : start] == _digest(footer):
            return footer
    raise UnusableIndexError(
        "it is damaged, or another release of this package has written it. write_index() writes "
        "it anew"
    )


def _digest(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=_DIGEST_BYTES).digest()
