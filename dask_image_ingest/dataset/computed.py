"""Filters that a task evaluates before it decodes, as pandas or cuDF would after the read.

Each is carried into the task as a small graph over the metadata of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.frames import Backend

#: The column of a row's position among those that a predicate is evaluated for.
POSITION = "__position__"


class Metadata(dx.Expr):
    """Stands for the metadata of a partition, which is not decoded yet."""

    _parameters: ClassVar = ["empty"]

    @functools.cached_property
    def _meta(self) -> Any:
        return self.operand("empty")

    def _divisions(self) -> tuple[None, None]:
        return (None, None)

    def __str__(self) -> str:
        return "rows"


@dataclass(frozen=True, eq=False)
class ComputedFilter:
    """A predicate to be evaluated on metadata.

    Attributes
    ----------
    kept : Expr
        The positions of the rows to keep, of an expression over ``Metadata``.
    columns : tuple of str
        The columns that it looks at.
    shown : str
        The predicate, for whoever looks at a query.
    """

    kept: dx.Expr
    columns: tuple[str, ...]
    shown: str

    def __dask_tokenize__(self) -> str:
        return self.kept._name

    def __repr__(self) -> str:
        return self.shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComputedFilter) and self.kept._name == other.kept._name

    def __hash__(self) -> int:
        return hash(self.kept._name)

    @functools.cached_property
    def evaluated(self) -> EvaluatedFilter:
        """What a task has of it."""
        kept = self.kept
        if isinstance(kept, dx.Filter):
            # Not the filter itself: Dask would pass it below some of what makes a mask.
            kept = dx.Filter(kept.frame, kept.predicate.optimize(fuse=False))
        nodes = {node._name: node for node in kept.walk()}
        (source,) = (node for node in nodes.values() if isinstance(node, Metadata))
        del nodes[source._name]
        tasks = [node._task((name, 0), 0) for name, node in nodes.items()]
        return EvaluatedFilter(dx.Task.fuse(*tasks), (source._name, 0), self.columns)


@dataclass(frozen=True)
class EvaluatedFilter:
    """A predicate as a task has it."""

    graph: Callable[[dict[Any, Any]], Any]
    source: tuple[str, int]
    columns: tuple[str, ...]

    def matching(self, table: pa.Table, numbers: np.ndarray, backend: Backend) -> np.ndarray:
        """The positions of the rows to keep; ``numbers`` are their labels."""
        table = table.select(self.columns)
        table = table.append_column(POSITION, pa.array(np.arange(len(numbers))))
        kept = self.graph({self.source: backend.frame(table, numbers, None)})
        return np.asarray(backend.host(backend.values(kept)), np.int64)


__all__ = ["POSITION", "ComputedFilter", "EvaluatedFilter", "Metadata"]
