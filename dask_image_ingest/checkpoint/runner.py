"""Runner of a checkpoint: computes and stores the missing partitions, one task for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.checkpoint.fingerprint import FingerprintedQuery
from dask_image_ingest.checkpoint.manifest import (
    PARTITIONS_FILE,
    QUERY_FILE,
    Manifest,
    PartitionFile,
    read_manifest,
)
from dask_image_ingest.checkpoint.partition_files import (
    VersionedSplit,
    choose_splits,
    is_part,
    part_name,
    shard_of,
)
from dask_image_ingest.checkpoint.scan import StoredFrame
from dask_image_ingest.computing import run
from dask_image_ingest.dask_internals import cull
from dask_image_ingest.dataset import Scan, warn_user, with_sidecars
from dask_image_ingest.errors import ArgumentError, ExportError, ShardError, ShardNotFoundError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.storage import (
    LOCK,
    STAGING,
    OutputStore,
    Shard,
    acquire,
    begin_run,
    find_shards,
    local_path,
    refuse_other_run,
)

logger = logging.getLogger("dask_image_ingest")


def run_checkpoint(
    query: FingerprintedQuery, output: OutputStore, meta: Any, *, overwrite: bool, show: bool
) -> StoredFrame:
    """Compute the missing partitions of a query, and give all of them.

    Raises
    ------
    ExportError
        If the folder has results of another query, cannot be written, or has another writer.
    """
    manifest = read_manifest(output)
    if manifest.is_of(query) and not overwrite:
        found = _Run(query, output, manifest, meta)
        if found.is_finished():
            return found.stored(manifest.parts)
    with acquire(output, steal=True) as check_lock:
        manifest = read_manifest(output)
        if overwrite:
            manifest = _remove_all(manifest)
        manifest.refuse_other(query)
        if manifest.query is None:
            manifest.begin(query)
        return _Run(query, output, manifest, meta).finish(check_lock, show)


def _remove_all(manifest: Manifest) -> Manifest:
    """Remove the results that are there, and say so."""
    names = [name for name in manifest.output.sizes() if is_part(name)]
    if names:
        logger.warning(
            "overwrite=True removes %d stored partitions from %s", len(names), manifest.output.url
        )
    # What says whose they are goes last: a killed run leaves nothing that belongs to nobody.
    manifest.output.remove([*names, PARTITIONS_FILE, QUERY_FILE])
    return read_manifest(manifest.output)


class _Run:
    """A run that computes the missing partitions of a checkpoint."""

    def __init__(
        self, query: FingerprintedQuery, output: OutputStore, manifest: Manifest, meta: Any
    ) -> None:
        self.query = query
        self.output = output
        self.manifest = manifest
        self.meta = meta
        self.there = output.sizes()
        self.splits = choose_splits(query.splits, query.digest, self.there, query.has_divisions)
        self.names = [part_name(query.digest, split) for split in self.splits]

    def is_finished(self) -> bool:
        """True if all files are there with recorded sizes, and no others."""
        parts = self.manifest.parts
        whole = all(
            name in parts and self.there.get(name) == parts[name]["bytes"] for name in self.names
        )
        left_over = LOCK in self.there or self._superfluous(parts) or self.output.sizes(STAGING)
        return whole and not left_over

    def stored(self, parts: Mapping[str, PartitionFile]) -> StoredFrame:
        """The results, as a frame reads them."""
        known = [name if name in parts else None for name in self.names]
        divisions = (None,) * (len(known) + 1)
        return StoredFrame(
            output=self.output,
            parts=tuple(known),
            lengths=tuple(0 if name is None else parts[name]["rows"] for name in known),
            meta=self.meta,
            divisions=self.query.expr.divisions if self.query.has_divisions else divisions,
            made_of=self.query.expr,
        )

    def finish(self, check_lock: Callable[[], None], show: bool) -> StoredFrame:
        """Compute what is missing, and write down what is there, if nobody has taken over."""
        kept = self._files_to_keep()
        parts = {
            name: part
            for name, part in self.manifest.parts.items()
            # A file of another size than was written down has been cut short since.
            if name in kept and self.there.get(name) == part["bytes"]
        }
        untold = [name for name in self.there if name in kept and name not in self.manifest.parts]
        looked = run(partial(_inspect, output=self.output, meta=self.meta), untold, show)
        parts |= {name: part for name, part in zip(untold, looked, strict=True) if part is not None}
        wanted = dict(zip(self.names, self.splits, strict=True))
        missing = {name: split for name, split in wanted.items() if name not in parts}
        logger.info("%d of %d partitions are stored", len(wanted) - len(missing), len(wanted))
        parts |= self._compute(missing, check_lock, show)
        parts = {name: parts[name] for name in sorted(parts)}
        check_lock()
        self.manifest.finish(parts)
        self.output.remove(self._superfluous(parts))
        self.output.remove_staging()
        return self.stored(parts)

    def _compute(
        self, missing: Mapping[str, VersionedSplit], check_lock: Callable[[], None], show: bool
    ) -> dict[str, PartitionFile]:
        if not missing:
            return {}
        graph, keys = self.query.tasks_of(list(missing.values()))
        read = next(iter(self.query.expr.find_operations(Scan)), None)
        check_lock()
        context = _Context(
            self.output,
            begin_run(self.output),
            list(self.meta.columns),
            None if read is None else read.dataset.options.storage_options,
            skip=read is not None and read.dataset.options.shard_errors == "skip",
        )
        tasks = [
            _Task(cull(graph, [key]), key, name, () if read is None else split.shards)
            for key, (name, split) in zip(keys, missing.items(), strict=True)
        ]
        done = dict(zip(missing, run(partial(_store, context=context), tasks, show), strict=True))
        skipped = {missing[n].shards[0].url: why for n, why in done.items() if isinstance(why, str)}
        if skipped:
            url, why = next(iter(skipped.items()))
            warn_user(
                f"{len(skipped)} shards could not be read and are left out of the checkpoint, "
                f"first {url}: {why}. The next checkpoint() tries them again"
            )
        return {name: part for name, part in done.items() if not isinstance(part, str)}

    def _files_to_keep(self) -> set[str]:
        """Names of the partition files to keep."""
        unasked = set(self.query.shards).difference(split.shards for split in self.splits)
        others = {shard_of(self.query.digest, shards) for shards in unasked}
        return {*self.names, *(name for name in self.there if is_part(name, others))}

    def _superfluous(self, parts: Mapping[str, PartitionFile]) -> list[str]:
        """Partitions of shards that have changed since, or are gone; and of other boundaries."""
        kept = self._files_to_keep() & parts.keys()
        return [name for name in self.there if is_part(name) and name not in kept]


# --- on the workers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    """Context of the tasks."""

    output: OutputStore
    run: str
    columns: list[str]
    source_options: dict[str, Any] | None
    skip: bool


@dataclass(frozen=True)
class _Task:
    """The graph of one partition, and the name of its file."""

    graph: dict[Any, Any]
    key: Any
    name: str
    shards: tuple[Shard, ...]

    def __dask_tokenize__(self) -> str:
        # Which says it all, and saves dask the pickling: 2 ms a task.
        return self.name


def _store(task: _Task, context: _Context) -> PartitionFile | str:
    """Compute a partition and store it, whole; or say why its shard can't be read."""
    try:
        before = [_refuse_changes(shard, None, context) for shard in task.shards]
        frame = dask.get(task.graph, task.key)
        for shard, known in zip(task.shards, before, strict=True):
            _refuse_changes(shard, known, context)
    except (ShardError, ShardNotFoundError) as error:
        if not context.skip:
            raise
        return str(error)
    if list(frame.columns) != context.columns:
        raise ArgumentError(
            f"checkpoint: a partition has the columns {list(frame.columns)}, and its frame said "
            f"{context.columns}: is the meta= of its functions right?"
        )
    table = backend_of(frame).to_storage(frame)
    with context.output.scratch() as file:
        parquet.write_table(table, file, compression="zstd", row_group_size=len(table) or None)
        context.output.commit(
            file, task.name, partial(refuse_other_run, context.output, context.run)
        )
    size = context.output.size(task.name)
    if size is None:
        raise ExportError(
            f"{context.output.locate(task.name)} was removed as soon as it was written"
        )
    return PartitionFile(rows=len(table), bytes=size)


def _refuse_changes(shard: Shard, before: Shard | None, context: _Context) -> Shard:
    """Refuse to store what comes out of a shard that is another than when the frame was made."""
    now = find_shards(shard.url, context.source_options)[0]
    if shard.sidecar is not None:
        (now,) = with_sidecars([now], "auto", context.source_options)
    # Object stores may tell one thing of a file in a listing and another of it alone.
    known = before or (shard if local_path(shard.url) is not None else now)
    if now != known or now.size != shard.size:
        raise ShardError(f"{shard.url} has changed since it was listed: read the collection again")
    return now


def _inspect(name: str, output: OutputStore, meta: Any) -> PartitionFile | None:
    """Inspect a partition that a killed run has stored; None if it can't be read."""
    try:
        with output.open(name) as source, parquet.ParquetFile(source) as file:
            if not {*map(str, meta.columns)} <= {*file.schema_arrow.names}:
                return None
            rows = file.metadata.num_rows
    except (OSError, pa.ArrowException):
        return None
    return PartitionFile(rows=rows, bytes=output.size(name) or 0)
