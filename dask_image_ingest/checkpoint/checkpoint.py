"""``checkpoint``: compute a frame's partitions once, and read them back from files.

A folder belongs to one query, which is written first. Results of another one may have taken days:
they are never removed, nor mixed with new ones, unless the user says so.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import dask
import dask.dataframe as dd
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.arguments import check_flag, check_storage_options, path_text
from dask_image_ingest.checkpoint.query import (
    FingerprintedQuery,
    choose_splits,
    fingerprint_query,
    is_part,
    part_name,
    shard_prefix,
    shards_of,
)
from dask_image_ingest.checkpoint.stored_frame import ReadStored, StoredFrame
from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dask_internals import FrameBase, cull, new_collection
from dask_image_ingest.dataset import files_read, searches_of_frame
from dask_image_ingest.dataset.plan import Scan
from dask_image_ingest.dataset.references import unfused
from dask_image_ingest.dataset.scan import Partition
from dask_image_ingest.errors import (
    ArgumentError,
    ExportError,
    ShardError,
    ShardNotFoundError,
    warn_user,
)
from dask_image_ingest.frames import backend_of, with_urls
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.ops import journal_owner, journaled
from dask_image_ingest.storage import Shard, find_beside, find_shards, local_path
from dask_image_ingest.storage.output import (
    CHECKPOINT_ADVICE,
    JOURNAL,
    LOCK,
    REPLACEMENT,
    REPLACING,
    STAGING,
    OutputStore,
    acquire,
    begin_run,
    end_run,
    open_output,
    refuse_other_run,
    refuse_sources,
    replacement_of,
    swap,
)
from dask_image_ingest.typedefs import DataFrame
from dask_image_ingest.url_secrets import url_identity

logger = logging.getLogger("dask_image_ingest")


# The fingerprint of the query; and, once all are finished, rows and bytes of each partition.
_QUERY_FILE, _PARTITIONS_FILE = "_checkpoint.json", "_parts.json"

_FORMAT = 1


class PartitionFile(TypedDict):
    """Rows and bytes of a partition's file."""

    rows: int
    bytes: int


