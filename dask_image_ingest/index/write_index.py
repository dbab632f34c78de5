"""``write_index``: indexes of shards, with everything about them except pixels."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import check_choice, check_flag, check_storage_options, path_text
from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.decode import StoredHeader, read_stored_header
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError
from dask_image_ingest.index.discovery import (
    IndexFile,
    find_indexes,
    index_place,
    open_stored,
    open_table,
    refuse_unindexed,
)
from dask_image_ingest.index.index_file import (
    KEY,
    IndexTable,
    IndexWriter,
    ShardFacts,
    UnusableIndexError,
    checked_parts,
)
from dask_image_ingest.storage import (
    COMBINED_INDEX,
    INDEX_SUFFIX,
    ByteReader,
    Shard,
    by_folder,
    decompressed,
    find_shards,
    folder_of,
    inside,
    is_web,
    natural_order,
    open_file,
    open_late,
    shard_name,
    takes_files,
)
from dask_image_ingest.storage.output import (
    INDEX_ADVICE,
    STAGING,
    OutputStore,
    open_output,
    refuse_sources,
)
from dask_image_ingest.tar import (
    FIELDS,
    HEAD,
    IMAGE_EXTENSIONS,
    INTEGERS,
    LARGEST_VALUE,
    SPAN_FIELDS,
    TEXTS,
    Damage,
    ShardIndex,
    Span,
    index_tar,
    open_member,
    read_member,
)
from dask_image_ingest.url_secrets import without_secrets


def write_index(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    folder: str | os.PathLike[str] | None = None,
    combined: bool = False,
    overwrite: bool = False,
    shard_errors: Literal["raise", "drop"] = "raise",
    storage_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Write an index of each shard: everything about it except pixels.

    An index is a parquet file beside its shard, ``000.tar.index.parquet`` for ``000.tar``, with a
    row per sample: its key, where its members are, what the headers of its images say, and its
    texts and labels of up to 64 KiB. It knows its shard by the size and by digests of a few parts,
    and is valid for each copy of it; one of the version (modification time or ETag) that it stores
    is not compared. An index whose shard has changed is not used.
    :func:`read_webdataset_images` finds it; then no shard is opened until pixels are needed. The
    rows are the same as without an index.

    Parameters
    ----------
    paths
        Shards, as for :func:`read_webdataset_images`.
    folder
        Where to write, if not beside the shards: a path or URL. Pass it as ``index=`` of
        :func:`read_webdataset_images` then.
    combined
        Write one file for all shards of a folder, ``_index.parquet``, instead of one for each: for
        thousands of shards, whose number of rows is then known without a task. It has an additional
        column ``__shard__``. A call adds to an existing file, and reuses indexes of single shards.
    overwrite
        Also rewrite valid indexes. By default they are kept: a call resumes an interrupted one,
        indexes shards that were added, or stores the versions of copied ones.
    shard_errors
        For shards that can't be read: ``"raise"`` after all others are done, or ``"drop"``.
    storage_options
        For the file system of remote shards, and of a remote folder.

    Returns
    -------
    pandas.DataFrame
        A row for each shard: ``shard``, ``index``, ``state`` (``"written"``, ``"kept"`` or
        ``"failed"``), ``samples``, ``bytes`` of the index, ``damage`` and ``error``, null if there
        is none.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing.
    ShardError
        If a shard can't be read, or is no tar.
    ExportError
        If an index can't be written.
    ArgumentError
        If two shards would have the same index in ``folder``; if a shard can have none, being the
        output of a command; if the folder is not writable, on a web server or in an archive.

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
    check_choice("shard_errors", shard_errors, ("raise", "drop"))
    storage_options = check_storage_options(storage_options)
    target = _folder(folder)
    shards = find_shards(paths, storage_options)
    for shard in shards:
        refuse_unindexed(shard.url, "write_index()")
    places = [index_place(shard.url, target) for shard in shards]
    _refuse_collisions(places)
    combined_places = {inside(folder_of(place)[0], COMBINED_INDEX) for place in places}
    written = combined_places if combined else places
    refuse_sources((shard.url for shard in shards), written, "index", reader="the call")
    output_folders = {folder_of(place)[0] for place in places}
    for output_folder in output_folders:
        _refuse_unwritable(output_folder)
    known = {} if overwrite else _known(shards, target, combined, storage_options)
    to_index = [_ToIndex(shard, tuple(known.get(shard.url, ()))) for shard in shards]
    try:
        if combined:
            outcomes = _write_combined(to_index, target, overwrite, storage_options)
        else:
            task = partial(_write_one, folder=target, storage_options=storage_options)
            outcomes = one_task_per_item(task, to_index)
    finally:
        for output_folder in output_folders:
            _output(output_folder, storage_options).remove_empty_staging()
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed and shard_errors == "raise":
        raise ShardError(
            f"{len(failed)} of {len(outcomes)} shards have no index, all others have one. The "
            f"first: {failed[0].error}"
        )
    table = pd.DataFrame([asdict(outcome) for outcome in outcomes])
    shown = {name: table[name].map(without_secrets) for name in ("shard", "index")}
    return table.assign(**shown)


@dataclass(frozen=True)
class _Outcome:
    """Outcome for the index of one shard: a row of the result."""

    shard: str
    index: str
    state: Literal["written", "kept", "failed"]
    samples: int = 0
    bytes: int = 0
    damage: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class _ToIndex:
    """A shard, and its indexes that may be valid."""

    shard: Shard
    known: tuple[IndexFile, ...]

    def __str__(self) -> str:
        return str(self.shard)


def _known(
    shards: Sequence[Shard],
    folder: str | None,
    combined: bool,
    storage_options: dict[str, Any] | None,
) -> dict[str, list[IndexFile]]:
    """The indexes of each shard, by its URL: where one is to be written, and published beside it.

    By a listing of each folder, since most requests for files by name would be in vain.
    """
    names: dict[str, set[str]] = {}
    known: dict[str, list[IndexFile]] = {}
    for shard in shards:
        beside, name = folder_of(index_place(shard.url, folder))
        if beside not in names:
            output = _output(beside, storage_options)
            staged = output.sizes(STAGING) if combined else ()  # by an interrupted run
            names[beside] = {*output.sizes(), *(f"{STAGING}/{one}" for one in staged)}
        own = [one for one in (name, f"{STAGING}/{name}") if one in names[beside]]
        known[shard.url] = [IndexFile(inside(beside, one), shard) for one in own]
        if combined and COMBINED_INDEX in names[beside]:
            whole = inside(beside, COMBINED_INDEX)
            known[shard.url].append(IndexFile(whole, shard, name=shard_name(shard.url)))
    if folder is not None:
        for url, index in find_indexes(shards, "auto", storage_options, {}).items():
            known[url].append(index)
    return known


def _write_combined(
    to_index: Sequence[_ToIndex],
    folder: str | None,
    overwrite: bool,
    storage_options: dict[str, Any] | None,
) -> list[_Outcome]:
    """Write a combined index for each folder: stage an index per shard, then merge them."""
    shards = [item.shard for item in to_index]
    groups = {
        location: {shard_name(shard.url): shard for shard in group}
        for location, group in ([(folder, shards)] if folder else by_folder(shards))
    }
    tables = {location: _table(location, storage_options) for location in groups}
    held = {
        shard.url
        for location, members in groups.items()
        for name, shard in members.items()
        if not overwrite and (table := tables[location]) and table.holds(name, shard)
    }
    missing = [item for item in to_index if item.shard.url not in held]
    task = partial(_write_one, folder=folder, storage_options=storage_options, stage=True)
    staged = {outcome.shard: outcome for outcome in one_task_per_item(task, missing)}
    outcomes: dict[str, _Outcome] = {}
    for location, members in groups.items():
        outcomes |= _combine(location, members, tables[location], staged, storage_options)
    return [outcomes[shard.url] for shard in shards]


def _table(folder: str, storage_options: dict[str, Any] | None) -> IndexTable | None:
    """The footer of a folder's combined index; None without a usable one."""
    # A file that can't be read now may be whole: an error, since its other shards would be lost.
    with suppress(UnusableIndexError, ShardNotFoundError):
        return open_table(inside(folder, COMBINED_INDEX), storage_options)
    return None


