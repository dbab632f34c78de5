"""A frame's query: the shards it reads, public names of its operations, and its fingerprint.

The fingerprint is the same in every process. Unlike Dask's own token, which identifies functions of
a module by name, it changes when a function is edited. It ignores the boundaries of partitions,
which depend on the memory of the workers. An export fingerprints the shards, too; a checkpoint does
so for each partition.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from dask.base import tokenize
from dask.delayed import Delayed, DelayedLeaf

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import ReadOptions
from dask_image_ingest.dataset.plan import (
    AppendsColumns,
    KeepsResults,
    MapColumns,
    Read,
    Scan,
    ScanFiles,
    ScanShards,
    ScanTables,
    datasets_of,
    partition_sources,
)
from dask_image_ingest.dataset.references import CutRows, Decode, encoded_by, unfused
from dask_image_ingest.dataset.scan import ColumnDecode
from dask_image_ingest.dataset.schema import ImageMember
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.frames import backend_of, with_urls
from dask_image_ingest.ops import MapBatches
from dask_image_ingest.storage import Shard, is_pipe, local_path
from dask_image_ingest.typedefs import AnyFrame
from dask_image_ingest.url_secrets import url_identity
from dask_image_ingest.user_functions import stable_token

# Operands that don't change results: credentials, and names of tasks.
_IGNORED_OPERANDS = {"storage_options", "token"}
_META_OPERANDS = {"meta", "parent_meta"}


def as_query(frame: AnyFrame) -> AnyFrame:
    """A lazy frame before ``optimize()`` fused its steps; other frames unchanged."""
    return new_collection(unfused(frame.expr)) if isinstance(frame, FrameBase) else frame


def shards_read(frame: AnyFrame) -> dict[str, Shard]:
    """All shards that a lazy frame reads, by URL, even if it keeps no row of them.

    Empty for a computed or persisted frame.
    """
    return {shard.url: shard for dataset in _datasets(frame) for shard in dataset.shards}


def reads_samples(frame: AnyFrame) -> bool:
    """True for a lazy frame that reads shards."""
    lazy = isinstance(frame, FrameBase)
    return lazy and bool([*frame.expr.find_operations((ScanShards, KeepsResults))])


def encoded_columns(frame: AnyFrame) -> set[Any]:
    """The columns of encoded images that a lazy frame has decoded."""
    if not isinstance(frame, FrameBase):
        return set()
    return {
        column
        for step in frame.expr.find_operations(MapColumns)
        if (column := encoded_by(step)) is not None
    }


def source_options_of(frame: AnyFrame) -> dict[str, Any] | None:
    """The storage options that a lazy frame's shards are read with; None if unknown."""
    options_by_url: dict[str, dict[str, Any]] = {}
    for dataset in _datasets(frame):
        url = next((shard.url for shard in dataset.shards if _needs_options(shard.url)), None)
        options = dataset.options.storage_options or {}
        if url is not None and options not in options_by_url.values():
            options_by_url[url] = options
    if len(options_by_url) > 1:
        one, other, *_ = sorted(options_by_url)
        raise ArgumentError(
            f"the frame reads {one} and {other} with different storage_options. Pass "
            "source_options= for both, or export one after the other"
        )
    return next(iter(options_by_url.values()), None)


def operation_name(expr: dx.Expr) -> str:
    """Public name of an operation."""
    if isinstance(expr, ScanShards):
        return "read_webdataset_images"
    if isinstance(expr, ScanTables):
        return "read_parquet_images"
    if isinstance(expr, ScanFiles):
        return "read_images"
    if isinstance(expr, Decode):
        below = expr.frame
        while isinstance(below, AppendsColumns):
            below = below.frame
        return operation_name(below) if isinstance(below, Scan) else "decode_images"
    if isinstance(expr, MapBatches):
        function = expr.batch_map.function
        return f"{function.called_by}({function.name})"
    if isinstance(expr, CutRows):
        return f"images.{expr.step}"
    if isinstance(expr, MapColumns):
        return str(expr.function.__name__).strip("_")
    if isinstance(expr, dx.MapPartitions):
        return str(expr)
    if isinstance(expr, dx.ReadParquet):
        return "dd.read_parquet"
    if isinstance(expr, dx.FromGraph):
        return "a persisted frame"
    return type(expr).__name__


def _needs_options(url: str) -> bool:
    return local_path(url) is None or is_pipe(url)


def _datasets(frame: AnyFrame) -> Iterable[Any]:
    """The datasets of shards and image files that a lazy frame reads."""
    return datasets_of(frame.expr) if isinstance(frame, FrameBase) else ()


# Part of fingerprints that hold in this process only.
_PROCESS = uuid.uuid4().hex


def frame_fingerprint(frame: AnyFrame, columns: Sequence[str]) -> str:
    """Token of some columns of a frame, and of the shards that it reads.

    It holds in this process only if the frame is persisted, has delayed objects, or functions
    without a stable token.
    """
    frame = frame[list(columns)]
    if not isinstance(frame, FrameBase):
        with suppress(pa.ArrowException):  # other objects than Arrow has
            frame = with_urls(backend_of(frame).to_storage(frame), url_identity)
        return tokenize(frame)
    try:
        steps = query_steps(frame.expr)
    except Exception:  # an object without a stable token
        return tokenize(frame.expr, _PROCESS)
    return digest_of(steps[-1].digest, *_shards_and_selections(frame.expr))


