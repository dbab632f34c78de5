"""Verdicts on some rows of a frame, looked up wherever such a row turns up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask import delayed

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import is_column, shown
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import MapColumns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of


@dataclass(frozen=True)
class Verdicts:
    """New columns of some rows of a frame.

    Parameters
    ----------
    identity
        The columns that a row is known by.
    rows
        Identities of the rows, ascending, uint64 (n,).
    columns
        For each name the value of each row; null where it has none.
    others
        The value of all other rows, for columns that have one.
    """

    identity: tuple[str, ...]
    rows: np.ndarray = field(repr=False)
    columns: Mapping[str, pa.Array] = field(repr=False)
    others: Mapping[str, bool]

    def of_none(self) -> Verdicts:
        """The same columns of no rows."""
        columns = {name: values[:0] for name, values in self.columns.items()}
        return Verdicts(self.identity, self.rows[:0], columns, self.others)


def identity_of(frame: Any, identity: Any = None, argument: str = "frame") -> tuple[str, ...]:
    """The columns that rows of a frame are known by, the one of their keys first.

    Raises
    ------
    ArgumentError
        If the frame lacks them.
    """
    if identity is not None:
        if not is_column(identity, frame.columns):
            raise ArgumentError(
                f"identity={shown(identity)}: {argument}= has no such column; pass one of unique "
                "values"
            )
        return (identity,)
    missing = [name for name in ("__key__", "__url__") if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"{argument}= has no column {', '.join(map(repr, missing))}, by which rows are told "
            "apart: keep the columns __url__, __key__ and offset of the read, or pass identity=, "
            "a column of unique values"
        )
    return ("__key__", "__url__", *({"offset"} & set(frame.columns)))


def identities(table: pa.Table, identity: Sequence[str]) -> np.ndarray:
    """A number for each row of a table, uint64 (n,).

    Of 10 million rows two have the same with a chance of 3 in a million.
    """
    columns = {name: _hashable(table[name], name) for name in identity}
    return pd.util.hash_pandas_object(pd.DataFrame(columns), index=False).to_numpy()


def _hashable(column: pa.ChunkedArray, name: str) -> Any:
    if name == "offset":  # a merge makes floats of integers
        return column.cast(pa.float64()).fill_null(-1).to_numpy()
    # Keys may be texts in one partition and dictionaries of them in another.
    return column.cast(pa.string()).to_pandas().astype(object)


def with_verdicts(frame: Any, verdicts: Verdicts) -> Any:
    """``frame`` with the columns of ``verdicts``, in place of those it has; lazy if it is."""
    replaced = [name for name in verdicts.columns if name in frame.columns]
    frame = frame.drop(columns=replaced) if replaced else frame
    if not isinstance(frame, FrameBase):
        return _look_up(frame, verdicts, verdicts)
    # One task, of which each partition gets the result.
    shared = dx._DelayedExpr(delayed(verdicts, traverse=False))
    none = verdicts.of_none()
    outputs = tuple(verdicts.columns)
    return new_collection(
        MapColumns(frame.expr, _look_up, outputs, verdicts.identity, shared, none)
    )


def _look_up(frame: Any, shared: Verdicts | None, none: Verdicts) -> Any:
    verdicts = none if shared is None else shared
    backend = backend_of(frame)
    identity = list(verdicts.identity)
    wanted = identities(backend.to_arrow(frame[identity]), identity)
    places = np.searchsorted(verdicts.rows, wanted)
    places[places == len(verdicts.rows)] = 0
    known = np.zeros(len(wanted), bool)
    if len(verdicts.rows):
        known = verdicts.rows[places] == wanted
    taken = pa.array(places, mask=~known)
    for name, values in verdicts.columns.items():
        column = values.take(taken)
        if name in verdicts.others:
            column = column.fill_null(verdicts.others[name])
        valid = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        given = column.drop_null()
        new = (
            given.to_pylist() if pa.types.is_string(given.type) else _numbers(given, backend.numpy)
        )
        frame = backend.with_columns(frame, {name: (new, given.type)}, valid.tolist())
    return frame


def _numbers(values: pa.Array, xp: Any) -> Any:
    return xp.asarray(values.to_numpy(zero_copy_only=False))


def sorted_verdicts(
    identity: tuple[str, ...],
    rows: np.ndarray,
    columns: Mapping[str, Any],
    others: Mapping[str, bool],
) -> Verdicts:
    """Verdicts of rows in any order."""
    order = np.argsort(rows)
    taken = pa.array(order)
    columns = {name: values.take(taken) for name, values in columns.items()}
    return Verdicts(identity, rows[order], columns, others)