def _combine(
    folder: str,
    shards: Mapping[str, Shard],
    table: IndexTable | None,
    staged: Mapping[str, _Outcome],
    storage_options: dict[str, Any] | None,
) -> dict[str, _Outcome]:
    """Write the combined index of a folder if a shard has a staged index; outcomes by shard URL.

    ``table`` is the footer of the existing file, whose other shards are copied.
    """
    target = inside(folder, COMBINED_INDEX)
    new = {name: staged[shard.url] for name, shard in shards.items() if shard.url in staged}
    indexes = {
        name: IndexFile(outcome.index, shards[name])
        for name, outcome in new.items()
        if outcome.error is None
    }
    output = _output(folder, storage_options)
    if indexes:
        if table is not None:
            for name in table.names - new.keys():
                facts = table.facts(name)
                # The indexed version of the shard, so that `open_stored` takes a stale index, too.
                indexed = Shard(target, facts.size, facts.version)
                indexes[name] = IndexFile(target, indexed, name=name, file=table.file)
        _write_rows(output, indexes, storage_options)
    # Also those of an earlier call that was interrupted after it had written the file.
    unneeded = output.sizes(STAGING).keys() & {f"{name}{INDEX_SUFFIX}" for name in shards}
    output.remove(f"{STAGING}/{name}" for name in unneeded)
    outcomes = {}
    for name, shard in shards.items():
        if name in new:
            outcomes[shard.url] = replace(new[name], index=target)
        else:
            assert table is not None
            facts = table.facts(name)
            # The shard's share of the file, by rows.
            nbytes = table.nbytes * facts.samples // max(1, table.metadata.num_rows)
            damage = _as_text(None if facts.damage is None else Damage(**facts.damage))
            outcomes[shard.url] = _Outcome(shard.url, target, "kept", facts.samples, nbytes, damage)
    return outcomes