def _shards_and_selections(expr: dx.Expr) -> Iterator[str]:
    """The shards of each read, with their versions, and what selected partitions are read from."""
    for step in expr.walk():
        if isinstance(step, Scan):
            yield step.dataset.options.shard_errors
        if isinstance(step, Read):
            splits = itertools.chain.from_iterable(step.operands[0].partitions)
            yield from dict.fromkeys(split.shard.identity for split in splits)
            selects = step.operand("_partitions") is not None
        else:
            selects = isinstance(step, dx.Partitions)
        sources = partition_sources(step) if selects else None
        if sources is not None:
            yield repr(
                [[(s.shard.identity, s.part, s.parts) for s in partition] for partition in sources]
            )


@dataclass(frozen=True)
class QueryStep:
    """One operation of a query: its name for users, and the digest of it and its inputs."""

    name: str
    digest: str


def query_steps(expr: dx.Expr, functions: bool = True) -> tuple[QueryStep, ...]:
    """Digest each operation of a query, in order; the last digest identifies the query.

    The shards and partitions of reads are left out, and without ``functions`` the user's functions.
    """
    steps: dict[str, QueryStep] = {}
    _digest_step(expr, functions, steps)
    return tuple(steps.values())


def _digest_step(expr: dx.Expr, functions: bool, steps: dict[str, QueryStep]) -> str:
    """Add an operation, after those before it; return its digest."""
    if expr._name not in steps:
        texts = [
            _digest_step(value, functions, steps)
            if isinstance(value, dx.Expr) and not isinstance(value, dx._DelayedExpr)
            else f"{name}={_token(expr, name, value, functions)}"
            for name, value in _operands(expr)
        ]
        digest = digest_of(type(expr).__qualname__, *texts)
        steps[expr._name] = QueryStep(operation_name(expr), digest)
    return steps[expr._name].digest


def _operands(expr: dx.Expr) -> Iterator[tuple[str, Any]]:
    """The operands of an operation that determine its result, by name."""
    if isinstance(expr, Scan):
        spec, schema = expr.spec, expr.dataset.schema
        root = spec.options.root and url_identity(spec.options.root)
        # What the result does not depend on is set to one value.
        options = replace(
            spec.options, root=root, backend="pandas", shard_errors="raise", needs_sidecars=False
        )
        yield "options", _portable(options)
        yield "columns", (spec.columns, spec.filters, spec.limit)
        members = schema.member_columns
        yield "members", [(m.column, m.extension, str(m.type), m.path) for m in members]
        yield "sidecar", [(c.column, c.name, str(c.type)) for c in schema.sidecar]
    elif isinstance(expr, KeepsResults):
        yield "columns", expr.columns
    elif isinstance(expr, dx.ReadParquet):
        yield "name", expr._name  # has the fingerprints of its files
    elif isinstance(expr, dx.FromGraph) or (
        isinstance(expr, dx.Split) and not isinstance(expr.random_state, int)
    ):
        raise _no_stable_token(expr)
    else:
        more = map(str, range(len(expr.operands) - len(expr._parameters)))
        for name, value in zip([*expr._parameters, *more], expr.operands, strict=True):
            if name not in _IGNORED_OPERANDS:
                yield name, value


def _token(expr: dx.Expr, name: str, value: object, functions: bool) -> str:
    if isinstance(value, dx._DelayedExpr):
        value = value.obj
    if isinstance(value, Delayed):
        # A value that all partitions share, such as the values of ``isin``.
        if not isinstance(value, DelayedLeaf):
            raise _no_stable_token(value)
        value = dict(value.__dask_graph__())
    if name in _META_OPERANDS:
        # Without dtypes, which differ between backends.
        value = list(map(str, getattr(value, "columns", ()))) or str(getattr(value, "name", ""))
    try:
        return stable_token(_portable(value), functions=functions)
    except FunctionError as error:
        raise FunctionError(
            f"{operation_name(expr)} uses what no digest can stand for: {error}"
        ) from error


def _portable(value: object) -> Any:
    """Options without credentials, and on the CPU: checkpoints of a GPU are those of a CPU."""
    if isinstance(value, DecodeSpec):
        return replace(value, device="cpu")
    if isinstance(value, ImageMember):
        return replace(value, decoding=_portable(value.decoding))
    if isinstance(value, ColumnDecode):
        return replace(value, decoding=_portable(value.decoding), storage_options=None)
    if isinstance(value, ReadOptions):
        return replace(value, images=_portable(value.images), storage_options=None)
    return tuple(map(_portable, value)) if type(value) is tuple else value


def _no_stable_token(step: dx.Expr) -> FunctionError:
    return FunctionError(
        f"{operation_name(step)} does not identify what it computes in another process"
    )


def digest_of(*parts: str) -> str:
    """Digest of strings, with their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