def checkpoint(
    frame: dd.DataFrame,
    path: str | os.PathLike[str],
    *,
    version: str | None = None,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> ImageDataFrame:
    """Compute a frame, store each partition in a file, and return a lazy frame of the files.

    Computes missing partitions at once. Called again, after a crash or a month later, it computes
    only what is missing: partitions that a killed run did not reach, and those of shards that were
    added or changed.

    Parameters
    ----------
    frame
        A dask dataframe of :func:`read_webdataset_images`, :func:`read_images`,
        :func:`read_parquet_images` or `checkpoint`, and any steps that work row by row or partition
        by partition: filters, new columns, ``.images.map_batches``, ``map_partitions``,
        :func:`decode_images`.
    path
        A folder, or a URL of a file system that fsspec writes to. One folder for one query.
    version
        Identifies your functions. By default their code does: after an edit, you get an error that
        says so. With a version, you may edit them; results are kept until you change the version.
    overwrite
        Whether to compute everything again, and then replace what is stored.
    storage_options
        For the file system to write to.

    Returns
    -------
    dask.dataframe.DataFrame
        The same rows, columns, types and index. Only needed columns are read, and ``len`` reads
        nothing. Stored partitions keep their boundaries, even if the frame's differ by now, since
        ``partition_size="auto"`` depends on the memory of the machine.

    Raises
    ------
    ArgumentError
        If a partition is not computed from one part of one shard, or from some files alone, as
        after a merge, a shuffle or ``persist``: checkpoint the frame before that step.
    FunctionError
        If a function has no token that is the same in every process: pass ``version``.
    ExportError
        If the folder has results of another query, or files that the frame reads; if its next read
        would find the results; if the folder cannot be written, or another process is writing to
        it.
    ShardError
        If a shard cannot be read, or changes meanwhile.

    Notes
    -----
    A stored partition is identified by its shard or files (URL, size and time or ETag), by the part
    of the shard, the options of the read, and the functions. A file appears under its name when it
    is complete. Partitions of shards that the read no longer has are removed.

    Examples
    --------
    >>> ddf = read_webdataset_images("train-{000..003}.tar", size=64)
    >>> mean = ddf.images.map_batches(lambda x: x.mean((1, 2, 3)), outputs={"mean": "float32"})
    >>> stored = checkpoint(mean, "means", version="1")
    >>> len(stored), stored["mean"].count().compute().item()
    (52, 51)
    """
    if not isinstance(frame, FrameBase) or frame.ndim != 2:
        raise ArgumentError(
            f"checkpoint takes a dask dataframe, not {type(frame).__name__}: one column is "
            "ddf[['column']], and a pandas frame is computed already"
        )
    columns = list(frame.columns)
    if not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
        raise ArgumentError(f"the frame's columns must be unique strings, and are {columns}")
    if version is not None and (not isinstance(version, str) or not version):
        raise ArgumentError(f"version={version!r}: pass a string, such as '1'")
    check_flag("overwrite", overwrite)
    storage_options = check_storage_options(storage_options)
    output = open_output(path_text("path", path), CHECKPOINT_ADVICE, storage_options)
    query = fingerprint_query(unfused(frame.expr), version)
    stored = _run_checkpoint(query, output, frame._meta, overwrite=overwrite)
    return new_collection(ReadStored(stored))


def _run_checkpoint(
    query: FingerprintedQuery, output: OutputStore, meta: DataFrame, *, overwrite: bool
) -> StoredFrame:
    """Compute and store the missing partitions of a query; return all of them."""
    refuse_sources(
        files_read(query.expr),
        (output.locate(part_name(query.digest, split)) for split in query.splits),
        "checkpoint",
        searches=searches_of_frame(query.expr),
        folder=output.url,
    )
    if _owner(output).get("work") == query.digest and not overwrite:
        # Without the lock: most calls find everything stored.
        finished = _Run(query, output, meta)
        if finished.is_finished():
            return finished.stored(finished.recorded)
    with acquire(output, steal=True) as check_lock:
        apart = replacement_of(output)
        # Also where a killed run has begun to.
        replaces = overwrite or output.read(REPLACING) == query.digest.encode()
        if not replaces:
            return _compute(query, output, meta, check_lock)
        if overwrite or _owner(apart).get("work") != query.digest:
            output.put(REPLACING, query.digest.encode())
            _clear(output, apart)
        begin_run(output)  # tasks of earlier runs store nothing more
        stored = _compute(query, apart, meta, check_lock)
        check_lock()
        _replace(output, stored)
        return replace(stored, output=output)


def _clear(output: OutputStore, apart: OutputStore) -> None:
    """Remove what earlier calls have stored apart, to replace results."""
    staged = output.sizes(STAGING)
    output.remove(f"{STAGING}/{name}" for name in staged if f"{STAGING}/{name}" != REPLACING)
    apart.remove_staging()
    apart.remove([_QUERY_FILE, *apart.sizes()])


def _compute(
    query: FingerprintedQuery, output: OutputStore, meta: DataFrame, check_lock: Callable[[], None]
) -> StoredFrame:
    """Complete a folder, if it is of this query or new."""
    owner = _owner(output)
    if owner and owner["work"] != query.digest:
        raise ExportError(
            f"{output.url} has the results of other work: {_difference(owner, query)}. "
            "overwrite=True removes them; or choose another folder"
        )
    if not owner:
        fingerprint = {
            "format": _FORMAT,
            "work": query.digest,
            "version": query.version,
            "steps": [[step.name, step.digest] for step in query.steps],
        }
        if not output.create(_QUERY_FILE, json.dumps(fingerprint, indent=1).encode()):
            raise ExportError(f"another checkpoint began in {output.url} just now")
    return _Run(query, output, meta).finish(check_lock)


def _replace(output: OutputStore, stored: StoredFrame) -> None:
    """Replace all stored partitions, with a warning in the log."""
    old = [name for name in output.sizes() if is_part(name)]
    if old:
        logger.warning("overwrite=True removes %d stored partitions from %s", len(old), output.url)
    names = [*(part for part in stored.parts if part is not None), _QUERY_FILE, _PARTITIONS_FILE]
    swap(
        output,
        {f"{REPLACEMENT}/{name}": name for name in names},
        [_PARTITIONS_FILE, _QUERY_FILE, *old],
    )
    output.remove_staging()


def _owner(output: OutputStore) -> dict[str, Any]:
    """Fingerprint of the query that owns a folder; empty for a new one."""
    content = output.read(_QUERY_FILE)
    owner = {} if content is None else _parse(content)
    if content is not None and "work" not in owner:
        raise ExportError(
            f"{output.locate(_QUERY_FILE)} is damaged, or not from this release: choose another "
            "folder, or move the file away, to compute the checkpoint again"
        )
    return owner


def _parse(content: bytes) -> dict[str, Any]:
    """Parse a JSON file; empty if it is damaged or has another format."""
    with suppress(ValueError):
        parsed = json.loads(content)
        if isinstance(parsed, dict) and parsed.get("format") == _FORMAT:
            return parsed
    return {}


def _difference(old: Mapping[str, Any], new: FingerprintedQuery) -> str:
    if old["version"] != new.version:
        return f"version= was {old['version']!r} and is {new.version!r} now"
    old_names = [name for name, _ in old["steps"]]
    new_names = [step.name for step in new.steps]
    if old_names != new_names:
        return f"its steps were {', '.join(old_names)} and are {', '.join(new_names)} now"
    # Name the first one: digests of later steps depend on it.
    digests = [digest for _, digest in old["steps"]]
    return f"{next(step.name for step in new.steps if step.digest not in digests)} has changed"


class _Run:
    """One call of `checkpoint`: compares the query's partitions with the stored files."""

    def __init__(self, query: FingerprintedQuery, output: OutputStore, meta: DataFrame) -> None:
        self.query = query
        self.output = output
        self.meta = meta
        # By file name, as a finished run has recorded them.
        self.recorded: dict[str, PartitionFile] = _parse(output.read(_PARTITIONS_FILE) or b"").get(
            "parts", {}
        )
        self.stored_files = output.sizes()  # bytes by name
        self.splits = choose_splits(
            query.splits, query.digest, self.stored_files, query.has_divisions
        )
        self.names = [part_name(query.digest, split) for split in self.splits]

    def is_finished(self) -> bool:
        """True if all files are stored with their recorded sizes, and no others."""
        parts, files = self.recorded, self.stored_files
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
        kept, recorded = self._files_to_keep(), self.recorded
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
        parts |= self._compute(missing, check_lock)
        parts = {name: parts[name] for name in sorted(parts)}
        check_lock()
        record = {"format": _FORMAT, "parts": parts}
        self.output.put(_PARTITIONS_FILE, json.dumps(record, indent=0).encode())
        self.output.fsync()
        self.output.remove(self._superfluous(parts))
        self.output.remove_staging()
        return self.stored(parts)

    def _begun(self, missing: Mapping[str, Partition]) -> int:
        """The number of missing partitions with a journal of rows."""
        files = self.output.sizes(STAGING) if missing else ()
        return len({*map(journal_owner, files)} & missing.keys())

    def _compute(
        self, missing: Mapping[str, Partition], check_lock: Callable[[], None]
    ) -> dict[str, PartitionFile]:
        if not missing:
            return {}
        graph, keys = self.query.tasks_of(list(missing.values()))
        read = next(iter(self.query.expr.find_operations(Scan)), None)
        # Tasks check image files themselves, each as it is opened.
        is_checked = read is not None and not read.dataset.are_numbered
        check_lock()
        run = begin_run(self.output)
        store = partial(
            _store,
            output=self.output,
            run=run,
            columns=list(self.meta.columns),
            source_options=None if read is None else read.dataset.options.storage_options,
            skips=read is not None and read.dataset.options.shard_errors == "drop",
        )
        tasks = [
            _Task(cull(graph, [key]), key, name, shards_of(split) if is_checked else ())
            for key, (name, split) in zip(keys, missing.items(), strict=True)
        ]
        try:
            done = dict(zip(missing, one_task_per_item(store, tasks), strict=True))
        except BaseException:
            # Threads and workers finish their tasks: those of `map_rows` would call on for hours.
            with suppress(Exception):
                end_run(self.output, run)
            raise
        check_lock()
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
class _Task:
    """The graph of one partition, and the name of its file."""

    graph: dict[Any, Any]
    key: Any
    name: str
    shards: tuple[Shard, ...]

    def __dask_tokenize__(self) -> str:
        # The file name identifies the task. Dask would pickle the graph instead: 2 ms a task.
        return self.name


def _store(
    task: _Task,
    output: OutputStore,
    run: str,
    columns: list[str],
    source_options: dict[str, Any] | None,
    skips: bool,
) -> PartitionFile | str:
    """Compute a partition and store it atomically.

    Returns
    -------
    PartitionFile or str
        Why its shard cannot be read, if the read ``skips`` such shards.
    """
    with journaled(output, task.name, run):
        try:
            before = [_check_unchanged(shard, None, source_options) for shard in task.shards]
            frame = dask.get(task.graph, task.key)
            for shard, state in zip(task.shards, before, strict=True):
                _check_unchanged(shard, state, source_options)
        except (ShardError, ShardNotFoundError) as error:
            if not skips:
                raise
            return str(error)
        if list(frame.columns) != columns:
            raise ArgumentError(
                f"checkpoint: a partition has the columns {list(frame.columns)}, and its frame "
                f"said {columns}: is the meta= of its functions right?"
            )
        table = with_urls(backend_of(frame).to_storage(frame), url_identity)
        with output.scratch(task.name) as file:
            parquet.write_table(table, file, compression="zstd", row_group_size=len(table) or None)
            output.commit(file, task.name, partial(refuse_other_run, output, run))
    size = output.size(task.name)
    if size is None:
        url = output.locate(task.name)
        raise ExportError(f"{url} was removed as soon as it was written")
    return PartitionFile(rows=len(table), bytes=size)


def _check_unchanged(
    shard: Shard, before: Shard | None, source_options: dict[str, Any] | None
) -> Shard:
    """Raise if a shard has changed since ``before``, or since it was listed; return its state."""
    current = find_shards(shard.url, source_options)[0]
    if shard.sidecar is not None:
        (sidecar,) = find_beside([current], ".parquet", source_options, {})
        current = replace(current, sidecar=sidecar)
    # Object stores may report another version in a listing than for a single file: compare only the
    # size of a remote shard with its listing.
    expected = before or (shard if local_path(shard.url) is not None else current)
    if current != expected or current.size != shard.size:
        raise ShardError(f"{shard.url} has changed since it was listed: read the collection again")
    return current


def _inspect(name: str, output: OutputStore, meta: DataFrame) -> PartitionFile | None:
    """Inspect a partition that a killed run has stored; None if it cannot be read."""
    try:
        with output.open(name) as source, parquet.ParquetFile(source) as file:
            if not {*map(str, meta.columns)} <= {*file.schema_arrow.names}:
                return None
            rows = file.metadata.num_rows
    except (OSError, pa.ArrowException):
        return None
    return PartitionFile(rows=rows, bytes=output.size(name) or 0)
