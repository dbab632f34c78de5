"""What a query asks of every shard: columns, filters, a limit, and whether that means decoding."""

from __future__ import annotations

from dataclasses import dataclass

from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.computed import EvaluatedFilter
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
    filters, computed, limit
        Which rows to keep, and how many of them at most.
    components
        The components that the columns or the filters need.
    sidecar
        The columns of the files beside the shards that these need.
    known_extensions
        Extensions of which no warning is given; None where none is given of any.
    references
        Whether ``image`` is a reference, and ``error`` null: the decode comes later.
    keeps_walk
        Whether a later step of the same task wants what a walk through the shard finds.
    """

    options: ReadOptions
    columns: tuple[str, ...]
    filters: Filters | None
    computed: tuple[EvaluatedFilter, ...]
    limit: int | None
    components: tuple[Component, ...]
    sidecar: tuple[SidecarColumn, ...]
    known_extensions: frozenset[str] | None
    references: bool = False
    keeps_walk: bool = False

    @property
    def wants_pixels(self) -> bool:
        """Whether the image column itself is asked for."""
        return "image" in self.columns

    @property
    def must_decode(self) -> bool:
        """Whether images are decoded: for their pixels, or because only that tells the errors."""
        return not self.references and (
            self.wants_pixels
            or "error" in self.columns
            or "error" in dnf.columns_of(self.filters)
            or self.options.errors == "drop"
        )

    @property
    def decodes_every_row(self) -> bool:
        """Whether no row is left out before images are decoded."""
        chosen = self.filters_before_decode or self.computed or self.limit is not None
        return self.must_decode and not chosen

    @property
    def filters_before_decode(self) -> Filters | None:
        """What of the filters can be judged without decoding."""
        return dnf.without(self.filters, "error") if self.must_decode else self.filters

    @property
    def loses_rows_by_decode(self) -> bool:
        """Whether rows are gone after the decode that were there before."""
        return self.options.errors == "drop" or self.filters_after_decode is not None

    @property
    def filters_after_decode(self) -> Filters | None:
        """The filters, where some of them need to know which images could be decoded."""
        return self.filters if "error" in dnf.columns_of(self.filters) else None
