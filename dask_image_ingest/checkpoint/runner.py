"""Runner of a checkpoint: computes and stores missing partitions, one task for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dask
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.checkpoint.manifest import (
    PARTITIONS_FILE,
    QUERY_FILE,
    Manifest,
    PartitionFile,
    read_manifest,
)
from dask_image_ingest.checkpoint.query import (
    FingerprintedQuery,
    choose_splits,
    is_part,
    part_name,
    shard_prefix,
    shards_of,
)
from dask_image_ingest.checkpoint.stored_frame import ReadStored, StoredFrame
from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dask_internals import cull
from dask_image_ingest.dataset import files_read, searches_of_frame
from dask_image_ingest.dataset.plan import Scan
from dask_image_ingest.dataset.scan import Partition
from dask_image_ingest.errors import (
    ArgumentError,
    ExportError,
    ShardError,
    ShardNotFoundError,
    warn_user,
)
from dask_image_ingest.frames import backend_of, with_urls
from dask_image_ingest.ops import (
    Ending,
    RowJournal,
    journal_owner,
    journaled,
    refuse_late_failures,
)
from dask_image_ingest.storage import Shard, find_beside, find_shards, local_path
from dask_image_ingest.storage.output import (
    JOURNAL,
    LOCK,
    REPLACEMENT,
    REPLACING,
    STAGING,
    OutputStore,
    acquire,
    begin_run,
    end_run,
    refuse_other_run,
    refuse_sources,
    replacement_of,
    swap,
)
from dask_image_ingest.url_secrets import url_identity

logger = logging.getLogger("dask_image_ingest")


def run_checkpoint(
    query: FingerprintedQuery, output: OutputStore, meta: Any, *, overwrite: bool
) -> StoredFrame:
    """Compute and store the missing partitions of a query; return all of them.

    Raises
    ------
    ExportError
        If the folder has results of another query, cannot be written, or has another writer.
    """
    refuse_sources(
        files_read(query.expr),
        (output.locate(part_name(query.digest, split)) for split in query.splits),
        "checkpoint",
        searches=searches_of_frame(query.expr),
        folder=output.url,
    )
    manifest = read_manifest(output)
    if manifest.is_of(query) and not overwrite:
        # Without the lock: most calls find everything stored.
        finished = _Run(query, output, manifest, meta)
        if finished.is_finished():
            return finished.stored(manifest.parts)
    with acquire(output, steal=True) as check_lock:
        manifest, apart = read_manifest(output), read_manifest(replacement_of(output))
        # Also where a killed run has begun to.
        replaces = overwrite or output.read(REPLACING) == query.digest.encode()
        if overwrite or (replaces and not apart.is_of(query)):
            output.put(REPLACING, query.digest.encode())
            apart = _cleared(output)
        if replaces:
            begin_run(output)  # tasks of earlier runs store nothing more
            stored = _compute(query, apart, meta, check_lock)
            check_lock()
            _replace(output, stored)
            return replace(stored, output=output)
        return _compute(query, manifest, meta, check_lock)


def _cleared(output: OutputStore) -> Manifest:
    """The place for files that replace others, without those of earlier calls."""
    staged = output.sizes(STAGING)
    output.remove(f"{STAGING}/{name}" for name in staged if f"{STAGING}/{name}" != REPLACING)
    apart = replacement_of(output)
    apart.remove_staging()
    apart.remove([QUERY_FILE, *apart.sizes()])
    return read_manifest(apart)


def _compute(
    query: FingerprintedQuery,
    manifest: Manifest,
    meta: Any,
    check_lock: Callable[[], None],
) -> StoredFrame:
    """Complete the folder of a manifest."""
    manifest.refuse_other(query)
    if manifest.query is None:
        manifest.begin(query)
    return _Run(query, manifest.output, manifest, meta).finish(check_lock)


def _replace(output: OutputStore, stored: StoredFrame) -> None:
    """Replace all stored partitions, with a warning in the log."""
    old = [name for name in output.sizes() if is_part(name)]
    if old:
        logger.warning("overwrite=True removes %d stored partitions from %s", len(old), output.url)
    names = [*(part for part in stored.parts if part is not None), QUERY_FILE, PARTITIONS_FILE]
    swap(
        output,
        {f"{REPLACEMENT}/{name}": name for name in names},
        [PARTITIONS_FILE, QUERY_FILE, *old],
    )
    output.remove_staging()


class _Run:
    """One call of `checkpoint`: compares the query's partitions with the stored files."""

    def __init__(
        self, query: FingerprintedQuery, output: OutputStore, manifest: Manifest, meta: Any
    ) -> None:
        self.query = query
        self.output = output
        self.manifest = manifest
        self.meta = meta
        self.stored_files = output.sizes()  # bytes by name
        self.splits = choose_splits(
            query.splits, query.digest, self.stored_files, query.has_divisions
        )
        self.names = [part_name(query.digest, split) for split in self.splits]

    def is_finished(self) -> bool:
        """True if all files are stored with their recorded sizes, and no others."""
        parts, files = self.manifest.parts, self.stored_files
        complete = all(
            name in parts and files.get(name) == parts[name]["bytes"] for name in self.names
        )
        leftover = (
            {LOCK, JOURNAL} & files.keys() or self._superfluous(parts) or self.output.sizes(STAGING)
        )
        return complete and not leftover

    def stored(self, parts: Mapping[str, PartitionFile]) -> StoredFrame:
        """The stored partitions of the query, for `ReadStored`."""
        names = [name if name in parts else None for name in self.names]
        divisions = (None,) * (len(names) + 1)
        return StoredFrame(
            output=self.output,
            parts=tuple(names),
            lengths=tuple(0 if name is None else parts[name]["rows"] for name in names),
            meta=self.meta,
            divisions=self.query.expr.divisions if self.query.has_divisions else divisions,
            origins=tuple(map(self._origin, self.splits)),
            made_of=self.query.expr,
        )

    def _origin(self, split: Partition) -> Partition:
        """The shards of a partition, also if it is computed from another checkpoint."""
        read = next(self.query.expr.find_operations(ReadStored), None)
        return split if read is None else read.stored.origins[read.stored.numbers[split]]

    def finish(self, check_lock: Callable[[], None]) -> StoredFrame:
        """Compute missing partitions, and record all of them, unless another run took the lock."""
        kept, recorded = self._files_to_keep(), self.manifest.parts
        parts = {
            name: part
            for name, part in recorded.items()
            # A file whose size differs from the record was truncated.
            if name in kept and self.stored_files.get(name) == part["bytes"]
        }
        # Files of a run that was killed before it could record them.
        unrecorded = [name for name in self.stored_files if name in kept and name not in recorded]
        inspected = one_task_per_item(
            partial(_inspect, output=self.output, meta=self.meta), unrecorded
        )
        parts |= {
            name: part for name, part in zip(unrecorded, inspected, strict=True) if part is not None
        }
        needed = dict(zip(self.names, self.splits, strict=True))
        missing = {name: split for name, split in needed.items() if name not in parts}
        done, begun = len(needed) - len(missing), self._begun(missing)
        rows = f", and rows of {begun} more" if begun else ""
        logger.info("%d of %d partitions are stored%s", done, len(needed), rows)
        parts |= self._compute(missing, check_lock, known_to_answer=bool(parts or begun))
        parts = {name: parts[name] for name in sorted(parts)}
        check_lock()
        self.manifest.finish(parts)
        self.output.remove(self._superfluous(parts))
        self.output.remove_staging()
        return self.stored(parts)

    def _begun(self, missing: Mapping[str, Partition]) -> int:
        """The number of missing partitions with a journal of rows."""
        files = self.output.sizes(STAGING) if missing else ()
        return len({*map(journal_owner, files)} & missing.keys())

    def _compute(
        self,
        missing: Mapping[str, Partition],
        check_lock: Callable[[], None],
        known_to_answer: bool,
    ) -> dict[str, PartitionFile]:
        if not missing:
            return {}
        graph, keys = self.query.tasks_of(list(missing.values()))
        read = next(iter(self.query.expr.find_operations(Scan)), None)
        # Tasks check image files themselves, each as it is opened.
        is_checked = read is not None and not read.dataset.are_numbered
        check_lock()
        context = _Context(
            self.output,
            begin_run(self.output),
            list(self.meta.columns),
            None if read is None else read.dataset.options.storage_options,
            skip=read is not None and read.dataset.options.shard_errors == "drop",
        )
        tasks = [
            _Task(cull(graph, [key]), key, name, shards_of(split) if is_checked else ())
            for key, (name, split) in zip(keys, missing.items(), strict=True)
        ]
        try:
            outcomes = one_task_per_item(partial(_store, context=context), tasks)
            endings = [ending for outcome in outcomes for ending in outcome.endings]
            refuse_late_failures(endings, known_to_answer)
        except BaseException:
            # Threads and workers finish their tasks: those of `map_rows` would call on for hours.
            with suppress(Exception):
                end_run(self.output, context.run)
            raise
        done = {name: outcome.part for name, outcome in zip(missing, outcomes, strict=True)}
        check_lock()
        for name, outcome in zip(missing, outcomes, strict=True):
            if outcome.is_staged:
                self.output.move(_staged(name), name)
        skipped = {missing[name][0].url: why for name, why in done.items() if isinstance(why, str)}
        if skipped:
            url, why = next(iter(skipped.items()))
            warn_user(
                f"{len(skipped)} shards could not be read and are left out of the checkpoint, "
                f"first {url}: {why}. The next checkpoint() tries them again"
            )
        return {name: part for name, part in done.items() if not isinstance(part, str)}

    def _files_to_keep(self) -> set[str]:
        """Names of the files to keep: the query's, and those of shards that it leaves out."""
        left_out = self.query.shards.difference(map(shards_of, self.splits))
        others = {shard_prefix(self.query.digest, shards) for shards in left_out}
        return {*self.names, *(name for name in self.stored_files if is_part(name, others))}

    def _superfluous(self, parts: Mapping[str, PartitionFile]) -> list[str]:
        """Files to remove: of shards that changed or are gone, and of other boundaries."""
        kept = self._files_to_keep() & parts.keys()
        return [name for name in self.stored_files if is_part(name) and name not in kept]


