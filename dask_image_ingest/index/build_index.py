"""Building of an index: everything about a shard except pixels, as a table.

The indexes of a folder's shards are put together to its combined index.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.decode import StoredHeader, read_stored_header
from dask_image_ingest.errors import ShardError
from dask_image_ingest.index.discovery import IndexFile, open_stored
from dask_image_ingest.index.index_file import (
    KEY,
    IndexWriter,
    ShardFacts,
    StoredIndex,
    UnusableIndexError,
    digest_of_head,
)
from dask_image_ingest.storage import COMBINED_INDEX, ByteReader, Shard, natural_order
from dask_image_ingest.storage.output import OutputStore
from dask_image_ingest.tar import (
    FIELDS,
    HEAD,
    IMAGE_EXTENSIONS,
    INTEGERS,
    LARGEST_VALUE,
    SPAN_FIELDS,
    TEXTS,
    ShardIndex,
    Span,
    open_member,
    read_member,
)

_IMAGES = frozenset(IMAGE_EXTENSIONS.split(";"))
_CONTENTS = TEXTS | INTEGERS

# Texts and labels of at most so many bytes are copied into the index.
_LARGEST_CONTENT = 64 << 10

#: Only the most frequent extensions have columns: if keys contain dots, every member has its own
#: extension.
MOST_KINDS = 64

_LARGEST_INT64 = 2**63 - 1
_IMAGE_FIELDS = tuple(name for name in FIELDS if name not in (*SPAN_FIELDS, "content"))

# The member of one extension for each sample; None without one.
Members = list[Span | None]


def shard_rows(shard: Shard, content: ByteReader, index: ShardIndex) -> tuple[pa.Table, ShardFacts]:
    """Build the rows and facts of a shard's index; reads the heads of images, and small members."""
    facts = _facts(shard, index)
    facts.head = digest_of_head(content)
    columns = {KEY: index.keys}
    counts = {extension: len(index.places(extension).rows) for extension in index.extensions}
    frequent = sorted(counts, key=lambda extension: -counts[extension])[:MOST_KINDS]
    for extension in counts:
        if extension in frequent:
            fields = _columns(extension, content, index)
            facts.extensions[extension] = list(fields)
            columns |= {f"{extension}/{name}": array for name, array in fields.items()}
        else:
            places = np.column_stack(index.places(extension)).tolist()
            facts.rest += ([row, extension, offset, size] for row, offset, size in places)
    return pa.table(columns), facts


def _facts(shard: Shard, index: ShardIndex) -> ShardFacts:
    members = [index.places(extension).offsets for extension in index.extensions]
    in_samples = set(np.concatenate(members).tolist()) if index.sparse and members else set()
    return ShardFacts(
        size=shard.size,
        version=shard.version,
        samples=len(index),
        members=index.members,
        pax=index.pax,
        damage=None if index.damage is None else asdict(index.damage),
        interleaved=list(index.interleaved),
        repeated=list(index.repeated),
        duplicates=[[row, list(index.duplicates[row])] for row in sorted(index.duplicates)],
        # Without sparse members that belong to no sample.
        sparse=[
            [offset, sparse.size, sparse.pieces]
            for offset, sparse in index.sparse.items()
            if offset in in_samples
        ],
        skipped=dict(index.skipped),
    )


def _columns(extension: str, content: ByteReader, index: ShardIndex) -> dict[str, pa.Array]:
    places = {name: index.column(extension, name) for name in SPAN_FIELDS}
    members: Members = index.spans(places["offset"], places["size"])
    fields: dict[str, list[Any]] = {}
    if extension.rpartition(".")[2] in _IMAGES:
        images = list(_measured(members, content, index))
        fields |= {
            name: [None if image is None else image[number] for image in images]
            for number, name in enumerate(_IMAGE_FIELDS)
        }
    elif extension in _CONTENTS:
        fields["content"] = list(_contents(members, content, index))
    return places | {name: pa.array(values, FIELDS[name]) for name, values in fields.items()}


def _measured(
    members: Members, content: ByteReader, index: ShardIndex
) -> Iterator[tuple[Any, ...] | None]:
    """The `_IMAGE_FIELDS` of each image; None if a read has to open it."""
    heads = ((at, at + min(size, HEAD)) for at, size in filter(None, members))
    content.prefetch(head for head in heads if head[0] not in index.sparse)
    for span in members:
        if span is None or (span[0] in index.sparse and span[1] > LARGEST_VALUE):
            yield None
            continue
        format, stored = read_stored_header(open_member(content, index, span))
        yield (format, *stored) if _is_portable(stored) else None


