"""The combined index of all shards of a folder, built from the indexes of its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ShardError
from dask_image_ingest.index.build_index import MOST_KINDS
from dask_image_ingest.index.index_file import (
    KEY,
    IndexWriter,
    ShardFacts,
    UnusableIndexError,
)
from dask_image_ingest.index.open_index import IndexFile, open_stored
from dask_image_ingest.index.stored_index import StoredIndex
from dask_image_ingest.storage import COMBINED_INDEX, OutputStore, natural_order
from dask_image_ingest.tar import FIELDS, SPAN_FIELDS

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
    with output.scratch() as file:
        with IndexWriter(file, schema) as writer:
            for shard in sorted(indexes, key=natural_order):
                try:
                    with open_stored(indexes[shard], storage_options) as index:
                        rows, facts = _rows(shard, index, kinds), _facts(index, kinds)
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


def _facts(index: StoredIndex, kinds: _Kinds) -> ShardFacts:
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