# --- on the workers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    """Context that all tasks of a run share."""

    output: OutputStore
    run: str  # its id
    columns: list[str]
    source_options: dict[str, Any] | None
    skip: bool  # shards that cannot be read


@dataclass(frozen=True)
class _Task:
    """The graph of one partition, and the name of its file."""

    graph: dict[Any, Any]
    key: Any
    name: str
    shards: tuple[Shard, ...]

    def __dask_tokenize__(self) -> str:
        # The file name identifies the task. Dask would pickle the graph instead: 2 ms a task.
        return self.name


@dataclass(frozen=True)
class _Outcome:
    """Outcome of a partition."""

    part: PartitionFile | str  # or why its shard cannot be read
    endings: list[Ending]
    is_staged: bool  # until the run has ended


def _staged(name: str) -> str:
    return f"{STAGING}/{name}"


def _store(task: _Task, context: _Context) -> _Outcome:
    """Compute a partition and store it atomically."""
    with journaled(context.output, task.name, context.run) as journal:
        part = _compute_and_store(task, context, journal)
    return _Outcome(part, journal.endings, journal.has_late_failures and not isinstance(part, str))


def _compute_and_store(task: _Task, context: _Context, journal: RowJournal) -> PartitionFile | str:
    try:
        before = [_check_unchanged(shard, None, context) for shard in task.shards]
        frame = dask.get(task.graph, task.key)
        for shard, state in zip(task.shards, before, strict=True):
            _check_unchanged(shard, state, context)
    except (ShardError, ShardNotFoundError) as error:
        if not context.skip:
            raise
        return str(error)
    if list(frame.columns) != context.columns:
        raise ArgumentError(
            f"checkpoint: a partition has the columns {list(frame.columns)}, and its frame said "
            f"{context.columns}: is the meta= of its functions right?"
        )
    table = with_urls(backend_of(frame).to_storage(frame), url_identity)
    name = _staged(task.name) if journal.has_late_failures else task.name
    with context.output.scratch(task.name) as file:
        parquet.write_table(table, file, compression="zstd", row_group_size=len(table) or None)
        context.output.commit(file, name, partial(refuse_other_run, context.output, context.run))
    size = context.output.size(name)
    if size is None:
        raise ExportError(f"{context.output.locate(name)} was removed as soon as it was written")
    return PartitionFile(rows=len(table), bytes=size)


def _check_unchanged(shard: Shard, before: Shard | None, context: _Context) -> Shard:
    """Raise if a shard has changed since ``before``, or since it was listed; return its state."""
    current = find_shards(shard.url, context.source_options)[0]
    if shard.sidecar is not None:
        (sidecar,) = find_beside([current], ".parquet", context.source_options, {})
        current = replace(current, sidecar=sidecar)
    # Object stores may report another version in a listing than for a single file: compare only the
    # size of a remote shard with its listing.
    expected = before or (shard if local_path(shard.url) is not None else current)
    if current != expected or current.size != shard.size:
        raise ShardError(f"{shard.url} has changed since it was listed: read the collection again")
    return current


def _inspect(name: str, output: OutputStore, meta: Any) -> PartitionFile | None:
    """Inspect a partition that a killed run has stored; None if it cannot be read."""
    try:
        with output.open(name) as source, parquet.ParquetFile(source) as file:
            if not {*map(str, meta.columns)} <= {*file.schema_arrow.names}:
                return None
            rows = file.metadata.num_rows
    except (OSError, pa.ArrowException):
        return None
    return PartitionFile(rows=rows, bytes=output.size(name) or 0)
