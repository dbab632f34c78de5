"""The lazy read: which columns, rows and partitions a query needs goes down into the tasks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import dask
import pyarrow as pa
from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import BlockwiseIO, Len, Task
from dask_image_ingest.dataset import aligned, fewer_columns, masks, movable
from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.aligned import READ_NAME, RowSource
from dask_image_ingest.dataset.computed import ComputedFilter
from dask_image_ingest.dataset.filters_above import (
    all_through,
    filters_above,
    is_dependent,
    once_a_round,
)
from dask_image_ingest.dataset.head import HeadOfRead
from dask_image_ingest.dataset.late.decode import ImageDecode
from dask_image_ingest.dataset.late.node import move
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.partition import read_partition
from dask_image_ingest.dataset.predicates import as_filters
from dask_image_ingest.dataset.query import Query
from dask_image_ingest.dataset.schema import Schema
from dask_image_ingest.dataset.settled import is_settled
from dask_image_ingest.dataset.splits import ShardSplit
from dask_image_ingest.frames import REFERENCE, BackendName
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.storage import Shard

aligned.install()
fewer_columns.install()
masks.install()

#: The name of a read whose images are of one shape: all that is known of it once it is persisted.
SHAPE_IN_NAME = rf"{READ_NAME}-(\d+)x(\d+)x(\d+)-[0-9a-f]+"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Everything that a collection's tasks have in common, and the shards behind them.

    ``token`` stands for all of it, the sizes and modification times of the shards included.
    """

    splits: tuple[ShardSplit, ...]
    shards: tuple[Shard, ...]
    schema: Schema
    options: ReadOptions
    token: str

    def __dask_tokenize__(self) -> str:
        return self.token

    def __str__(self) -> str:
        return without_passwords(f"{len(self.splits)} partitions from {self.splits[0].url}")

    __repr__ = __str__


