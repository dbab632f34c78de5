"""What a query reads from shards, now or when its results were stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.expr import Dataset, ReadWebDataset

__all__ = ["KeepsResults", "datasets_of", "shard_of_partition"]


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


def shard_of_partition(expr: Any, number: int) -> str | None:
    """The shard that a partition is read from; None where it has no one shard of its own."""
    reads = list(expr.find_operations(ReadWebDataset))
    if len(reads) != 1 or reads[0].npartitions != expr.npartitions:
        return None
    url: str = reads[0].row_sources[number][0]
    return url
