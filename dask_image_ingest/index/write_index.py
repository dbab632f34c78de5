"""``write_index``: what can be asked of shards without pixels, written beside them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd

from dask_image_ingest.arguments import check_choice, check_flag, check_storage_options, shown
from dask_image_ingest.computing import run
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError
from dask_image_ingest.index.build_index import index_bytes, shard_rows
from dask_image_ingest.index.combine import write_combined
from dask_image_ingest.index.discovery import index_place, refuse_unindexed
from dask_image_ingest.index.index_file import IndexTable, UnusableIndexError
from dask_image_ingest.index.open_index import (
    IndexFile,
    open_stored,
    open_table,
    unknown_version,
)
from dask_image_ingest.storage import (
    COMBINED_INDEX,
    INDEX_ADVICE,
    INDEX_SUFFIX,
    STAGING,
    Shard,
    find_shards,
    folder_of,
    inside,
    is_web,
    local_path,
    open_output,
    open_shard,
)
from dask_image_ingest.tar import Damage, index_tar


def write_index(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    folder: str | os.PathLike[str] | None = None,
    combined: bool = False,
    overwrite: bool = False,
    shard_errors: Literal["raise", "skip"] = "raise",
    progress: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Write an index of each shard: all that can be asked of it without pixels.

    An index is a parquet file beside its shard, ``000.tar.index.parquet`` for ``000.tar``, with a
    row per sample: its key, where its members are, what the headers of its images tell, and its
    texts and labels of up to 64 KiB. It knows the size and the version (time of change or ETag) of
    its shard, and is not used when these are others. :func:`read_webdataset_images` finds it; then
    no shard is opened until pixels are asked for, and the rows are the same.

    Parameters
    ----------
    paths
        Shards, as for :func:`read_webdataset_images`.
    folder
        Where to write, if not beside the shards: a path or URL, which ``index=`` of
        :func:`read_webdataset_images` has to name then.
    combined
        Whether to write one file for all shards of a folder, ``_index.parquet``, in place of one
        for each: for thousands of shards, whose number of rows is then known without a task. It has
        the column ``__shard__`` too. A call adds to the file that is there, and takes from the
        indexes of single shards what they know.
    overwrite
        Whether to write those anew that hold. By default they are kept, so that a call that was
        interrupted goes on, and one after shards were added does these.
    shard_errors
        What becomes of a shard that can't be read: ``"raise"``, when the others are done, or
        ``"skip"``.
    progress
        Whether to show a bar on standard error.
    storage_options
        For the file system of remote shards, and of a remote folder.

    Returns
    -------
    pandas.DataFrame
        A row for each shard: ``shard``, ``index``, ``state`` (``"written"``, ``"kept"`` or
        ``"failed"``), ``samples``, ``bytes`` of the index, ``damage`` and ``error``, null where
        there is none.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing.
    ShardError
        If a shard can't be read, or is no tar, or if its server tells nothing that changes when
        it does.
    ExportError
        If an index can't be written.
    ArgumentError
        If two shards would have the same index in ``folder``, or if a shard can have none, which
        is what a command writes; if its place is one that takes no files: a web server, an archive.

    Examples
    --------
    >>> import dask_image_ingest as dii
    >>> dii.write_index("train-{000..003}.tar", folder="indexes")["samples"].sum()
    np.int64(52)
    >>> len(dii.read_webdataset_images("train-{000..003}.tar", index="indexes"))
    52
    """
    check_flag("combined", combined)
    check_flag("overwrite", overwrite)
    check_flag("progress", progress)
    check_choice("shard_errors", shard_errors, ("raise", "skip"))
    check_storage_options(storage_options)
    where = _folder(folder)
    shards = find_shards(paths, storage_options)
    for shard in shards:
        refuse_unindexed(shard.url, "write_index()")
    places = [index_place(shard.url, where) for shard in shards]
    _refuse_collisions(places)
    folders = {folder_of(place)[0] for place in places}
    for each in folders:
        _refuse_unwritable(each)
    write = _write_combined if combined else _write_each
    try:
        done = write(shards, where, overwrite, progress, storage_options)
    finally:
        for each in folders:
            open_output(each, INDEX_ADVICE, storage_options).remove_empty_staging()
    failed = [index for index in done if index.error is not None]
    if failed and shard_errors == "raise":
        raise ShardError(
            f"{len(failed)} of {len(done)} shards have no index, all others have one. The first: "
            f"{failed[0].error}"
        )
    return pd.DataFrame([asdict(index) for index in done])


@dataclass(frozen=True)
class _Index:
    """Outcome for the index of one shard; the columns of the result."""

    shard: str
    index: str
    state: Literal["written", "kept", "failed"]
    samples: int = 0
    bytes: int = 0
    damage: str | None = None
    error: str | None = None


def _write_each(
    shards: Sequence[Shard],
    folder: str | None,
    overwrite: bool,
    progress: bool,
    storage_options: dict[str, Any] | None,
) -> list[_Index]:
    one = partial(_write_one, folder=folder, overwrite=overwrite, storage_options=storage_options)
    return run(one, shards, progress)


