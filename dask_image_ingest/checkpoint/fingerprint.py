"""Fingerprint of a query, from which the file names of its partitions follow.

Each step of the query gets a digest of its operands and of the steps before it, but not of the
shards. So a partition is identified by the last step's digest, its shard, and its part of the
shard, independently of other partitions. This needs each partition to be computed from one part of
one shard, or from some files, alone; any other query is an error.
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
from dask_image_ingest.dataset import ColumnDecode, Scan
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.export import operation_name, shared_value
from dask_image_ingest.storage import Shard
from dask_image_ingest.url_secrets import url_identity
from dask_image_ingest.user_functions import stable_token

# Operands that don't change results: credentials, and names of tasks.
_IGNORED_OPERANDS = {"storage_options", "token"}
_META_OPERANDS = {"meta", "parent_meta"}


@dataclass(frozen=True)
class QueryStep:
    """One operation of a query: its name for users, and the digest of it and its inputs."""

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
        What each partition is computed from.
    shards
        The shards of every partition of the read, including partitions that the query leaves out.
    version
        Identifies the user's functions; None to digest their code.
    """

    expr: Any
    steps: tuple[QueryStep, ...]
    splits: tuple[VersionedSplit, ...]
    shards: tuple[tuple[Shard, ...], ...]
    version: str | None

    @functools.cached_property
    def digest(self) -> str:
        """Digest of everything that is done to each partition."""
        return digest_of(self.steps[-1].digest, repr(self.version))

    @property
    def has_divisions(self) -> bool:
        """True if divisions are known, so that partition boundaries must be kept."""
        return bool(self.expr.known_divisions)

    def tasks_of(self, splits: list[VersionedSplit]) -> tuple[dict[Any, Any], list[Any]]:
        """A graph that computes these splits, whatever the frame's own partitions, and its keys."""
        if self.has_divisions:
            numbers = {split: number for number, split in enumerate(self.splits)}
            frame = new_collection(self.expr).partitions[[numbers[split] for split in splits]]
        else:
            frame = new_collection(with_splits(self.expr, splits))
        if splits_of(frame.optimize(fuse=False).expr) != splits:
            raise ArgumentError(
                "checkpoint: Dask combines rows of several partitions for this frame, so that its "
                "results cannot be assigned to shards"
            )
        optimized = frame.optimize()
        return convert_legacy_graph(optimized.__dask_graph__()), optimized.__dask_keys__()


def fingerprint_query(expr: Any, version: str | None) -> FingerprintedQuery:
    """Fingerprint a frame's query.

    Parameters
    ----------
    expr
        The query.
    version
        Identifies the user's functions; None to digest their code.

    Raises
    ------
    ArgumentError
        If a partition is not computed from one part of one shard, or from some files, alone.
    FunctionError
        If a function cannot be digested.
    """
    steps: dict[str, QueryStep] = {}
    splits = splits_of(expr)
    _describe(expr, version, steps)
    read = next(node for node in expr.walk() if isinstance(node, (Scan, ReadStored)))
    query = FingerprintedQuery(expr, tuple(steps.values()), tuple(splits), shards_of(read), version)
    shards = itertools.chain.from_iterable(query.shards)
    files = (file for shard in shards for file in filter(None, (shard, shard.sidecar)))
    unversioned = next((file for file in files if not file.version), None)
    if unversioned and version is None and not isinstance(read, ReadStored):
        raise ArgumentError(
            f"checkpoint: {unversioned.url} has neither an ETag nor a time, so that a change would "
            "go undetected. If it never changes, pass version='1'; to compute all again, another "
            "version"
        )
    return query


def _describe(expr: Any, version: str | None, steps: dict[str, QueryStep]) -> str:
    """Add the steps of a query in order; return the digest of the last one."""
    if isinstance(expr, dx.Partitions):
        return _describe(expr.frame, version, steps)
    if expr._name in steps:
        return steps[expr._name].digest
    if isinstance(expr, Scan):
        texts = list(_read_operands(expr, version))
    elif isinstance(expr, ReadStored):
        texts = [",".join(expr.columns)]
    else:
        texts = [
            _describe(value, version, steps)
            if isinstance(value, dx.Expr) and not isinstance(value, dx._DelayedExpr)
            else _operand_text(expr, name, value, version)
            for name, value in _operands(expr)
        ]
    name = operation_name(expr)
    steps[expr._name] = QueryStep(name, digest_of(type(expr).__qualname__, *texts))
    return steps[expr._name].digest


def _operands(expr: Any) -> Iterator[tuple[str, Any]]:
    parameters = expr._parameters
    names = [*parameters, *map(str, range(len(expr.operands) - len(parameters)))]
    for name, value in zip(names, expr.operands, strict=True):
        if name not in _IGNORED_OPERANDS:
            yield name, value


def _operand_text(expr: Any, name: str, value: Any, version: str | None) -> str:
    if isinstance(value, dx._DelayedExpr):
        value = shared_value(value.obj)
    if name in _META_OPERANDS:
        # Without dtypes, which differ between backends.
        value = list(map(str, getattr(value, "columns", ()))) or str(getattr(value, "name", ""))
    if isinstance(value, tuple) and any(isinstance(item, ColumnDecode) for item in value):
        value = [
            (item.image, item.error, item.errors, item.pixels, _without_device(item.decoding))
            for item in value
        ]
    return f"{name}={_token(expr, _without_device(value), version)}"


def _read_operands(expr: Scan, version: str | None) -> Iterator[str]:
    spec, schema = expr.spec, expr.dataset.schema
    operands = (
        spec.columns,
        spec.filters,
        spec.options.errors,
        spec.options.image_extensions,
        [(c.column, c.extension, str(c.type), c.path) for c in schema.components],
        [(c.column, c.name, str(c.type)) for c in schema.sidecar],
        _without_device(spec.options.decoding),
        (spec.options.image, spec.options.is_table),
        (spec.options.root and url_identity(spec.options.root), spec.options.classes),
        *(
            (image.column, image.extensions, _without_device(image.decoding))
            for image in spec.options.other_images
        ),
    )
    return (_token(expr, value, version) for value in operands)


def _without_device(value: Any) -> Any:
    """The same decode on the CPU, so that checkpoints made with and without a GPU are the same."""
    return replace(value, device="cpu") if isinstance(value, DecodeSpec) else value


def _token(expr: Any, value: Any, version: str | None) -> str:
    try:
        return stable_token(value, functions=version is None)
    except FunctionError as error:
        raise FunctionError(
            f"checkpoint: {operation_name(expr)} uses what no digest can stand for: {error}. Pass "
            "version='1' to vouch for the functions yourself, and another one when they change"
        ) from error
