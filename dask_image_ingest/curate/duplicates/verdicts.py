"""Verdicts: new columns for some rows of a frame, joined lazily by a hash of the row's identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask import delayed
from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import is_column, shown
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import MapColumns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of


@dataclass(frozen=True)
class Verdicts:
    """New columns for some rows of a frame.

    Parameters
    ----------
    identity
        The columns that identify a row.
    ids
        `row_ids` of the rows, ascending, uint64 (n,).
    columns
        The values of each new column, (n,).
    defaults
        The value in all other rows; null for columns that are not here.
    """

    identity: tuple[str, ...]
    ids: np.ndarray = field(repr=False)
    columns: Mapping[str, pa.Array] = field(repr=False)
    defaults: Mapping[str, bool]

    def __dask_tokenize__(self) -> str:
        # By values: the buffers of equal Arrow arrays may differ where they are null.
        values = pd.util.hash_pandas_object(pa.table(dict(self.columns)).to_pandas(), index=False)
        types = [(name, str(array.type)) for name, array in self.columns.items()]
        return str(tokenize(self.identity, self.ids, values.to_numpy(), types, self.defaults))

    def empty(self) -> Verdicts:
        """The same columns, for no rows."""
        columns = {name: values[:0] for name, values in self.columns.items()}
        return Verdicts(self.identity, self.ids[:0], columns, self.defaults)


def resolve_identity(frame: Any, identity: Any = None, argument: str = "frame") -> tuple[str, ...]:
    """The columns that identify a row, the key first.

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
            f"{argument}= has no column {', '.join(map(repr, missing))}, which identifies rows: "
            "keep the columns __url__, __key__ and offset of the read, or pass identity=, a column "
            "of unique values"
        )
    return ("__key__", "__url__", *({"offset"} & set(frame.columns)))


def row_ids(table: pa.Table, identity: Sequence[str]) -> np.ndarray:
    """A hash of each row's identity, uint64 (n,).

    Among 10 million rows, the chance of a collision is 3 in a million.
    """
    columns = {name: _hashable(table[name], name) for name in identity}
    return pd.util.hash_pandas_object(pd.DataFrame(columns), index=False).to_numpy()


def _hashable(column: pa.ChunkedArray, name: str) -> Any:
    if name == "offset":  # pandas casts integers to floats in an outer merge
        return column.cast(pa.float64()).fill_null(-1).to_numpy()
    # Keys may be strings in one partition and dictionary-encoded in another.
    return column.cast(pa.string()).to_pandas().astype(object)


def with_verdicts(frame: Any, verdicts: Verdicts) -> Any:
    """Add or replace the columns of ``verdicts`` in ``frame``; lazy if the frame is."""
    replaced = [name for name in verdicts.columns if name in frame.columns]
    frame = frame.drop(columns=replaced) if replaced else frame
    if not isinstance(frame, FrameBase):
        return _look_up(frame, verdicts, verdicts)
    # One task in the graph, whose result all partitions share.
    shared = dx._DelayedExpr(delayed(verdicts, pure=True, traverse=False))
    outputs = tuple(verdicts.columns)
    return new_collection(
        MapColumns(frame.expr, _look_up, outputs, verdicts.identity, shared, verdicts.empty())
    )


def _look_up(frame: Any, shared: Verdicts | None, empty: Verdicts) -> Any:
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
        column = values.take(taken)
        if name in verdicts.defaults:
            column = column.fill_null(verdicts.defaults[name])
        valid = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        present = column.drop_null()
        if pa.types.is_string(present.type):
            new = present.to_pylist()
        else:
            new = _numbers(present, backend.numpy)
        frame = backend.with_columns(frame, {name: (new, present.type)}, valid.tolist())
    return frame


def _numbers(values: pa.Array, xp: Any) -> Any:
    return xp.asarray(values.to_numpy(zero_copy_only=False))


def sorted_verdicts(
    identity: tuple[str, ...],
    ids: np.ndarray,
    columns: Mapping[str, Any],
    defaults: Mapping[str, bool],
) -> Verdicts:
    """Verdicts for rows in any order, sorted by their ids."""
    order = np.argsort(ids)
    taken = pa.array(order)
    columns = {name: values.take(taken) for name, values in columns.items()}
    return Verdicts(identity, ids[order], columns, defaults)
