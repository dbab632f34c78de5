"""Rows of a frame gathered on this machine: their hashes, in an order that says which stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.arguments import is_column, shown
from dask_image_ingest.curate.duplicates.verdicts import IDENTITY, identities
from dask_image_ingest.curate.pixels.fingerprints import (
    PDQ_QUALITY,
    Kind,
    Variant,
    column_of,
    fingerprints,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of

# ThreatExchange's advice: hashes of a lower quality say too little.
_LEAST_QUALITY = 50

# No name of a column that anybody has.
_AREA = "height × width"

# The columns that ``keep=`` goes by.
_KEEP = {"largest": (_AREA,), "best": (_AREA, "nbytes"), "first": ()}


@dataclass(frozen=True)
class Ranked:
    """Rows that have a hash, each once, best first.

    Parameters
    ----------
    rows
        Identities, uint64 (n,).
    keys
        ``__key__`` of each.
    hashes
        uint64 (n, variants, words).
    """

    rows: np.ndarray
    keys: pa.ChunkedArray
    hashes: np.ndarray


def parse_keep(keep: Any, frame: Any) -> tuple[str, ...]:
    """The ranking of rows, the largest first: columns of the frame, or the area.

    Raises
    ------
    ArgumentError
        For an unknown ``keep``, and if the frame lacks a column that it goes by.
    """
    largest = _KEEP.get(keep) if isinstance(keep, str) else None
    if largest is None:
        if not is_column(keep, frame.columns):
            raise ArgumentError(
                f"keep={shown(keep)}: choose 'largest', 'best', 'first' or a column of the frame"
            )
        largest = (keep,)
    missing = [name for name in columns_of_order(largest) if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}, which keep= goes by: pass "
            "keep='first', or a column of the frame"
        )
    return largest


def columns_of_order(largest: Sequence[str]) -> list[str]:
    """The columns of a frame that `parse_keep` stands for."""
    shape = ["height", "width"] if _AREA in largest else []
    return [*shape, *(name for name in largest if name != _AREA)]


def rank_rows(frame: Any, by: Kind, variants: Sequence[Variant], largest: Sequence[str]) -> Ranked:
    """Compute the fingerprints of a frame, or take those that it has.

    Rows with larger values in the columns ``largest`` come first, those without a value last; then
    they go by key, URL and offset, so that the order is one for the same rows in any partitions.
    ``largest`` is what `parse_keep` gives.
    """
    hashes = [column_of(by), *(column_of(by, variant) for variant in variants)]
    if any(name not in frame.columns for name in hashes):
        there = [name for name in (*hashes, PDQ_QUALITY) if name in frame.columns]
        frame = frame.drop(columns=there) if there else frame
        frame = fingerprints(frame, [by], variants=variants)
    needed = [*IDENTITY, *hashes, *columns_of_order(largest)]
    if by == "pdq" and PDQ_QUALITY in frame.columns:
        needed.append(PDQ_QUALITY)
    frame = frame[list(dict.fromkeys(needed))]
    if isinstance(frame, FrameBase):
        parts = [dask.delayed(_compact)(part, hashes, largest) for part in frame.to_delayed()]
        return merge_ranked(list(dask.compute(*parts)))
    return merge_ranked([_compact(frame, hashes, largest)])


@dataclass(frozen=True)
class RowsToRank:
    """A partition's rows that have hashes: identities, hashes, and the order."""

    rows: np.ndarray
    hashes: np.ndarray
    order: pa.Table


def _compact(frame: Any, hashes: Sequence[str], largest: Sequence[str]) -> RowsToRank:
    table = backend_of(frame).to_arrow(frame)
    usable = pc.is_valid(table[hashes[0]])
    for name in hashes[1:]:
        usable = pc.and_(usable, pc.is_valid(table[name]))
    if PDQ_QUALITY in table.column_names:
        enough = pc.greater_equal(table[PDQ_QUALITY], _LEAST_QUALITY)
        usable = pc.and_(usable, pc.fill_null(enough, False))
    table = table.filter(usable)
    words = np.stack([_words(table[name], name) for name in hashes], axis=1)
    return RowsToRank(identities(table), words, order_of(table, largest))


def order_of(table: pa.Table, largest: Sequence[str]) -> pa.Table:
    """The order of a partition's rows."""
    order = {f"largest.{number}": _as_number(table, name) for number, name in enumerate(largest)}
    order["__key__"] = table["__key__"].cast(pa.string())
    order["__url__"] = table["__url__"].cast(pa.string()).dictionary_encode()
    order["offset"] = table["offset"].cast(pa.int64())
    return pa.table(order)


def _words(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Hexadecimal digits as uint64 (n, words)."""
    texts = column.to_pylist()
    words = 4 if name.startswith(column_of("pdq")) else 2
    try:
        data = bytes.fromhex("".join(texts))
    except (ValueError, TypeError):
        data = b""
    if any(len(text) != 16 * words for text in texts) or len(data) != 8 * words * len(texts):
        raise ArgumentError(
            f"the column {name!r} has other values than fingerprints() gives: strings of "
            f"{16 * words} hexadecimal digits"
        )
    return np.frombuffer(data, np.uint64).reshape(-1, words)


def _as_number(table: pa.Table, name: str) -> pa.Array:
    """A column, or the area, as float64 without NaN."""
    if name == _AREA:
        return pc.multiply(table["height"].cast(pa.float64()), table["width"].cast(pa.float64()))
    try:
        values = table[name].cast(pa.float64())
    except (pa.ArrowException, TypeError):
        raise ArgumentError(
            f"keep={name!r}: the column is of type {table[name].type}; pass one of numbers, of "
            "which the largest stays"
        ) from None
    return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)


def merge_ranked(parts: Sequence[RowsToRank]) -> Ranked:
    """Rows of several partitions in one order, each once."""
    table = pa.concat_tables([part.order for part in parts]).unify_dictionaries()
    largest = [name for name in table.column_names if name.startswith("largest.")]
    keys = table["__key__"]
    table = table.set_column(table.column_names.index("__url__"), "__url__", _places(table))
    order = pc.sort_indices(
        table,
        [(name, "descending") for name in largest]
        + [(name, "ascending") for name in ("__key__", "__url__", "offset")],
    ).to_numpy()
    rows = np.concatenate([part.rows for part in parts])[order]
    # A row that the frame has twice is one row.
    once = np.sort(np.unique(rows, return_index=True)[1])
    order = order[once]
    hashes = np.concatenate([part.hashes for part in parts])[order]
    return Ranked(rows[once], keys.take(pa.array(order)), hashes)


def _places(table: pa.Table) -> pa.ChunkedArray:
    """The place of each row's URL among all URLs in their order."""
    urls = table["__url__"].combine_chunks()
    if isinstance(urls, pa.ChunkedArray):
        urls = (
            urls.chunk(0)
            if urls.num_chunks
            else pa.DictionaryArray.from_arrays([], pa.array([], pa.string()))
        )
    rank = np.empty(len(urls.dictionary), np.int64)
    rank[pc.sort_indices(urls.dictionary).to_numpy()] = np.arange(len(rank))
    return pa.chunked_array([pa.array(rank).take(urls.indices)])