class ReadWebDataset(dx.PartitionsFiltered, BlockwiseIO):
    """Reads shards; takes up projections, filters, lengths and limits from the query around it."""

    _parameters: ClassVar = [
        "dataset",
        "columns",
        "filters",
        "computed",
        "limit",
        "references",
        "keeps_walk",
        "_partitions",
    ]
    _defaults: ClassVar = {
        "columns": None,
        "filters": None,
        "computed": (),
        "limit": None,
        "references": False,
        "keeps_walk": False,
        "_partitions": None,
    }
    _absorb_projections = True
    _filter_passthrough = True

    dataset: Dataset

    @functools.cached_property
    def _name(self) -> str:
        shape = self.dataset.options.decoding.shape
        if "image" in self.columns and None not in shape and not self.operand("references"):
            height, width, channels = shape
            return f"{READ_NAME}-{height}x{width}x{channels}-{self.deterministic_token}"
        return f"{READ_NAME}-{self.deterministic_token}"

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        columns = self.operand("columns")
        return list(self.dataset.schema.types) if columns is None else list(columns)

    @functools.cached_property
    def _meta(self) -> Any:
        types = {name: self.dataset.schema.types[name] for name in self.columns}
        if "image" in types and self.operand("references"):
            types["image"] = REFERENCE
        return self.dataset.options.get_backend().meta(types)

    def _divisions(self) -> tuple[None, ...]:
        # Of those that are read: dask's Repartition asks for these, past `divisions`.
        wanted = self.operand("_partitions")
        return (None,) * (len(self.dataset.splits if wanted is None else wanted) + 1)

    @functools.cached_property
    def divisions(self) -> tuple[None, ...]:
        """Unknown, since rows are labelled shard by shard."""
        return self._divisions()

    @property
    def _reads_all(self) -> bool:
        return self.operand("columns") is None

    @functools.cached_property
    def query(self) -> Query:
        """What the tasks are asked for."""
        dataset = self.dataset
        filters = self.operand("filters")
        computed = self.operand("computed")
        used = {*self.columns, *dnf.columns_of(filters)}
        used.update(*(each.columns for each in computed))
        # Who named components, or columns, does not want to hear of others.
        tell = self._reads_all and dataset.schema.inferred
        known = dataset.schema.extensions if tell else None
        return Query(
            options=dataset.options,
            columns=tuple(self.columns),
            filters=filters,
            computed=tuple(each.evaluated for each in computed),
            limit=self.operand("limit"),
            components=dataset.schema.select(used),
            sidecar=dataset.schema.select_sidecar(used),
            known_extensions=known,
            references=self.operand("references"),
            keeps_walk=self.operand("keeps_walk"),
        )

    @functools.cached_property
    def row_sources(self) -> tuple[RowSource, ...]:
        """The part of a shard that each partition is made of."""
        splits = (self.dataset.splits[number] for number in self._partitions)
        return tuple((split.url, split.part, split.parts) for split in splits)

    def as_references(self) -> tuple[dx.Expr, tuple[ImageDecode, ...]] | None:
        """The same rows without pixels, and what the references in their place stand for.

        None where there are no pixels, or where only the decode tells which rows there are.
        """
        query, options = self.query, self.dataset.options
        if query.references or not query.wants_pixels or query.loses_rows_by_decode:
            return None
        error = "error" if "error" in self.columns else None
        images = ImageDecode(
            "image", error, options.decoding, options.errors, options.storage_options
        )
        return self.substitute_parameters({"references": True}), (images,)

    def decoding(self, images: Sequence[ImageDecode]) -> ReadWebDataset | None:
        """A read that decodes as is asked of the references that this one gives.

        None where it gives none, or is asked for more than its images.
        """
        if not self.query.references or [each.image for each in images] != ["image"]:
            return None
        (how,) = images
        options = replace(
            self.dataset.options,
            decoding=how.decoding,
            errors=how.errors,
            storage_options=how.storage_options or self.dataset.options.storage_options,
        )
        token = tokenize(self.dataset.token, options)
        dataset = replace(self.dataset, options=options, token=token)
        told = [] if how.error in (None, *self.columns) else [how.error]
        if told not in ([], ["error"]):
            return None
        operands = {"dataset": dataset, "columns": [*self.columns, *told], "references": False}
        return self.substitute_parameters(operands)

    def _filtered_task(self, name: Any, index: int) -> Task:
        split = self.dataset.splits[index]
        return Task(name, read_partition, split, self.query, _data_producer=True)

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return super()._filter_passthrough_available(parent, dependents) and (
            self._filtered_by(parent) is not None
        )

    def _filtered_by(self, above: dx.Filter) -> dict[str, Any] | None:
        """The operands of this read with a filter taken up, None where it can't be."""
        if self.operand("limit") is not None:
            return None
        simple = self._with_filters(as_filters(above.predicate, self, *self._types))
        if simple is not None or not self._may_compute:
            return simple
        return self._with_computed(movable.computed_filter(above, self, *self._types))

    def _with_filters(self, filters: dnf.Filters | None) -> dict[str, Any] | None:
        both = None if filters is None else dnf.both(self.operand("filters"), filters)
        return None if both is None else {"filters": both}

    def _with_computed(self, computed: ComputedFilter | None) -> dict[str, Any] | None:
        if computed is None:
            return None
        those = self.operand("computed")
        return {"computed": those if computed in those else (*those, computed)}

    def _filtered_above(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        """``parent`` over the rows that a filter further up keeps; that filter stays there."""
        if not self._may_compute:
            return None
        operands = once_a_round(self, dependents, self._filters_from_above)
        if operands is None:
            return None
        return parent.substitute(self, self.substitute_parameters(operands))

    def _filters_from_above(self, dependents: Any) -> dict[str, Any] | None:
        for above in filters_above(self, dependents):
            computed = movable.computed_filter(above, self, *self._types)
            operands = self._with_simple(computed) or self._with_computed(computed)
            if operands and any(self.operand(name) != new for name, new in operands.items()):
                return operands  # the others in the next rounds
        return None

    def _with_simple(self, computed: ComputedFilter | None) -> dict[str, Any] | None:
        if computed is None or not isinstance(computed.kept, dx.Filter):
            return None
        predicate, rows = computed.kept.predicate, computed.kept.frame.frame
        filters = as_filters(predicate, rows, *self._types)
        # Of alternatives it is not seen whether they are among the filters already.
        return None if filters is None or len(filters) > 1 else self._with_filters(filters)

    def takes_up(self, query: dx.Query, dependents: Any) -> bool:
        """Whether the optimiser puts a ``query`` of this read into the read."""
        return not is_settled(self, dependents) and self._queried(query, dependents) is not None

    def _queried(self, query: dx.Query, dependents: Any) -> dx.Expr | None:
        """The read of the rows that the text of a ``query`` keeps."""
        if not self._may_compute or not all_through(self, query, dependents):
            return None
        operands = self._with_computed(movable.computed_filter(query, self, *self._types))
        return None if operands is None else self.substitute_parameters(operands)

    @property
    def _may_compute(self) -> bool:
        return self.operand("limit") is None and dask.config.get("image-ingest.decode-late", True)

    @property
    def _types(self) -> tuple[Mapping[str, pa.DataType], BackendName]:
        return self.dataset.schema.types, self.dataset.options.backend

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_settled(self, dependents):
            return None
        made = self._taken_up(parent, dependents)
        return move(parent, self, dependents) if made is None else made

    def _taken_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        """``parent`` with what this read does in its place."""
        made = self._filtered_above(parent, dependents)
        if made is not None:
            return made
        if isinstance(parent, dx.Filter):
            if self._filter_passthrough_available(parent, dependents):
                return self.substitute_parameters(self._filtered_by(parent))
            return None
        if isinstance(parent, dx.Query):
            return self._queried(parent, dependents)
        if isinstance(parent, Len):
            return self._with(parent, columns=[])
        if isinstance(parent, dx.Index):
            if not is_dependent(parent, self, dependents):
                return None
            columns = dx.determine_column_projection(self, parent, dependents)
            columns = [columns] if isinstance(columns, str) else columns
            return self._with(parent, columns=[c for c in self.columns if c in columns])
        if type(parent) is dx.Head:
            return self._head(parent) if parent.n >= 0 else None
        return super()._simplify_up(parent, dependents)

    def _head(self, parent: dx.Head) -> HeadOfRead:
        limit = self.operand("limit")
        limit = parent.n if limit is None else min(parent.n, limit)
        return HeadOfRead(self.substitute_parameters({"limit": limit}), *parent.operands[1:])

    def _with(self, parent: dx.Expr, **operands: Any) -> dx.Expr | None:
        """``parent`` over a read with other operands; None where nothing would change."""
        if all(self.operand(name) == value for name, value in operands.items()):
            return None
        return type(parent)(self.substitute_parameters(operands), *parent.operands[1:])

    def __str__(self) -> str:
        query = self.query
        shown = {
            "columns": query.columns,
            "filters": query.filters,
            "computed": self.operand("computed") or None,
            "limit": query.limit,
            "references": query.references or None,
            "decodes": query.must_decode,
        }
        described = ", ".join(f"{k}={v!r}" for k, v in shown.items() if v is not None)
        return f"ReadWebDataset({self.dataset}, {described})"

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
        name = self._parameters[i]
        if name == "dataset":
            return f"{header} {op} decodes={self.query.must_decode}"
        return super()._tree_repr_argument_construction(i, op, header)


__all__ = ["SHAPE_IN_NAME", "Dataset", "ReadWebDataset"]
