"""Ranking: the hashes of all rows, gathered in this process, the rows to keep first.

Results are joined to the frame as new columns, lazily, by a hash of the row's identity.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from dask import delayed
from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import shown
from dask_image_ingest.curate.fingerprints import (
    PDQ_QUALITY,
    SIDE_OF_THUMBNAIL,
    THUMBNAIL,
    Kind,
    Variant,
    column_of,
    compute_fingerprints,
)
from dask_image_ingest.curate.quality import (
    MIN_FINE_DETAIL,
    MIN_GRAYSCALE,
    SIGNALS,
    with_signals,
)
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset.plan import MapColumns, select_columns
from dask_image_ingest.dataset.schema import EDGES, PLACE, part_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, without
from dask_image_ingest.typedefs import AnyFrame, DataFrame

logger = logging.getLogger("dask_image_ingest")


@dataclass(frozen=True)
class JoinedColumns:
    """New columns for some rows of a frame, small: each query's graph has all of them."""

    identity: tuple[str, ...]  # the columns that identify a row
    ids: np.ndarray = field(repr=False)  # `row_ids` of the rows, ascending, uint64 (n,)
    columns: Mapping[str, pa.Array] = field(repr=False)  # as `_compact` makes them
    types: Mapping[str, pa.DataType]  # of the new columns
    defaults: Mapping[str, bool]  # the value in all other rows; null for columns not here

    def __dask_tokenize__(self) -> str:
        # By values: the buffers of equal Arrow arrays may differ where they are null.
        values = pd.util.hash_pandas_object(pa.table(dict(self.columns)).to_pandas(), index=False)
        types = [(name, str(type_)) for name, type_ in self.types.items()]
        return str(tokenize(self.identity, self.ids, values.to_numpy(), types, self.defaults))

    def empty(self) -> JoinedColumns:
        """The same columns, for no rows."""
        # New arrays: a slice is pickled with all that it was cut from.
        columns = {name: pa.array([], type_) for name, type_ in self.types.items()}
        return replace(self, ids=np.empty(0, np.uint64), columns=columns)


def resolve_identity(
    frame: AnyFrame, identity: str | None = None, argument: str = "frame"
) -> tuple[str, ...]:
    """The columns that identify a row, the key first; an error if the frame lacks them."""
    if identity is not None:
        if identity not in frame.columns:
            raise ArgumentError(
                f"identity={shown(identity)}: {argument}= has no such column; pass one of unique "
                "values"
            )
        return (identity,)
    missing = [name for name in ("__key__", "__url__") if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"{argument}= has no column {', '.join(map(repr, missing))}, which identifies rows: "
            "keep the columns __url__, __key__ and offset of the read, or pass identity=, a column "
            "of unique values"
        )
    parts = chain.from_iterable(part_columns(frame.columns).values())
    return ("__key__", "__url__", *({"offset"} & set(frame.columns)), *dict.fromkeys(parts))


def row_ids(table: pa.Table, identity: Sequence[str]) -> np.ndarray:
    """A hash of each row's identity, uint64 (n,).

    Among 10 million rows, the chance of a collision is 3 in a million.
    """
    columns = {name: _hashable(table[name], name) for name in identity}
    return pd.util.hash_pandas_object(pd.DataFrame(columns), index=False).to_numpy()


def _hashable(column: pa.ChunkedArray, name: str) -> Any:
    if _is_place(name):
        return _cast(column, name, pa.float64()).fill_null(-1).to_numpy()
    # Keys may be strings in one partition and dictionary-encoded in another.
    return _cast(column, name, pa.string()).to_pandas().astype(object)


def _is_place(name: str) -> bool:
    """True for whole numbers, which pandas casts to floats in an outer merge."""
    return name.rpartition(".")[2] in ("offset", *PLACE, *EDGES)


