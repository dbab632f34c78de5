"""What a query asks of every shard: columns, filters, a limit."""

from __future__ import annotations

from dataclasses import dataclass

from dask_image_ingest.dataset.filters import Filters
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.schema import Component, SidecarColumn

__all__ = ["Query"]


@dataclass(frozen=True, slots=True)
class Query:
    """What every task of a collection has to know; small, because each task carries it.

    Attributes
    ----------
    options
        What does not change with the query.
    columns
        The columns of the result, in order.
    filters, limit
        Which rows to keep, and how many of them at most.
    components
        The components that the columns or the filters need.
    sidecar
        The columns of the files beside the shards that these need.
    known_extensions
        Extensions not warned about; None disables warnings.
    keeps_walk
        Whether a later step of the same task wants what a walk through the shard finds.
    """

    options: ReadOptions
    columns: tuple[str, ...]
    filters: Filters | None
    limit: int | None
    components: tuple[Component, ...]
    sidecar: tuple[SidecarColumn, ...]
    known_extensions: frozenset[str] | None
    keeps_walk: bool = False
