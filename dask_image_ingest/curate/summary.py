"""Summary statistics for ``write_report``, from one pass over the frame and mergeable in a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.curate.ranking import row_ids
from dask_image_ingest.curate.vectors import valid_vectors
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.frames import backend_of, pandas_type
from dask_image_ingest.image_counts import reduce_partitions

# Significant bits of the values that a histogram counts: exact to a tenth of a percent.
_BITS = 10


@dataclass(frozen=True)
class Plan:
    """Plan of a summary: which columns are what, and how many rows to keep.

    Parameters
    ----------
    signals
        Numeric column → which of its ends are bad: True for the highest values, False for the
        lowest.
    rules
        Boolean column → the value with which it drops a row.
    groups
        Column of group numbers → the column of distances to the kept row, and whether the largest
        (True) or the smallest values are the farthest.
    vectors
        A column of vectors, or None.
    identity
        The columns that identify a row, the key first.
    worst, points
        How many rows to keep of each end of a signal, and how many vectors.
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
        """All columns that are summarized."""
        names = [*self.signals, *self.rules]
        for group, (distance, _) in self.groups.items():
            names += [group, distance]
        return list(dict.fromkeys([*names, *([self.vectors] if self.vectors else [])]))


@dataclass
class Summary:
    """Statistics of one or more partitions.

    Attributes
    ----------
    rows
        Number of rows.
    values
        For each signal, counts by (rounded) value.
    worst
        For each signal and end (True: highest), the worst rows, with the signal as ``value``.
    patterns
        For each set of rules, how many rows exactly these drop.
    groups
        For each column of groups, a table: ``group``, its farthest ``distance``, and the number of
        its dropped ``rows``.
    points
        A random sample for the map: ``key``, ``order`` (the hash it was drawn by), ``vector``,
        ``dropped``.
    """

    rows: int = 0
    values: dict[str, pd.Series] = field(default_factory=dict)
    worst: dict[tuple[str, bool], pd.DataFrame] = field(default_factory=dict)
    patterns: Counter[tuple[str, ...]] = field(default_factory=Counter)
    groups: dict[str, pd.DataFrame] = field(default_factory=dict)
    points: pd.DataFrame | None = None


def summarize(frame: Any, plan: Plan, locations: Sequence[str]) -> Summary:
    """Summarize a frame according to ``plan``; computes each row once."""
    frame = select_columns(frame, dict.fromkeys([*locations, *plan.columns]))
    summary: Summary = reduce_partitions(
        frame, partial(_summary, plan=plan), partial(_merge, plan=plan)
    )
    return summary


def _summary(frame: Any, plan: Plan) -> Summary:
    """Summarize one partition."""
    backend = backend_of(frame)
    names = [name for name in frame.columns if name != plan.vectors]
    arrow = backend.to_arrow(frame[names])
    table = arrow.to_pandas(types_mapper=pandas_type)
    locations = table[[name for name in names if name not in plan.columns]]
    summary = Summary(rows=len(table))
    for name, ends in plan.signals.items():
        values = pd.Series(table[name].to_numpy(float, na_value=np.nan), table.index)
        values = values[np.isfinite(values)]
        summary.values[name] = _round(values).value_counts()
        valid = locations.loc[values.index].assign(value=values)
        for highest in ends:
            summary.worst[name, highest] = _worst(valid, plan, highest)
    dropped_by = {
        name: table[name].to_numpy(object, na_value=None) == drops
        for name, drops in plan.rules.items()
    }
    dropped = np.zeros(len(table), bool)
    for mask in dropped_by.values():
        dropped |= mask.astype(bool)
    summary.patterns = Counter(
        tuple(name for name, mask in dropped_by.items() if mask[row])
        for row in np.flatnonzero(dropped)
    )
    for name, (distance, largest) in plan.groups.items():
        # The kept row of a group has no distance.
        members = table[[name, distance]].dropna()
        group, values = members[name].astype("int64"), members[distance].astype("float64")
        groups = pd.DataFrame({"group": group, "distance": values, "rows": 1})
        summary.groups[name] = _merge_groups(groups, largest)
    if plan.vectors:
        rows, vectors = valid_vectors(frame, plan.vectors)
        points = pd.DataFrame({"key": table[plan.identity[0]].iloc[rows].astype(str).to_numpy()})
        points["order"] = row_ids(arrow, plan.identity)[rows]
        points["dropped"] = dropped[rows]
        points["vector"] = list(vectors)
        summary.points = points.nsmallest(plan.points, "order")
    return summary


def _merge(parts: list[Summary], plan: Plan) -> Summary:
    summary = Summary(rows=sum(part.rows for part in parts))
    for name, ends in plan.signals.items():
        counts = pd.concat([part.values[name] for part in parts])
        summary.values[name] = counts.groupby(level=0).sum()
        for highest in ends:
            worst = pd.concat([part.worst[name, highest] for part in parts])
            summary.worst[name, highest] = _worst(worst, plan, highest)
    for part in parts:
        summary.patterns.update(part.patterns)
    for name, (_, largest) in plan.groups.items():
        groups = pd.concat([part.groups[name] for part in parts])
        summary.groups[name] = _merge_groups(groups, largest)
    if plan.vectors:
        points = pd.concat([part.points for part in parts if part.points is not None])
        summary.points = points.nsmallest(plan.points, "order")
    return summary


def _worst(rows: pd.DataFrame, plan: Plan, highest: bool) -> pd.DataFrame:
    """The ``plan.worst`` rows at one end of their ``value``, ties by identity."""
    order = ["value", *plan.identity]
    ascending = [not highest, *(True for _ in plan.identity)]
    return rows.sort_values(order, ascending=ascending).head(plan.worst)


def _merge_groups(rows: pd.DataFrame, largest: bool) -> pd.DataFrame:
    """One row for each group: the farthest distance and the sum of ``rows``."""
    by_group = rows.groupby("group")
    distance = by_group["distance"].max() if largest else by_group["distance"].min()
    return pd.DataFrame({"distance": distance, "rows": by_group["rows"].sum()}).reset_index()


def _round(values: pd.Series) -> pd.Series:
    """Round to `_BITS` significant bits, so that few distinct values have to be counted."""
    mantissa, exponent = np.frexp(values.to_numpy())
    return pd.Series(np.ldexp(np.round(mantissa * 2**_BITS), exponent - _BITS))