def _is_portable(stored: StoredHeader) -> bool:
    """False if another machine may find otherwise: it may have codecs that this one lacks."""
    if stored.error is not None and stored.error.startswith("unsupported-format"):
        return False
    return all(number is None or number <= _LARGEST_INT64 for number in stored[:2])


def _contents(members: Members, content: ByteReader, index: ShardIndex) -> Iterator[bytes | None]:
    """The bytes of small members; None for others."""
    small = [span if span and span[1] <= _LARGEST_CONTENT else None for span in members]
    spans = ((at, at + size) for at, size in filter(None, small))
    content.prefetch(span for span in spans if span[0] not in index.sparse)
    for span in small:
        yield None if span is None else bytes(read_member(content, index, span))


def index_bytes(rows: pa.Table, facts: ShardFacts) -> bytes:
    """The index file of one shard."""
    file = io.BytesIO()
    with IndexWriter(file, rows.schema) as writer:
        writer.add("", rows, facts)
    return file.getvalue()


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file; deterministic."""
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", row_group_size=len(table) or None)
    return sink.getvalue().to_pybytes()


# The column with the name of each sample's shard.
_SHARD = "__shard__"

# Extension → fields that are stored as columns.
_Kinds = dict[str, list[str]]


def write_combined(
    output: OutputStore, indexes: Mapping[str, IndexFile], storage_options: dict[str, Any] | None
) -> dict[str, str]:
    """Write the combined index of a folder, atomically.

    ``indexes`` has the current index of each shard by the shard's name. Returns errors by name of
    the shards that are left out since their index is damaged.

    Raises
    ------
    ShardError
        If an index can't be read now, as on a failing disk; the file is not written then.
    """
    errors: dict[str, str] = {}
    kinds = _kinds(indexes, storage_options)
    columns = {f"{kind}/{name}": FIELDS[name] for kind, names in kinds.items() for name in names}
    schema = pa.schema({_SHARD: pa.string(), KEY: pa.string(), **columns})
    with output.scratch(COMBINED_INDEX) as file:
        with IndexWriter(file, schema) as writer:
            for shard in sorted(indexes, key=natural_order):
                try:
                    with open_stored(indexes[shard], storage_options) as index:
                        rows, facts = _rows(shard, index, kinds), _combined_facts(index, kinds)
                except (UnusableIndexError, ShardError) as error:
                    why = f"its index {indexes[shard].url} cannot be copied: {error}"
                    if _is_failing_disk(error):
                        target = output.locate(COMBINED_INDEX)
                        raise ShardError(f"{target} is not written. {shard}: {why}") from error
                    errors[shard] = why
                else:
                    writer.add(shard, rows, facts)
        output.commit(file, COMBINED_INDEX)
    output.fsync()
    return errors


def _is_failing_disk(error: BaseException | None) -> bool:
    """True for an error of the operating system, which Arrow's for damaged files are not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return True
        error = error.__cause__
    return False


def _kinds(indexes: Mapping[str, IndexFile], storage_options: dict[str, Any] | None) -> _Kinds:
    """Columns of the combined index: the extensions that most shards store as columns."""
    counts: Counter[str] = Counter()
    fields: dict[str, set[str]] = {}
    for file in indexes.values():
        with (
            suppress(UnusableIndexError, ShardError),  # reported when its rows are read
            open_stored(file, storage_options) as index,
        ):
            for kind, names in index.facts.extensions.items():
                counts[kind] += 1
                fields.setdefault(kind, set()).update(names)
    return {
        kind: [name for name in FIELDS if name in fields[kind]]
        for kind, _ in counts.most_common(MOST_KINDS)
    }


def _rows(shard: str, index: StoredIndex, kinds: _Kinds) -> pa.Table:
    columns = {_SHARD: pa.repeat(pa.scalar(shard, pa.string()), len(index)), KEY: index.keys}
    for kind, names in kinds.items():
        columns |= {f"{kind}/{name}": index.column(kind, name) for name in names}
    return pa.table(columns)


def _combined_facts(index: StoredIndex, kinds: _Kinds) -> ShardFacts:
    """The facts about a shard, adapted to the columns of the combined index."""
    rest = [kind for kind in index.extensions if kind not in kinds]
    places = {kind: np.column_stack(index.places(kind)).tolist() for kind in rest}
    return replace(
        index.facts,
        extensions={
            kind: index.facts.extensions.get(kind, list(SPAN_FIELDS))
            for kind in index.extensions
            if kind in kinds
        },
        rest=[[row, kind, *place] for kind in rest for row, *place in places[kind]],
    )
