"""One task: part of one shard becomes one dataframe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.computed import EvaluatedFilter
from dask_image_ingest.dataset.decode_rows import decode_rows
from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.opened import give_up, open_rows
from dask_image_ingest.dataset.query import Query
from dask_image_ingest.dataset.sidecar import Sidecar, open_sidecar
from dask_image_ingest.dataset.splits import ShardSplit
from dask_image_ingest.dataset.warning import (
    warn_of_damage,
    warn_of_late_members,
    warn_of_skipped,
)
from dask_image_ingest.decode import Pixels
from dask_image_ingest.errors import (
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.index import UnusableIndexError
from dask_image_ingest.tar import TarIndex

__all__ = ["read_partition"]


def read_partition(split: ShardSplit, query: Query) -> Any:
    """Read one partition: the samples ``split`` of one shard, as a dataframe.

    Pixels are decoded last, and only for the rows that the filters keep.

    Raises
    ------
    ShardError
        Where the shard can't be read, with ``shard_errors="raise"``.
    PartitionTooLargeError
        Where the images would decode to more than one partition can hold; before they do.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    try:
        return _read(split, query)
    except (ShardError, ShardNotFoundError) as error:
        if query.options.shard_errors == "raise":
            raise
        if not split.part:
            warn_of_skipped(error)
        return _no_rows(split, query)


def _no_rows(split: ShardSplit, query: Query) -> Any:
    nothing = open_sidecar(None, query.sidecar, None, False)
    with nothing as sidecar:
        empty = SampleRows(split.url, b"", TarIndex(), query.options, query.components, sidecar)
        if not query.must_decode:
            return _undecoded(empty, query)
        return _decoded(split, empty, query)


def _read(split: ShardSplit, query: Query) -> Any:
    options = query.options
    with open_sidecar(
        split.sidecar,
        query.sidecar,
        options.storage_options,
        options.needs_sidecars,
        skips_errors=options.shard_errors == "skip",
    ) as sidecar:
        if not sidecar.may_have(query.filters_before_decode):
            return _no_rows(split, query)
        try:
            return _read_shard(split, query, sidecar)
        except UnusableIndexError as error:
            # A column of it is damaged, which shows when that is read.
            if split.index is None:
                raise AssertionError("only an index is unusable") from error
            give_up(split.index, error, warn=not split.part)
            return _read_shard(replace(split, index=None), query, sidecar)


def _read_shard(split: ShardSplit, query: Query, sidecar: Sidecar) -> Any:
    with open_rows(
        split.url,
        split.index,
        query.options,
        query.components,
        sidecar,
        warn=not split.part,
        keep=query.keeps_walk,
        whole=split.parts == 1 and query.decodes_every_row,
    ) as rows:
        if not split.part:  # once for a shard, not once for each part of it
            _warn(rows, query)
        rows = rows.take(split.rows(len(rows))).keep(query.filters_before_decode)
        rows, query = _keep_computed(rows, query)
        if not query.must_decode:
            rows = rows.take(range(len(rows))[: query.limit])
            return _undecoded(rows, query)
        if query.limit is not None:
            if query.loses_rows_by_decode:
                return _first_rows(split, rows, query, query.limit)
            rows = rows.take(range(len(rows))[: query.limit])
        return _decoded(split, rows, query)


def _undecoded(rows: SampleRows, query: Query) -> Any:
    """A partition without pixels; references are in their place where the decode comes later."""
    later = ("image", "error") if query.references else ()
    table = rows.table([name for name in query.columns if name not in later])
    for place, name in enumerate(query.columns):
        if name in later:
            made = rows.references() if name == "image" else pa.nulls(len(rows), pa.string())
            table = table.add_column(place, name, made)
    return query.options.get_backend().frame(table, rows.numbers, None)


def _warn(rows: SampleRows, query: Query) -> None:
    warn_of_damage(rows.url, rows.damage, len(rows))
    if query.known_extensions is not None:
        warn_of_late_members(rows.url, rows.other_kinds(query.known_extensions))


def _keep_computed(rows: SampleRows, query: Query) -> tuple[SampleRows, Query]:
    """The rows for which computed filters hold, and the query with those that can't tell yet."""
    left = []
    for each in query.computed:
        try:
            kept = _matching(rows, each, query)
        except Exception:
            # Of rows that are gone when all is decoded a function need not know what to make.
            if not query.loses_rows_by_decode:
                raise
            left.append(each)
        else:
            rows = rows.take(kept)
    return rows, replace(query, computed=tuple(left))


def _matching(rows: SampleRows, computed: EvaluatedFilter, query: Query) -> np.ndarray:
    return computed.matching(
        rows.table(computed.columns), rows.numbers, query.options.get_backend()
    )


def _first_rows(split: ShardSplit, rows: SampleRows, query: Query, limit: int) -> Any:
    """The first rows where only the decoder tells which these are: few at first, then more."""
    parts: list[Any] = []
    start, size = 0, max(1, limit)
    while not parts or (start < len(rows) and sum(map(len, parts)) < limit):
        portion = rows.take(range(start, min(start + size, len(rows))))
        parts.append(_decoded(split, portion, query))
        start, size = start + size, 2 * size
    return parts[0] if len(parts) == 1 else concat(parts).head(limit)


def _decoded(split: ShardSplit, rows: SampleRows, query: Query) -> Any:
    """The frame of some rows, whose table is made while images are decoded."""
    table = functools.cache(lambda: _table(rows, query))
    return _frame(rows, _decode(split, rows, query, table), table(), query)


def _table(rows: SampleRows, query: Query) -> pa.Table:
    filtered_by = dnf.columns_of(query.filters_after_decode)
    names = [name for name in query.columns if name != "image"]
    return rows.table([*names, *sorted(filtered_by.difference(names))])


def _decode(
    split: ShardSplit, rows: SampleRows, query: Query, meanwhile: Callable[[], Any]
) -> Pixels:
    return decode_rows(
        rows.headers,
        rows.image_bytes,
        rows.origin,
        query.options.decoding,
        query.options.errors,
        query.options.get_backend(),
        what=f"samples {rows.numbers[0]}-{rows.numbers[-1]} of {split.url}" if len(rows) else "",
        pixels=query.wants_pixels,
        fetch=rows.announce_images,
        meanwhile=meanwhile,
    )


def _frame(rows: SampleRows, pixels: Pixels, table: pa.Table, query: Query) -> Any:
    if "error" in table.column_names:
        position = table.column_names.index("error")
        table = table.set_column(position, "error", pa.array(pixels.errors, pa.string()))
    kept = np.arange(len(rows))
    if query.filters_after_decode:
        kept = dnf.matching(table, query.filters_after_decode)
    if query.options.errors == "drop":
        kept = kept[[pixels.errors[row] is None for row in kept]]
    for each in query.computed:
        kept = kept[_matching(rows.take(kept), each, query)]
    kept = kept[: query.limit]
    if len(kept) < len(rows):
        table, pixels = table.take(kept), pixels.take(kept)
    frame = query.options.get_backend().frame(
        table.select([name for name in query.columns if name != "image"]),
        rows.numbers[kept],
        pixels if query.wants_pixels else None,
    )
    columns = list(query.columns)
    return frame if list(frame.columns) == columns else frame[columns]
