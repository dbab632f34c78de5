"""What a query reads from shards, now or when its results were stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.expr import Dataset, ReadWebDataset

__all__ = ["KeepsResults", "datasets_of"]


class KeepsResults(dx.Expr):
    """An expression that reads what a query has given before."""

    @property
    def made_of(self) -> Any:
        """The expression of that query."""
        raise NotImplementedError


def datasets_of(expr: Any) -> Iterator[Dataset]:
    """The datasets that an expression is made of; of one that was computed nothing is known."""
    for read in expr.find_operations((ReadWebDataset, KeepsResults)):
        if isinstance(read, KeepsResults):
            yield from datasets_of(read.made_of)
        else:
            yield read.dataset
