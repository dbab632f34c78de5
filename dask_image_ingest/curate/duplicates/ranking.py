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
from dask_image_ingest.curate.duplicates.verdicts import identities
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

_PIXELS = column_of("pixels")

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
        The key of each, or what takes its place, as text.
    hashes
        uint64 (n, variants, words).
    is_exact
        bool (n,): whether the first hash is one of pixels or bytes, compared for equality.
    """

    rows: np.ndarray
    keys: pa.ChunkedArray
    hashes: np.ndarray
    is_exact: np.ndarray


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


def rank_rows(
    frame: Any,
    by: Kind,
    variants: Sequence[Variant],
    largest: Sequence[str],
    identity: Sequence[str],
) -> Ranked:
    """Compute the fingerprints of a frame, or take those that it has.

    Rows with larger values in the columns ``largest`` come first, those without a value last; then
    they go by ``identity``, so that the order is one for the same rows in any partitions.
    """
    hashes = [column_of(by), *(column_of(by, variant) for variant in variants)]
    if any(name not in frame.columns for name in hashes):
        # Pictures without detail are compared by their pixels, of the same decode.
        more: list[Kind] = ["pixels"] if by == "pdq" and _PIXELS not in frame.columns else []
        frame = fingerprints(frame, [by, *more], variants=variants)
    needed = [*identity, *hashes, *columns_of_order(largest)]
    if by == "pdq":
        needed += [name for name in (PDQ_QUALITY, _PIXELS) if name in frame.columns]
    frame = frame[list(dict.fromkeys(needed))]
    told = (tuple(hashes), tuple(largest), tuple(identity))
    if isinstance(frame, FrameBase):
        parts = [dask.delayed(_compact)(part, *told) for part in frame.to_delayed()]
        return merge_ranked(list(dask.compute(*parts)))
    return merge_ranked([_compact(frame, *told)])


@dataclass(frozen=True)
class RowsToRank:
    """A partition's rows that have hashes: identities, hashes, and the order."""

    rows: np.ndarray
    hashes: np.ndarray
    is_exact: np.ndarray
    order: pa.Table


def _compact(
    frame: Any, hashes: Sequence[str], largest: Sequence[str], identity: Sequence[str]
) -> RowsToRank:
    table = backend_of(frame).to_arrow(frame)
    near = pc.is_valid(table[hashes[0]])
    for name in hashes[1:]:
        near = pc.and_(near, pc.is_valid(table[name]))
    is_exact = pa.array(np.zeros(len(table), bool))
    if PDQ_QUALITY in table.column_names:
        enough = pc.greater_equal(table[PDQ_QUALITY], _LEAST_QUALITY)
        near = pc.and_(near, pc.fill_null(enough, False))
        if _PIXELS in table.column_names:
            is_exact = pc.and_not(pc.is_valid(table[_PIXELS]), pc.fill_null(enough, True))
    chosen = pc.or_(near, is_exact)
    table, is_exact = table.filter(chosen), _booleans(is_exact)[_booleans(chosen)]
    words = np.zeros((len(table), len(hashes), _words_of(hashes[0])), np.uint64)
    for variant, name in enumerate(hashes):
        words[~is_exact, variant] = _words(table.filter(pa.array(~is_exact))[name], name)
    if is_exact.any():
        words[is_exact, 0, : _words_of(_PIXELS)] = _words(
            table.filter(pa.array(is_exact))[_PIXELS], _PIXELS
        )
    is_exact |= not hashes[0].startswith(column_of("pdq"))
    return RowsToRank(
        identities(table, identity), words, is_exact, order_of(table, largest, identity)
    )


def _booleans(values: Any) -> np.ndarray:
    return np.asarray(values.to_numpy(zero_copy_only=False), bool)


def order_of(table: pa.Table, largest: Sequence[str], identity: Sequence[str]) -> pa.Table:
    """The order of a partition's rows, with the key of each."""
    order = {f"largest.{number}": _as_number(table, name) for number, name in enumerate(largest)}
    for number, name in enumerate(identity):
        order[f"identity.{number}"] = _as_place(table[name], name)
    return pa.table(order)


def _as_place(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """A part of an identity, to be sorted by: numbers, texts, or the few URLs of many rows."""
    if name == "offset":  # a merge makes floats of integers
        return column.cast(pa.int64())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column
    column = column.cast(pa.string())
    return column.dictionary_encode() if name == "__url__" else column


def _words(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Hexadecimal digits as uint64 (n, words)."""
    texts = column.to_pylist()
    words = _words_of(name)
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


def _words_of(name: str) -> int:
    return 4 if name.startswith(column_of("pdq")) else 2


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
    names = table.column_names
    keys = table["identity.0"]
    for number, name in enumerate(names):
        if pa.types.is_dictionary(table[name].type):
            table = table.set_column(number, name, _ranks(table[name]))
    largest = [(name, "descending") for name in names if name.startswith("largest.")]
    rest = [(name, "ascending") for name in names if name.startswith("identity.")]
    order = pc.sort_indices(table, largest + rest).to_numpy()
    rows = np.concatenate([part.rows for part in parts])[order]
    # A row that the frame has twice is one row.
    once = np.sort(np.unique(rows, return_index=True)[1])
    if len(once) < len(rows) and len(rest) == 1:
        raise ArgumentError(
            f"identity=: {len(rows) - len(once):,} of {len(rows):,} rows have the value of another "
            "row there; pass a column of unique values"
        )
    order = order[once]
    hashes, is_exact = (
        np.concatenate([getattr(part, name) for part in parts])[order]
        for name in ("hashes", "is_exact")
    )
    return Ranked(rows[once], keys.take(pa.array(order)).cast(pa.string()), hashes, is_exact)


def _ranks(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The place of each text among all of them in their order."""
    texts = column.combine_chunks()
    if isinstance(texts, pa.ChunkedArray):
        if not texts.num_chunks:
            return pa.chunked_array([], pa.int64())
        texts = texts.chunk(0)
    rank = np.empty(len(texts.dictionary), np.int64)
    rank[pc.sort_indices(texts.dictionary).to_numpy()] = np.arange(len(rank))
    return pa.chunked_array([pa.array(rank).take(texts.indices)])