# The column with the name of each sample's shard.
_SHARD = "__shard__"


def _write_rows(
    output: OutputStore, indexes: Mapping[str, IndexFile], storage_options: dict[str, Any] | None
) -> None:
    """Write the combined index of a folder, atomically, from the index of each shard by its name.

    Raises
    ------
    ShardError
        If an index can't be read, as on a failing disk; the file is not written then.
    """
    target = output.locate(COMBINED_INDEX)
    try:
        fields: dict[str, dict[str, None]] = {}
        for file in indexes.values():
            with open_stored(file, storage_options) as index:
                for kind, names in index.facts.extensions.items():
                    fields.setdefault(kind, {}).update(dict.fromkeys(names))
        columns = {f"{kind}/{name}": FIELDS[name] for kind in fields for name in fields[kind]}
        schema = pa.schema({_SHARD: pa.string(), KEY: pa.string(), **columns})
        with output.scratch(COMBINED_INDEX) as scratch:
            with IndexWriter(scratch, schema) as writer:
                for shard in sorted(indexes, key=natural_order):
                    with open_stored(indexes[shard], storage_options) as index:
                        name = pa.repeat(pa.scalar(shard, pa.string()), len(index))
                        arrays = [index.column(kind, n) for kind in fields for n in fields[kind]]
                        rows = pa.Table.from_arrays([name, index.keys, *arrays], schema=schema)
                        writer.add(shard, rows, index.facts)
            output.commit(scratch, COMBINED_INDEX)
        output.fsync()
    except UnusableIndexError as error:
        raise ShardError(
            f"{target} is not written: an index that it would copy can't be read ({error}). If it "
            "is damaged, delete it and call again"
        ) from error