def _cast(column: pa.ChunkedArray, name: str, type_: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(type_)
    except (pa.ArrowException, TypeError) as error:
        raise ArgumentError(
            f"the column {name!r} is of type {column.type}, and duplicates need one of {type_}: "
            f"{error}"
        ) from None


def partition_table(frame: DataFrame) -> pa.Table:
    """A partition in Arrow; an error if a column mixes types."""
    try:
        return backend_of(frame).to_arrow(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = "; ".join(map(str, error.args))
        raise ArgumentError(f"a column of the frame has no type of Arrow: {reason}") from error


def join_columns(frame: AnyFrame, verdicts: JoinedColumns) -> AnyFrame:
    """Add or replace the columns of ``verdicts`` in ``frame``; lazy if the frame is."""
    frame = without(frame, verdicts.columns)
    if not isinstance(frame, FrameBase):
        return _look_up(frame, verdicts, verdicts)
    # One task in the graph, whose result all partitions share.
    shared = dx._DelayedExpr(delayed(verdicts, pure=True, traverse=False))
    outputs = tuple(verdicts.columns)
    return new_collection(
        MapColumns(frame.expr, _look_up, outputs, verdicts.identity, shared, verdicts.empty())
    )


def _look_up(frame: DataFrame, shared: JoinedColumns | None, empty: JoinedColumns) -> DataFrame:
    """A partition with its verdicts; ``shared`` is None for the meta, which takes ``empty``."""
    verdicts = empty if shared is None else shared
    backend = backend_of(frame)
    identity = list(verdicts.identity)
    ids = row_ids(backend.to_arrow(frame[identity]), identity)
    positions = np.searchsorted(verdicts.ids, ids)
    positions[positions == len(verdicts.ids)] = 0
    found = np.zeros(len(ids), bool)
    if len(verdicts.ids):
        found = verdicts.ids[positions] == ids
    taken = pa.array(positions, mask=~found)
    for name, values in verdicts.columns.items():
        column = values.take(taken).cast(verdicts.types[name])
        if name in verdicts.defaults:
            column = column.fill_null(verdicts.defaults[name])
        valid = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        present = column.drop_null()
        if pa.types.is_string(present.type):
            new = present.to_pylist()
        else:
            new = backend.numpy.asarray(present.to_numpy(zero_copy_only=False))
        frame = backend.with_columns(frame, {name: (new, present.type)}, valid.tolist())
    return frame


def columns_to_join(
    identity: tuple[str, ...],
    ids: np.ndarray,
    columns: Mapping[str, Any],
    defaults: Mapping[str, bool],
) -> JoinedColumns:
    """JoinedColumns for rows in any order, sorted by their ids."""
    order = np.argsort(ids)
    taken = pa.array(order)
    types = {name: values.type for name, values in columns.items()}
    columns = {name: _compact(values.take(taken)) for name, values in columns.items()}
    return JoinedColumns(identity, ids[order], columns, types, defaults)


def _compact(values: pa.Array) -> pa.Array:
    """Integers in the smallest type that has them all, strings encoded by a dictionary."""
    if pa.types.is_string(values.type):
        return values.dictionary_encode()
    for type_ in (pa.int8(), pa.int16(), pa.int32()) if pa.types.is_integer(values.type) else ():
        with contextlib.suppress(pa.ArrowInvalid):
            return values.cast(type_)
    return values


def group_columns(
    ranked: Ranked, keeper: np.ndarray, prefix: str
) -> tuple[dict[str, pa.Array], np.ndarray]:
    """Columns of the rows that are in a group, and the numbers of these rows.

    ``keeper``, int64 (n,), is the row that is kept instead of each row; -1 for one that is kept.
    """
    is_dropped = keeper >= 0
    keepers = np.unique(keeper[is_dropped])  # ascending, so that groups are numbered best first
    is_grouped = is_dropped.copy()
    is_grouped[keepers] = True
    grouped = np.flatnonzero(is_grouped)
    is_kept = ~is_dropped[grouped]
    group_keeper = np.where(is_kept, grouped, keeper[grouped])
    keys = ranked.keys.take(group_keeper)
    columns = {
        f"{prefix}.keep": pa.array(is_kept),
        f"{prefix}.group": pa.array(np.searchsorted(keepers, group_keeper)),
        f"{prefix}.of": pc.if_else(pa.array(is_kept), pa.scalar(None, pa.string()), keys),
    }
    return columns, grouped


# ThreatExchange's advice: PDQ hashes of a lower quality match by chance.
_MIN_QUALITY = 50

_PIXELS = column_of("pixels")

# An enlarged image counts as so much of its area.
_OF_ENLARGED = 0.1

# The columns that ``keep="best"`` goes by beside the area, where the frame has them.
_BEST = ("quality.fine_detail", "quality.grayscale", "channels", "format", "nbytes")

_LOSSLESS_FORMATS = pa.array(["png", "bmp", "pnm"])


@dataclass(frozen=True)
class Keys:
    """The texts of many rows, looked up where they are: sorting or joining them takes a copy."""

    values: pa.ChunkedArray  # of any type, in the order of partitions
    places: np.ndarray | None = None  # the place there of each row; None: its number

    def take(self, rows: np.ndarray) -> pa.Array:
        """The keys of these rows, as strings."""
        places = rows if self.places is None else self.places[rows]
        order = np.argsort(places, kind="stable")
        places = places[order]
        starts = np.cumsum([0, *map(len, self.values.chunks)])
        cuts = np.searchsorted(places, starts)
        found = [
            chunk.take(pa.array(places[cut:stop] - start)).cast(pa.string())
            for chunk, start, cut, stop in zip(
                self.values.chunks, starts[:-1], cuts[:-1], cuts[1:], strict=True
            )
            if cut < stop
        ]
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays([pa.array([], pa.string()), *found]).take(pa.array(back))


@dataclass(frozen=True)
class Ranked:
    """Rows that have a hash, without repetitions, best first."""

    ids: np.ndarray  # `row_ids` of the rows, uint64 (n,)
    keys: Keys  # the key of each row, or the value of ``identity=``
    hashes: np.ndarray  # uint64 (n, variants, words)
    # bool (n,): compared for equality, by the hash of pixels or bytes in the first variant
    is_exact: np.ndarray
    # Looks up those of some rows: int64 (n,) → uint8 (n, 32, 32); None: there are none
    thumbnails: Callable[[np.ndarray], np.ndarray] | None = None


def with_ranking_columns(frame: AnyFrame, keep: str, by: Kind | None) -> tuple[Any, list[str]]:
    """The frame with the columns that ``keep`` goes by, and their names.

    Signals that are missing are made of the images: for PDQ all, for vectors (None) the area. For
    the other kinds, of which equal images have one size and one quality, none is.
    """
    if isinstance(keep, str) and keep == "first":
        return frame, []
    if isinstance(keep, str) and keep in ("best", "largest"):
        needed = ["height", "width"]
        signals = ["fine_detail", "grayscale"] if keep == "best" and by == "pdq" else []
        if not set(needed) <= set(frame.columns):
            needed = ["quality.area"] if by in ("pdq", None) else []
            signals += ["area"] if needed else []
        frame = _with_signals(frame, signals)
        if keep == "best":
            needed += [name for name in _BEST if name in frame.columns]
        if "quality.area" in needed and "quality.area" not in frame.columns:
            raise ArgumentError(
                "the frame has neither images nor the columns 'height' and 'width', which keep= "
                "goes by: pass keep='first', or a column of the frame"
            )
        return frame, needed
    if keep in (f"quality.{name}" for name in SIGNALS):
        frame = _with_signals(frame, [keep.partition(".")[2]])
    if keep not in frame.columns:
        raise ArgumentError(
            f"keep={shown(keep)}: choose 'best', 'largest', 'first' or a column of the frame"
        )
    return frame, [keep]


def _with_signals(frame: AnyFrame, names: list[str]) -> AnyFrame:
    return with_signals(frame, [name for name in names if f"quality.{name}" not in frame.columns])


def rank_rows(
    frame: AnyFrame,
    by: Kind,
    variants: Sequence[Variant],
    keep: str,
    identity: Sequence[str],
    with_thumbnails: bool = False,
) -> Ranked:
    """Rank the rows of a frame, computing fingerprints and signals that it lacks.

    Rows are sorted by what ``keep`` says, descending, nulls last, then by ``identity``. So the
    order does not depend on the partitions. Thumbnails stay where they are, on the workers if there
    are any, and are looked up.
    """
    frame, rank_by = with_ranking_columns(frame, keep, by)
    hashes = [column_of(by), *(column_of(by, variant) for variant in variants)]
    computes = any(name not in frame.columns for name in hashes)
    has_new_thumbnails = computes and with_thumbnails and THUMBNAIL not in frame.columns
    if computes:
        kinds: list[Kind | Literal["thumbnail"]] = [by]
        if by == "pdq" and _PIXELS not in frame.columns:
            # Images without detail are compared by a hash of their pixels, from the same decode.
            kinds.append("pixels")
        if has_new_thumbnails:
            kinds.append("thumbnail")
        frame = compute_fingerprints(frame, kinds, variants=variants)
    needed = [*identity, *hashes, *rank_by]
    if by == "pdq":
        needed += [name for name in (PDQ_QUALITY, _PIXELS) if name in frame.columns]
    thumbnails = None
    if with_thumbnails and THUMBNAIL in frame.columns:
        if has_new_thumbnails:
            frame = select_columns(frame, dict.fromkeys([*needed, THUMBNAIL]))
            frame = frame.persist() if isinstance(frame, FrameBase) else frame
        thumbnails = select_columns(frame, dict.fromkeys([*identity, THUMBNAIL]))
    frame = select_columns(frame, dict.fromkeys(needed))
    parts = of_partitions(frame, _rows_to_rank, tuple(hashes), keep, tuple(identity))
    if left_out := sum(part.left_out for part in parts):
        logger.warning(
            "%d of %d rows have no fingerprint that can be compared: they are no duplicates",
            left_out, left_out + sum(len(part.ids) for part in parts), extra={"left_out": left_out},
        )  # fmt: skip
    ranked = merge_ranked(parts)
    if thumbnails is None:
        return ranked
    look_up = functools.partial(_thumbnails_of, thumbnails, tuple(identity), ranked.ids)
    return replace(ranked, thumbnails=look_up)


def of_partitions(frame: AnyFrame, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of a function of each partition of a lazy frame, or of the whole of another one."""
    if not isinstance(frame, FrameBase):
        return [function(frame, *arguments)]
    return list(dask.compute(*(delayed(function)(p, *arguments) for p in frame.to_delayed())))


def _thumbnails_of(
    frame: AnyFrame, identity: tuple[str, ...], ids: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Thumbnails of rows whose ids these are: uint8 (n, 32, 32), black where there is none."""
    wanted, place = np.unique(ids[rows], return_inverse=True)
    # One task in the graph, whose result all partitions share.
    shared = delayed(wanted, traverse=False) if isinstance(frame, FrameBase) else wanted
    parts = of_partitions(frame, _thumbnails_of_ids, identity, shared)
    found = np.zeros((len(wanted), SIDE_OF_THUMBNAIL, SIDE_OF_THUMBNAIL), np.uint8)
    for numbers, pixels in parts:
        found[numbers] = pixels.reshape(-1, *found.shape[1:])
    return found[place]


def _thumbnails_of_ids(
    frame: DataFrame, identity: tuple[str, ...], wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of those of the ids, ascending, that a partition has, and their thumbnails."""
    table = partition_table(frame)
    column = _cast(table[THUMBNAIL], THUMBNAIL, pa.list_(pa.uint8()))
    length = pc.fill_null(pc.list_value_length(column), 0)
    is_whole = pc.all(pc.is_in(length, pa.array([0, SIDE_OF_THUMBNAIL**2], length.type))).as_py()
    if not is_whole or pc.list_flatten(column).null_count:
        raise ArgumentError(
            f"the column {THUMBNAIL!r} has other values than compute_fingerprints() gives: lists "
            f"of {SIDE_OF_THUMBNAIL**2:,} pixels"
        )
    ids = row_ids(table, identity)
    # NumPy before 2.2 overflows where it chooses a table for ids of 64 bits.
    chosen = np.isin(ids, wanted, kind="sort") & (length.to_numpy() > 0)
    pixels = pc.list_flatten(column.filter(pa.array(chosen))).to_numpy()
    return np.searchsorted(wanted, ids[chosen]), pixels


@dataclass(frozen=True)
class RowsToRank:
    """One partition's rows that have hashes, as `Ranked`, with the columns to sort them by."""

    ids: np.ndarray
    hashes: np.ndarray
    is_exact: np.ndarray
    sort_keys: pa.Table
    left_out: int = 0  # rows without hashes


def _rows_to_rank(
    frame: DataFrame, hashes: Sequence[str], keep: str, identity: Sequence[str]
) -> RowsToRank:
    table = partition_table(frame)
    has_hashes = pc.is_valid(table[hashes[0]])
    for name in hashes[1:]:
        has_hashes = pc.and_(has_hashes, pc.is_valid(table[name]))
    is_exact = pa.array(np.zeros(len(table), bool))
    if PDQ_QUALITY in table.column_names:
        quality = _cast(table[PDQ_QUALITY], PDQ_QUALITY, pa.float64())
        has_detail = pc.greater_equal(quality, _MIN_QUALITY)
        has_hashes = pc.and_(has_hashes, pc.fill_null(has_detail, False))
        if _PIXELS in table.column_names:
            is_exact = pc.and_not(pc.is_valid(table[_PIXELS]), pc.fill_null(has_detail, True))
    chosen = pc.or_(has_hashes, is_exact)
    left_out = len(table) - _booleans(chosen).sum()
    table, is_exact = table.filter(chosen), _booleans(is_exact)[_booleans(chosen)]
    words = np.zeros((len(table), len(hashes), _words_of(hashes[0])), np.uint64)
    for variant, name in enumerate(hashes):
        words[~is_exact, variant] = _words(table.filter(pa.array(~is_exact))[name], name)
    if is_exact.any():
        words[is_exact, 0, : _words_of(_PIXELS)] = _words(
            table.filter(pa.array(is_exact))[_PIXELS], _PIXELS
        )
    is_exact |= not hashes[0].startswith(column_of("pdq"))
    keys = sort_keys(table, keep, identity)
    return RowsToRank(row_ids(table, identity), words, is_exact, keys, int(left_out))


def _booleans(values: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(values.to_numpy(zero_copy_only=False), bool)


def sort_keys(table: pa.Table, keep: str, identity: Sequence[str]) -> pa.Table:
    """Columns to sort rows by: ``rank_by.<n>`` descending, then ``identity.<n>`` ascending."""
    keys = {f"rank_by.{number}": column for number, column in enumerate(_rank_by(table, keep))}
    for number, name in enumerate(identity):
        keys[f"identity.{number}"] = _sortable(table[name], name)
    return pa.table(keys)


def _rank_by(table: pa.Table, keep: str) -> list[pa.ChunkedArray]:
    """Numbers of each row, of which the largest stays; the first of them that differ decide."""
    if keep == "first":
        return []
    if keep not in ("best", "largest"):
        return [_as_numbers(table, keep)]
    has, numbers = set(table.column_names), []
    if "height" in has:
        numbers = [pc.multiply(_as_numbers(table, "height"), _as_numbers(table, "width"))]
    elif "quality.area" in has:
        numbers = [_as_numbers(table, "quality.area")]
    if keep == "largest":
        return numbers
    if "quality.fine_detail" in has and numbers:
        fine_detail = _as_numbers(table, "quality.fine_detail")
        is_enlarged = pc.fill_null(pc.less(fine_detail, MIN_FINE_DETAIL), False)
        numbers = [pc.if_else(is_enlarged, pc.multiply(numbers[0], _OF_ENLARGED), numbers[0])]
    if "quality.grayscale" in has:
        numbers.append(pc.less_equal(_as_numbers(table, "quality.grayscale"), MIN_GRAYSCALE))
    if "format" in has:
        formats = _cast(table["format"], "format", pa.string())
        if "channels" in has:  # a JPEG of four is CMYK
            of_four = pc.equal(_as_numbers(table, "channels"), 4)
            numbers.append(pc.invert(pc.and_(of_four, pc.equal(formats, "jpeg"))))
        numbers.append(pc.is_in(formats, _LOSSLESS_FORMATS))
    if "nbytes" in table.column_names:
        numbers.append(_as_numbers(table, "nbytes"))
    return [number.cast(pa.float64()) for number in numbers]


def _sortable(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """An identity column as numbers or strings; URLs, which repeat, dictionary-encoded."""
    if _is_place(name):
        return _cast(column, name, pa.int64())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column
    column = _cast(column, name, pa.string())
    return column.dictionary_encode() if name == "__url__" else column


def _words(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Hashes as hexadecimal digits → uint64 (n, words)."""
    texts, words = column.to_pylist(), _words_of(name)
    are_whole = all(isinstance(text, str) and len(text) == 16 * words for text in texts)
    try:
        data = bytes.fromhex("".join(texts)) if are_whole else b""
    except ValueError:
        data = b""
    if len(data) != 8 * words * len(texts):
        raise ArgumentError(
            f"the column {name!r} has other values than compute_fingerprints() gives: strings of "
            f"{16 * words} hexadecimal digits"
        )
    return np.frombuffer(data, np.uint64).reshape(-1, words)


def _words_of(name: str) -> int:
    """The number of uint64 words in a hash: PDQ has 256 bits, xxh3 128."""
    return 4 if name.startswith(column_of("pdq")) else 2


def _as_numbers(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column as float64 without NaN."""
    try:
        values = table[name].cast(pa.float64())
    except (pa.ArrowException, TypeError):
        raise ArgumentError(
            f"keep= goes by the column {name!r} of type {table[name].type}; pass one of numbers, "
            "of which the largest stays"
        ) from None
    return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)


def merge_ranked(parts: list[RowsToRank]) -> Ranked:
    """Rank the rows of all partitions together, and drop repetitions.

    Empties the list, so that the memory of a part is free as soon as it is copied.
    """
    table = pa.concat_tables([part.sort_keys for part in parts]).unify_dictionaries()
    ids, is_exact, hashes = (
        [getattr(part, name) for part in parts] for name in ("ids", "is_exact", "hashes")
    )
    parts.clear()
    keys, is_unique = table["identity.0"], "identity.1" not in table.column_names
    order = _order(table)
    del table
    once = _first_of_each(np.concatenate(ids)[order])
    if once is not None:
        if is_unique:
            raise ArgumentError(
                f"identity=: {len(order) - len(once):,} of {len(order):,} rows have the value of "
                "another row there; pass a column of unique values"
            )
        order = order[once]
    rank = np.full(sum(map(len, ids)), -1)
    rank[order] = np.arange(len(order))
    columns = (_in_order(column, rank, len(order)) for column in (ids, is_exact, hashes))
    ranked_ids, ranked_is_exact, ranked_hashes = columns
    return Ranked(ranked_ids, Keys(keys, order), ranked_hashes, ranked_is_exact)


def _order(table: pa.Table) -> np.ndarray:
    """Rows of a table of `sort_keys`, best first: int64 (n,)."""
    names = table.column_names
    for number, name in enumerate(names):
        if pa.types.is_dictionary(table[name].type):
            table = table.set_column(number, name, _ranks(table[name]))
    rank_by = [(name, "descending") for name in names if name.startswith("rank_by.")]
    identity = [(name, "ascending") for name in names if name.startswith("identity.")]
    return pc.sort_indices(table, rank_by + identity).to_numpy().view(np.int64)


def _first_of_each(ids: np.ndarray) -> np.ndarray | None:
    """Ascending rows with the first of each id; None: there are no repetitions."""
    ascending = np.sort(ids)
    if (ascending[1:] != ascending[:-1]).all():
        return None
    return np.sort(np.unique(ids, return_index=True)[1])


def _in_order(parts: list[np.ndarray], rank: np.ndarray, count: int) -> np.ndarray:
    """Rows of all parts at their rank (-1: left out). Empties the list of parts, one by one."""
    out = np.empty((count, *parts[0].shape[1:]), parts[0].dtype)
    stop = len(rank)
    while parts:
        part = parts.pop()
        start = stop - len(part)
        ranks = rank[start:stop]
        is_chosen = ranks >= 0
        out[ranks[is_chosen]] = part[is_chosen]
        stop = start
    return out


def _ranks(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A dictionary-encoded column as ranks of its values, int32: they sort faster than strings."""
    encoded = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        if not encoded.num_chunks:
            return pa.chunked_array([], pa.int32())
        encoded = encoded.chunk(0)
    rank = np.empty(len(encoded.dictionary), np.int32)
    rank[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    return pa.chunked_array([pa.array(rank).take(encoded.indices)])
