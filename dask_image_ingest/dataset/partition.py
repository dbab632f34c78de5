"""One task: part of one shard becomes one dataframe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.computed import EvaluatedFilter
from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.opened import open_rows
from dask_image_ingest.dataset.query import Query
from dask_image_ingest.dataset.sidecar import Sidecar, open_sidecar
from dask_image_ingest.dataset.splits import ShardSplit
from dask_image_ingest.dataset.warning import (
    logger,
    warn_of_damage,
    warn_of_late_members,
    warn_of_skipped,
)
from dask_image_ingest.decode import Pixels, decode
from dask_image_ingest.errors import (
    ImageDecodeError,
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.tar import TarIndex

__all__ = ["NoPixels", "check_size", "read_partition"]


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
        return _frame(empty, _decode(split, empty, query), query)


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
        return _read_shard(split, query, sidecar)


def _read_shard(split: ShardSplit, query: Query, sidecar: Sidecar) -> Any:
    with open_rows(
        split.url,
        split.index,
        query.options,
        query.components,
        sidecar,
        warn=not split.part,
        keep=query.keeps_walk,
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
        pixels = _decode(split, rows, query)
        return _frame(rows, pixels, query)


def _undecoded(rows: SampleRows, query: Query) -> Any:
    """A partition without pixels; pointers are in their place where the decode comes later."""
    later = ("image", "error") if query.pointers else ()
    table = rows.table([name for name in query.columns if name not in later])
    for place, name in enumerate(query.columns):
        if name in later:
            made = rows.pointers() if name == "image" else pa.nulls(len(rows), pa.string())
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
        parts.append(_frame(portion, _decode(split, portion, query), query))
        start, size = start + size, 2 * size
    return parts[0] if len(parts) == 1 else concat(parts).head(limit)


def _decode(split: ShardSplit, rows: SampleRows, query: Query) -> Pixels:
    decoding, backend = query.options.decoding, query.options.get_backend()
    nbytes = sum(map(decoding.nbytes, rows.headers))
    if query.wants_pixels:
        what = f"samples {rows.numbers[0]}-{rows.numbers[-1]} of {split.url}" if len(rows) else ""
        check_size(what, nbytes, backend.largest_partition)
        buffer = backend.pixel_buffer(nbytes)
    else:
        buffer = NoPixels()
    rows.announce_images()
    pixels = decode(rows.headers, rows.image_bytes, decoding, buffer, rows.origin)
    failed = [row for row, error in enumerate(pixels.errors) if error is not None]
    if failed and query.options.errors == "raise":
        row = failed[0]
        raise ImageDecodeError(
            f"{split.url}: the image of sample {rows.samples[row].key!r} can't be decoded: "
            f"{pixels.errors[row]}. Pass errors='null' to get it as a row without an image"
        )
    if failed:
        logger.warning(
            "%s: %d of %d images could not be decoded, first that of %r: %s",
            split.url,
            len(failed),
            len(rows),
            rows.samples[failed[0]].key,
            pixels.errors[failed[0]],
        )
    return pixels


def _frame(rows: SampleRows, pixels: Pixels, query: Query) -> Any:
    filtered_by = dnf.columns_of(query.filters_after_decode)
    names = [name for name in query.columns if name != "image"]
    table = rows.table([*names, *sorted(filtered_by.difference(names))])
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
        table.select(names), rows.numbers[kept], pixels if query.wants_pixels else None
    )
    columns = list(query.columns)
    return frame if list(frame.columns) == columns else frame[columns]


def check_size(what: str, nbytes: int, largest: int) -> None:
    """Refuse a partition that can't be held, before anything is decoded.

    Raises
    ------
    PartitionTooLargeError
    """
    if nbytes > largest:
        raise PartitionTooLargeError(
            f"{what} decode to {nbytes / 1e9:.1f} GB, and one partition holds at most "
            f'{largest / 1e9:.1f} GB of pixels here. Pass partition_size="512 MiB" to split shards '
            "(or repartition a frame that is there already), or size= to decode smaller images"
        )


class NoPixels:
    """Takes decoded images where only their errors are asked for."""

    def append(self, images: Any) -> None:
        """Forget a batch."""

    def finish(self) -> np.ndarray:
        """Nothing was kept."""
        return np.empty(0, np.uint8)
