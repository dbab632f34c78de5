"""The numbers that ``report`` shows: counted in one pass, in little memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
import numpy as np
import pandas as pd

from dask_image_ingest.curate.duplicates.verdicts import identities
from dask_image_ingest.curate.embeddings.vectors import valid_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.frames import backend_of, pandas_type

# Partitions whose summaries are merged in one task.
_MERGED = 16

# Values of a histogram are counted to so many bits: a tenth of a percent.
_BITS = 10


@dataclass(frozen=True)
class Plan:
    """The counts to make of a frame.

    Parameters
    ----------
    signals
        Columns of numbers; for each which ends are the worst: True is the highest one.
    rules
        Columns of truth values, and which of the two says that a row goes.
    groups
        Columns of groups, and that of a distance, of which the ``True`` largest are the farthest.
    vectors
        A column of vectors, or None.
    identity
        The columns that a row is known by, the one of its key first.
    worst, points
        How many rows of each signal, and how many vectors, are kept.
    """

    signals: dict[str, tuple[bool, ...]]
    rules: dict[str, bool]
    groups: dict[str, tuple[str, bool]]
    vectors: str | None
    identity: tuple[str, ...]
    worst: int
    points: int

    @property
    def columns(self) -> list[str]:
        """The columns that are looked at, but for those that say where an image is."""
        names = [*self.signals, *self.rules]
        for group, (distance, _) in self.groups.items():
            names += [group, distance]
        return list(dict.fromkeys([*names, *([self.vectors] if self.vectors else [])]))


@dataclass
class Summary:
    """The counts of some partitions.

    Attributes
    ----------
    rows
        How many there are.
    values
        Of each signal how often each value is there, to a tenth of a percent.
    worst
        Of each signal, and end, the worst rows, with its value as ``value``.
    patterns
        How many rows are dropped by each set of rules.
    groups
        Of each column of groups: the farthest of each group, and how many rows go.
    points
        Rows that stand for all, by chance: identity, key, vector, and whether the row goes.
    """

    rows: int = 0
    values: dict[str, pd.Series] = field(default_factory=dict)
    worst: dict[tuple[str, bool], pd.DataFrame] = field(default_factory=dict)
    patterns: Counter[tuple[str, ...]] = field(default_factory=Counter)
    groups: dict[str, pd.DataFrame] = field(default_factory=dict)
    points: pd.DataFrame | None = None


def summarize(frame: Any, plan: Plan, pointers: Sequence[str]) -> Summary:
    """Count what a plan asks for; each row of a frame is computed once."""
    frame = frame[list(dict.fromkeys([*pointers, *plan.columns]))]
    if not isinstance(frame, FrameBase):
        return _summary(frame, plan)
    parts = [dask.delayed(_summary)(part, plan) for part in frame.to_delayed()]
    while len(parts) > 1:
        parts = [
            dask.delayed(_merged)(parts[start : start + _MERGED], plan)
            for start in range(0, len(parts), _MERGED)
        ]
    made: Summary = dask.compute(parts[0])[0]
    return made


def _summary(frame: Any, plan: Plan) -> Summary:
    backend = backend_of(frame)
    names = [name for name in frame.columns if name != plan.vectors]
    arrow = backend.to_arrow(frame[names])
    table = arrow.to_pandas(types_mapper=pandas_type)
    pointers = table[[name for name in names if name not in plan.columns]]
    made = Summary(rows=len(table))
    for name, ends in plan.signals.items():
        values = pd.Series(table[name].to_numpy(float, na_value=np.nan), table.index)
        values = values[np.isfinite(values)]
        made.values[name] = _rounded(values).value_counts()
        some = pointers.loc[values.index].assign(value=values)
        for highest in ends:
            made.worst[name, highest] = _worst(some, plan, highest)
    takes = {
        name: table[name].to_numpy(object, na_value=None) == goes
        for name, goes in plan.rules.items()
    }
    goes = np.zeros(len(table), bool)
    for taken in takes.values():
        goes |= taken.astype(bool)
    made.patterns = Counter(
        tuple(name for name, taken in takes.items() if taken[row]) for row in np.flatnonzero(goes)
    )
    for name, (distance, _) in plan.groups.items():
        some = table[[name, distance]].dropna()
        farthest = pd.DataFrame(
            {"group": some[name].astype("int64"), "distance": some[distance].astype("float64")}
        )
        made.groups[name] = _grouped(farthest.assign(rows=1), plan.groups[name][1])
    if plan.vectors:
        rows, vectors = valid_vectors(frame, plan.vectors)
        points = pd.DataFrame({"key": table[plan.identity[0]].iloc[rows].astype(str).to_numpy()})
        points["order"] = identities(arrow, plan.identity)[rows]
        points["goes"] = goes[rows]
        points["vector"] = list(vectors)
        made.points = points.nsmallest(plan.points, "order")
    return made


def _merged(parts: list[Summary], plan: Plan) -> Summary:
    made = Summary(rows=sum(part.rows for part in parts))
    for name, ends in plan.signals.items():
        counts = pd.concat([part.values[name] for part in parts])
        made.values[name] = counts.groupby(level=0).sum()
        for highest in ends:
            some = pd.concat([part.worst[name, highest] for part in parts])
            made.worst[name, highest] = _worst(some, plan, highest)
    for part in parts:
        made.patterns.update(part.patterns)
    for name, (_, largest) in plan.groups.items():
        made.groups[name] = _grouped(pd.concat([part.groups[name] for part in parts]), largest)
    if plan.vectors:
        points = pd.concat([part.points for part in parts if part.points is not None])
        made.points = points.nsmallest(plan.points, "order")
    return made


def _worst(rows: pd.DataFrame, plan: Plan, highest: bool) -> pd.DataFrame:
    order = ["value", *plan.identity]
    ascending = [not highest, *(True for _ in plan.identity)]
    return rows.sort_values(order, ascending=ascending).head(plan.worst)


def _grouped(rows: pd.DataFrame, largest: bool) -> pd.DataFrame:
    by = rows.groupby("group")
    distance = by["distance"].max() if largest else by["distance"].min()
    return pd.DataFrame({"distance": distance, "rows": by["rows"].sum()}).reset_index()


def _rounded(values: pd.Series) -> pd.Series:
    mantissa, exponent = np.frexp(values.to_numpy())
    return pd.Series(np.ldexp(np.round(mantissa * 2**_BITS), exponent - _BITS))