def _write_combined(
    shards: Sequence[Shard],
    folder: str | None,
    overwrite: bool,
    progress: bool,
    storage_options: dict[str, Any] | None,
) -> list[_Index]:
    """Index shards in one file for each folder, by way of a staged one for each shard."""
    by_folder: dict[str, dict[str, Shard]] = {}
    for shard in shards:
        beside, name = folder_of(shard.url)
        by_folder.setdefault(folder or beside, {})[name] = shard
    tables = {each: _table(each, storage_options) for each in by_folder}
    missing = [
        shard
        for each, members in by_folder.items()
        for name, shard in members.items()
        if overwrite or not ((table := tables[each]) and table.holds(name, shard))
    ]
    one = partial(
        _write_one, folder=folder, overwrite=overwrite, storage_options=storage_options, stage=True
    )
    new = {index.shard: index for index in run(one, missing, progress)}
    done: dict[str, _Index] = {}
    for each, members in by_folder.items():
        done |= _combine(each, members, tables[each], new, storage_options)
    return [done[shard.url] for shard in shards]


def _table(folder: str, storage_options: dict[str, Any] | None) -> IndexTable | None:
    with suppress(UnusableIndexError, ShardError, ShardNotFoundError):
        return open_table(inside(folder, COMBINED_INDEX), storage_options)
    return None


def _combine(
    folder: str,
    shards: Mapping[str, Shard],
    table: IndexTable | None,
    written: Mapping[str, _Index],
    storage_options: dict[str, Any] | None,
) -> dict[str, _Index]:
    """Write the index of a folder, if any of its shards has a new one; outcomes by shard."""
    target = inside(folder, COMBINED_INDEX)
    new = {name: written[shard.url] for name, shard in shards.items() if shard.url in written}
    errors = {name: index.error for name, index in new.items() if index.error is not None}
    indexes = {
        name: IndexFile(index.index, shards[name])
        for name, index in new.items()
        if name not in errors
    }
    if indexes:
        if table is not None:
            indexes |= _held_by(table, target, table.names - new.keys())
        output = open_output(folder, INDEX_ADVICE, storage_options)
        errors |= write_combined(output, indexes, storage_options)
        output.remove(f"{STAGING}/{name}{INDEX_SUFFIX}" for name in new)
        table = open_table(target, storage_options)
    done = {}
    for name, shard in shards.items():
        if name in errors or table is None:
            done[shard.url] = _Index(shard.url, target, "failed", error=errors[name])
            continue
        facts = table.facts(name)
        state = new[name].state if name in new else "kept"
        share = table.nbytes * facts.samples // max(1, table.metadata.num_rows)
        damage = _told(None if facts.damage is None else Damage(**facts.damage))
        done[shard.url] = _Index(shard.url, target, state, facts.samples, share, damage)
    return done


def _held_by(table: IndexTable, url: str, names: Iterable[str]) -> dict[str, IndexFile]:
    """Indexes in a file of many shards, of these as they were when it was written."""
    found = {}
    for name in names:
        facts = table.facts(name)
        shard = Shard(url, facts.size, facts.version)
        found[name] = IndexFile(url, shard, name=name, file=table.file)
    return found


def _folder(folder: Any) -> str | None:
    path = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if path is None:
        return None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"folder={shown(folder)}: pass the path or URL of a folder")
    return open_output(path, INDEX_ADVICE, None).url


def _refuse_collisions(places: Sequence[str]) -> None:
    twice = [output for output, count in Counter(places).items() if count > 1]
    if twice:
        raise ArgumentError(
            f"several shards would have the index {twice[0]}, and {len(twice) - 1} more are like "
            "it: shards of one name need folders of their own"
        )


def _refuse_unwritable(folder: str) -> None:
    if local_path(folder) is None and ("::" in folder or is_web(folder)):
        kind = "on a web server" if is_web(folder) else "in an archive"
        raise ArgumentError(
            f"an index cannot be written to {folder}, which is {kind}: pass folder= to have the "
            "indexes elsewhere, and name it as index= where they are read"
        )


def _write_one(
    shard: Shard,
    folder: str | None,
    overwrite: bool,
    storage_options: dict[str, Any] | None,
    stage: bool = False,
) -> _Index:
    """Index one shard; the file appears when it is whole."""
    own = index_place(shard.url, folder)
    beside, name = folder_of(own)
    if stage:
        name = f"{STAGING}/{name}"
    target = inside(beside, name)
    output = open_output(beside, INDEX_ADVICE, storage_options)
    if why := unknown_version(shard):
        return _Index(shard.url, target, "failed", error=why)
    if not overwrite:
        # Those of a run that was interrupted, too.
        for place in dict.fromkeys([own, target]):
            if kept := _kept(shard, place, storage_options):
                return kept
    try:
        with open_shard(shard.url, storage_options, shard) as content:
            index = index_tar(content, shard.url)
            data = index_bytes(*shard_rows(shard, content, index))
    except (ShardError, ShardNotFoundError) as error:
        return _Index(shard.url, target, "failed", error=str(error))
    output.put(name, data)
    damage = _told(index.damage)
    return _Index(shard.url, target, "written", len(index), len(data), damage)


def _kept(shard: Shard, target: str, storage_options: dict[str, Any] | None) -> _Index | None:
    try:
        with open_stored(IndexFile(target, shard), storage_options) as stored:
            damage = _told(stored.damage)
            return _Index(shard.url, target, "kept", len(stored), stored.nbytes, damage)
    except (UnusableIndexError, ShardError):
        return None


def _told(damage: Damage | None) -> str | None:
    return None if damage is None else f"{damage.code}: {damage.reason}"
