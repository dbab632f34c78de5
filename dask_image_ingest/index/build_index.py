"""Building of an index: everything about a shard except pixels, as a table."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.decode import StoredHeader, read_stored_header
from dask_image_ingest.index.index_file import KEY, IndexWriter, ShardFacts
from dask_image_ingest.storage import ByteReader, Shard
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
        links=[[row, *link] for row, links in index.links.items() for link in links.items()],
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
