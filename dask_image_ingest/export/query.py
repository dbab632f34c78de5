"""A frame's query: the shards it reads, public names of its operations, and its fingerprint.

The fingerprint is a token that is the same in every process. Unlike Dask's own, which identifies
functions of a module by name, it changes when a function is edited. It ignores partitions, which
depend on the memory of the workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
from dask.base import tokenize
from dask.delayed import Delayed, DelayedLeaf

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import (
    AppendsColumns,
    Dataset,
    Decode,
    KeepsResults,
    MapColumns,
    ReadImages,
    ReadParquetImages,
    ReadWebDataset,
    Scan,
    datasets_of,
    encoded_by,
    unfused,
)
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.frames import backend_of, with_urls
from dask_image_ingest.ops import MapBatches
from dask_image_ingest.storage import Shard, is_pipe, local_path
from dask_image_ingest.url_secrets import url_identity
from dask_image_ingest.user_functions import stable_token


def as_query(frame: Any) -> Any:
    """A lazy frame before ``optimize()`` fused its steps; other frames unchanged."""
    return new_collection(unfused(frame.expr)) if isinstance(frame, FrameBase) else frame


def shards_read(frame: Any) -> dict[str, Shard]:
    """All shards that a lazy frame reads, by URL, even if it keeps no row of them.

    Empty for a computed or persisted frame.
    """
    return {shard.url: shard for shards, _ in _read(frame) for shard in shards}


def reads_samples(frame: Any) -> bool:
    """True for a lazy frame that reads shards."""
    lazy = isinstance(frame, FrameBase)
    return lazy and bool([*frame.expr.find_operations((ReadWebDataset, KeepsResults))])


def encoded_columns(frame: Any) -> set[Any]:
    """The columns of encoded images that a lazy frame has decoded."""
    if not isinstance(frame, FrameBase):
        return set()
    return {
        column
        for step in frame.expr.find_operations(MapColumns)
        if (column := encoded_by(step)) is not None
    }


def source_options_of(frame: Any) -> dict[str, Any] | None:
    """The storage options that a lazy frame's shards are read with; None if unknown.

    Raises
    ------
    ArgumentError
        If remote shards or commands are read with different options.
    """
    options_by_url: dict[str, dict[str, Any]] = {}
    for shards, storage_options in _read(frame):
        url = next((shard.url for shard in shards if _needs_options(shard.url)), None)
        options = storage_options or {}
        if url is not None and options not in options_by_url.values():
            options_by_url[url] = options
    if len(options_by_url) > 1:
        one, other, *_ = sorted(options_by_url)
        raise ArgumentError(
            f"the frame reads {one} and {other} with different storage_options. Pass "
            "source_options= for both, or export one after the other"
        )
    return next(iter(options_by_url.values()), None)


def operation_name(expr: Any) -> str:
    """Public name of an operation."""
    if isinstance(expr, ReadWebDataset):
        return "read_webdataset_images"
    if isinstance(expr, ReadParquetImages):
        return "read_parquet_images"
    if isinstance(expr, ReadImages):
        return "read_images"
    if isinstance(expr, Decode):
        below = expr.frame
        while isinstance(below, AppendsColumns):
            below = below.frame
        return operation_name(below) if isinstance(below, Scan) else "decode_images"
    if isinstance(expr, MapBatches):
        return f"map_batches({expr.batch_map.function.name})"
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


def _read(frame: Any) -> Iterator[tuple[Sequence[Shard], dict[str, Any] | None]]:
    """The shards and image files that a lazy frame reads, with their storage options."""
    for dataset in datasets_of(frame.expr) if isinstance(frame, FrameBase) else ():
        yield dataset.shards, dataset.options.storage_options


# Part of fingerprints that hold in this process only.
_PROCESS = uuid.uuid4().hex


def frame_fingerprint(frame: Any, columns: Sequence[str], *more: Any) -> str:
    """Token of some columns of a frame, and of ``more`` that the result depends on.

    It holds in this process only if the frame is persisted, has delayed objects, or functions
    without a stable token.
    """
    frame = frame[list(columns)]
    if not isinstance(frame, FrameBase):
        with suppress(pa.ArrowException):  # other objects than Arrow has
            frame = with_urls(backend_of(frame).to_storage(frame), url_identity)
        return tokenize(frame, *more)
    expr = _without_partitions(frame.expr)
    token = tokenize(expr, *more)
    try:
        return tokenize(token, [stable_token(value) for value in _operands(expr)])
    except Exception:  # an object without a stable token
        return tokenize(token, _PROCESS)


def _without_partitions(expr: Any) -> Any:
    """The same query, with reads whose tokens don't depend on their partitions."""
    for read in expr.find_operations(Scan):
        if read.operand("_partitions") is not None:
            continue
        data, schema = read.dataset, read.dataset.schema
        columns = str((schema.components, schema.sidecar))
        # Credentials may change: shards are told apart by their versions.
        root = data.options.root and url_identity(data.options.root)
        options = replace(data.options, storage_options=None, root=root)
        token = tokenize(_versions(data.shards), columns, options)
        parameters = {"dataset": replace(data, token=token)}
        expr = expr.substitute(read, read.substitute_parameters(parameters))
    return expr


def _versions(shards: Sequence[Shard]) -> list[tuple[Any, ...]]:
    files = (file for shard in shards for file in (shard, shard.sidecar) if file is not None)
    return [(url_identity(file.url), file.size, file.version) for file in files]


def unstable_steps(frame: Any) -> list[str]:
    """Why the same query may have another fingerprint in the next run, in words."""
    steps = list(frame.expr.walk()) if isinstance(frame, FrameBase) else []
    reasons = []
    if any(isinstance(step, (dx.Sample, dx.Split)) for step in steps):
        reasons.append("sample() and random_split() draw other rows each time without random_state")
    if any(isinstance(step, dx.FromGraph) for step in steps):
        reasons.append("persist() leaves no query to compare: export the frame without it")
    return reasons


def _operands(expr: Any) -> Iterator[Any]:
    """Operands of a query's steps, for stable tokens; raises for those that can have none."""
    for step in expr.walk():
        unseeded = isinstance(step, dx.Split) and not isinstance(step.random_state, int)
        if unseeded or isinstance(step, dx.FromGraph):
            raise _no_stable_token(step)
        # Dask's tokens of these are stable: they have the fingerprints of their files.
        if isinstance(step, (KeepsResults, dx.ReadParquet)):
            continue
        for value in step.operands:
            if isinstance(value, Delayed):
                yield shared_value(value)
            elif isinstance(value, Dataset):
                yield value.options.decoding
            elif not isinstance(value, dx.Expr):
                yield value


def shared_value(value: Delayed) -> Any:
    """The graph of a value that all partitions share, such as the values of ``isin``.

    Raises
    ------
    FunctionError
        If it is computed by delayed functions.
    """
    if not isinstance(value, DelayedLeaf):
        raise _no_stable_token(value)
    return dict(value.__dask_graph__())


def _no_stable_token(step: Any) -> FunctionError:
    return FunctionError(
        f"{operation_name(step)} does not identify what it computes in another process"
    )
