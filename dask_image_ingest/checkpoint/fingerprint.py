"""Fingerprint of a query, from which the names of its results follow.

A frame's query is told in steps, each with a digest of what it does and of the steps before it,
and without the shards. So a partition is known by the last step, by its shard, and by which part of
that it is; what other partitions there are does not matter. That is so only where each partition
comes out of one part of one shard, or of some files, and nothing else: any other query is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.checkpoint.lineage import shards_of, splits_of, with_splits
from dask_image_ingest.checkpoint.partition_files import VersionedSplit, digest_of
from dask_image_ingest.checkpoint.scan import ReadStored
from dask_image_ingest.dask_internals import convert_legacy_graph, new_collection
from dask_image_ingest.dataset import ImageDecode, ReadImageFiles, Scan
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.export import operation_name
from dask_image_ingest.storage import Shard
from dask_image_ingest.user_functions import stable_token

# Operands that don't change results: who may read, and what dask calls the tasks.
_BESIDE = {"storage_options", "token"}
_EMPTY_FRAMES = {"meta", "parent_meta"}


@dataclass(frozen=True)
class QueryStep:
    """One operation of a query: its name for users, and a digest of all that it does."""

    name: str
    digest: str


@dataclass(frozen=True)
class FingerprintedQuery:
    """A query with its fingerprint.

    Attributes
    ----------
    expr
        The frame's query.
    steps
        Its operations, in order.
    splits
        What each partition is made of.
    shards
        The shards of each partition that the read knows, those that are left out included.
    version
        What stands for the user's functions, None where their code does.
    """

    expr: Any
    steps: tuple[QueryStep, ...]
    splits: tuple[VersionedSplit, ...]
    shards: tuple[tuple[Shard, ...], ...]
    version: str | None

    @functools.cached_property
    def digest(self) -> str:
        """Stands for all that is done to each partition."""
        return digest_of(self.steps[-1].digest, repr(self.version))

    @property
    def has_divisions(self) -> bool:
        """True if divisions are known, so that partition boundaries have to stay."""
        return bool(self.expr.known_divisions)

    def tasks_of(self, splits: list[VersionedSplit]) -> tuple[dict[Any, Any], list[Any]]:
        """A graph that makes these partitions, whatever the frame's own are, and their keys."""
        if self.has_divisions:
            numbers = {split: number for number, split in enumerate(self.splits)}
            frame = new_collection(self.expr).partitions[[numbers[split] for split in splits]]
        else:
            frame = new_collection(with_splits(self.expr, splits))
        if splits_of(frame.optimize(fuse=False).expr) != splits:
            raise ArgumentError(
                "checkpoint: dask brings rows of several partitions together for this frame, so "
                "that its results cannot be told by their shards"
            )
        optimized = frame.optimize()
        return convert_legacy_graph(optimized.__dask_graph__()), optimized.__dask_keys__()


def fingerprint_query(expr: Any, version: str | None) -> FingerprintedQuery:
    """Find out what a query computes, without computing any of it.

    Parameters
    ----------
    expr
        The query of a frame.
    version
        What stands for the user's functions, None where their code does.

    Raises
    ------
    ArgumentError
        If a partition of it is not made of one part of one shard, or of some files.
    FunctionError
        If it has functions that no digest can stand for.
    """
    steps: dict[str, QueryStep] = {}
    splits = splits_of(expr)
    _describe(expr, version, steps)
    read = next(
        node for node in expr.walk() if isinstance(node, (Scan, ReadImageFiles, ReadStored))
    )
    query = FingerprintedQuery(expr, tuple(steps.values()), tuple(splits), shards_of(read), version)
    shards = itertools.chain.from_iterable(query.shards)
    files = (file for shard in shards for file in filter(None, (shard, shard.sidecar)))
    unknown = next((file for file in files if not file.version), None)
    if unknown and version is None and not isinstance(read, ReadStored):
        raise ArgumentError(
            f"checkpoint: {unknown.url} has neither an ETag nor a time, so that nobody would see "
            "that it has changed. If it never does, pass version='1'; to compute all anew, "
            "another version"
        )
    return query


def _describe(expr: Any, version: str | None, steps: dict[str, QueryStep]) -> str:
    """Add the steps of a query in their order; give the digest of the last one."""
    if isinstance(expr, dx.Partitions):
        return _describe(expr.frame, version, steps)
    if expr._name in steps:
        return steps[expr._name].digest
    if isinstance(expr, Scan):
        told = list(_read_operands(expr, version))
    elif isinstance(expr, ReadStored):
        told = [",".join(expr.columns)]
    elif isinstance(expr, ReadImageFiles):
        told = [",".join(expr.columns), expr.files.root, repr(expr.files.classes)]
    else:
        told = [
            _describe(value, version, steps)
            if isinstance(value, dx.Expr)
            else _operand(expr, name, value, version)
            for name, value in _operands(expr)
        ]
    name = operation_name(expr)
    steps[expr._name] = QueryStep(name, digest_of(type(expr).__qualname__, *told))
    return steps[expr._name].digest


def _operands(expr: Any) -> Iterator[tuple[str, Any]]:
    parameters = expr._parameters
    names = [*parameters, *map(str, range(len(expr.operands) - len(parameters)))]
    for name, value in zip(names, expr.operands, strict=True):
        if name not in _BESIDE:
            yield name, value


def _operand(expr: Any, name: str, value: Any, version: str | None) -> str:
    if name in _EMPTY_FRAMES:
        # Its dtypes are those of a backend.
        value = list(map(str, getattr(value, "columns", ()))) or str(getattr(value, "name", ""))
    if isinstance(value, tuple) and any(isinstance(each, ImageDecode) for each in value):
        value = [
            (each.image, each.error, each.errors, each.pixels, _of_any_device(each.decoding))
            for each in value
        ]
    return f"{name}={_token(expr, _of_any_device(value), version)}"


def _read_operands(expr: Scan, version: str | None) -> Iterator[str]:
    spec, schema = expr.spec, expr.dataset.schema
    told = (
        spec.columns,
        spec.filters,
        spec.options.errors,
        spec.options.image_extensions,
        [(c.column, c.extension, str(c.type), c.path) for c in schema.components],
        [(c.column, c.name, str(c.type)) for c in schema.sidecar],
        _of_any_device(spec.options.decoding),
        (spec.options.image, spec.options.is_table),
        *(
            (each.column, each.extensions, _of_any_device(each.decoding))
            for each in spec.options.other_images
        ),
    )
    return (_token(expr, value, version) for value in told)


def _of_any_device(value: Any) -> Any:
    """The same decoding, wherever it is done: a machine without a GPU reads what one with has."""
    return replace(value, device="cpu") if isinstance(value, DecodeSpec) else value


def _token(expr: Any, value: Any, version: str | None) -> str:
    try:
        return stable_token(value, functions=version is None)
    except FunctionError as error:
        raise FunctionError(
            f"checkpoint: {operation_name(expr)} uses what no digest can stand for: {error}. Pass "
            "version='1' to vouch for the functions yourself, and another one when they change"
        ) from error