def _output(folder: str, storage_options: dict[str, Any] | None) -> OutputStore:
    """The output store of a folder of `folder_of`, whose last slash is a part of its name."""
    return open_output(inside(folder, ""), INDEX_ADVICE, storage_options)


def _folder(folder: str | os.PathLike[str] | None) -> str | None:
    if folder is None:
        return None
    return open_output(path_text("folder", folder), INDEX_ADVICE, None).url


def _refuse_collisions(places: Sequence[str]) -> None:
    twice = [place for place, count in Counter(places).items() if count > 1]
    if twice:
        more = f", as of {len(twice) - 1} more names" if len(twice) > 1 else ""
        raise ArgumentError(
            f"several shards would have the index {twice[0]}{more}: shards of one name need "
            "folders of their own"
        )


def _refuse_unwritable(folder: str) -> None:
    if not takes_files(folder):
        kind = "on a web server" if is_web(folder) else "in an archive"
        raise ArgumentError(
            f"an index cannot be written to {folder}, which is {kind}: pass folder= to have the "
            "indexes elsewhere, and name it as index= where they are read"
        )


def _write_one(
    item: _ToIndex,
    folder: str | None,
    storage_options: dict[str, Any] | None,
    stage: bool = False,
) -> _Outcome:
    """Index one shard atomically; with ``stage``, in the staging folder."""
    shard = item.shard
    own = index_place(shard.url, folder)
    beside, name = folder_of(own)
    if stage:
        name = f"{STAGING}/{name}"
    target = inside(beside, name)
    output = _output(beside, storage_options)
    for place in item.known:
        if kept := _kept(place, storage_options, is_here=place.url in (own, target)):
            outcome, data = kept
            if data is None:
                return outcome
            output.put(name, data)
            return replace(outcome, index=target)
    try:
        with (
            open_file(shard.url, storage_options, shard) as stored,
            decompressed(stored, shard.url) as content,
        ):
            index = index_tar(content, shard.url)
            rows, facts = shard_rows(shard, content, index)
            facts.file_id = stored.file_id
            facts.checked = checked_parts(stored, index if content is stored else None)
            data = index_bytes(rows, facts)
    except (ShardError, ShardNotFoundError) as error:
        return _Outcome(shard.url, target, "failed", error=str(error))
    output.put(name, data)
    damage = _as_text(index.damage)
    return _Outcome(shard.url, target, "written", len(index), len(data), damage)


def _kept(
    index: IndexFile, storage_options: dict[str, Any] | None, is_here: bool
) -> tuple[_Outcome, bytes | None] | None:
    """The outcome for a valid index; None without one.

    Also the bytes of one to write: if it has not the version of the shard, or lies elsewhere.
    """
    shard, data = index.shard, None
    try:
        with (
            open_stored(index, storage_options) as stored,
            open_late(shard, storage_options, stored.check) as content,
        ):
            indexed = stored.facts.version, stored.facts.ctime
            if indexed != (shard.version, shard.ctime) or not is_here:
                content.open()  # which checks the shard
                kinds = stored.facts.extensions
                names = [(kind, name) for kind in kinds for name in kinds[kind]]
                columns = {f"{kind}/{name}": stored.column(kind, name) for kind, name in names}
                facts = replace(
                    stored.facts,
                    version=shard.version,
                    ctime=shard.ctime,
                    file_id=content.file_id,
                )
                data = index_bytes(pa.table({KEY: stored.keys} | columns), facts)
            damage = _as_text(stored.damage)
            return _Outcome(shard.url, index.url, "kept", len(stored), stored.nbytes, damage), data
    except (UnusableIndexError, ShardError, ShardNotFoundError):
        return None


def _as_text(damage: Damage | None) -> str | None:
    return None if damage is None else str(damage)


# --- building an index ----------------------------------------------------------------------------

_IMAGES = frozenset(IMAGE_EXTENSIONS.split(";"))
_CONTENTS = TEXTS | INTEGERS

# Texts and labels of at most so many bytes are copied into the index.
_LARGEST_CONTENT = 64 << 10

# Most extensions of a shard with an index: if keys contain dots, every member has its own.
_MOST_KINDS = 64

_LARGEST_INT64 = 2**63 - 1
_IMAGE_FIELDS = tuple(name for name in FIELDS if name not in (*SPAN_FIELDS, "content"))

# The member of one extension for each sample; None without one.
Members = list[Span | None]


def shard_rows(shard: Shard, content: ByteReader, index: ShardIndex) -> tuple[pa.Table, ShardFacts]:
    """Build the rows and facts of a shard's index; reads the heads of images, and small members."""
    if len(index.extensions) > _MOST_KINDS:
        raise ShardError(
            f"{shard.url} has {len(index.extensions)} extensions, and an index holds at most "
            f"{_MOST_KINDS}. A key ends at the first dot of the file name"
        )
    facts = _facts(shard, index)
    columns = {KEY: index.keys}
    for extension in index.extensions:
        fields = _columns(extension, content, index)
        facts.extensions[extension] = list(fields)
        columns |= {f"{extension}/{name}": array for name, array in fields.items()}
    return pa.table(columns), facts


def _facts(shard: Shard, index: ShardIndex) -> ShardFacts:
    return ShardFacts(
        size=shard.size,
        version=shard.version,
        ctime=shard.ctime,
        samples=len(index),
        members=index.members,
        pax=index.pax,
        damage=None if index.damage is None else asdict(index.damage),
        interleaved=list(index.interleaved),
        repeated=list(index.repeated),
        duplicates=[[row, list(index.duplicates[row])] for row in sorted(index.duplicates)],
        sparse=[[offset, *sparse] for offset, sparse in index.sparse.items()],
        skipped=dict(index.skipped),
    )


def _columns(extension: str, content: ByteReader, index: ShardIndex) -> dict[str, pa.Array]:
    places = {name: index.column(extension, name) for name in SPAN_FIELDS}
    members: Members = index.spans(places["offset"], places["size"])
    fields: dict[str, list[Any]] = {}
    if extension.rpartition(".")[2] in _IMAGES:
        images = list(_measured(members, content, index))
        fields |= {
            name: [None if image is None else image[number] for image in images]
            for number, name in enumerate(_IMAGE_FIELDS)
        }
    elif extension in _CONTENTS:
        fields["content"] = list(_contents(members, content, index))
    return places | {name: pa.array(values, FIELDS[name]) for name, values in fields.items()}


def _measured(
    members: Members, content: ByteReader, index: ShardIndex
) -> Iterator[tuple[Any, ...] | None]:
    """The `_IMAGE_FIELDS` of each image; None if a read has to open it."""
    heads = ((at, at + min(size, HEAD)) for at, size in filter(None, members))
    content.prefetch(head for head in heads if head[0] not in index.sparse)
    for span in members:
        if span is None or (span[0] in index.sparse and span[1] > LARGEST_VALUE):
            yield None
            continue
        format, stored = read_stored_header(open_member(content, index, span))
        yield (format, *stored) if _is_portable(stored) else None


def _is_portable(stored: StoredHeader) -> bool:
    """False if another machine may find otherwise: it may have codecs that this one lacks."""
    if stored.error is not None and stored.error.startswith("unsupported-format"):
        return False
    return all(number is None or number <= _LARGEST_INT64 for number in stored[:2])


def _contents(members: Members, content: ByteReader, index: ShardIndex) -> Iterator[bytes | None]:
    """The bytes of small members; None for others."""
    small = [span if span and span[1] <= _LARGEST_CONTENT else None for span in members]
    spans = ((at, at + size) for at, size in filter(None, small))
    content.prefetch(span for span in spans if span[0] not in index.sparse)
    for span in small:
        yield None if span is None else bytes(read_member(content, index, span))


def index_bytes(rows: pa.Table, facts: ShardFacts) -> bytes:
    """The index file of one shard."""
    file = io.BytesIO()
    with IndexWriter(file, rows.schema) as writer:
        writer.add("", rows, facts)
    return file.getvalue()
