"""Replacement of a folder's files: new ones are staged, and take the place of old ones at the end.

A file of another name says so from the first change to the last. Whoever next locks the folder
finishes what a killed run began; until then readers of parquet fail at this file, which is none,
rather than take what is there for the whole.

Before that, files that a frame reads are refused: none of them is written or removed, and none is
written where the frame's next read would find it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_image_ingest.errors import DaskImageIngestError, ExportError, ShardError
from dask_image_ingest.storage.output.store import STAGING, OutputStore, parsed
from dask_image_ingest.storage.patterns import Search
from dask_image_ingest.storage.shard import identities, start_of


def refuse_sources(
    sources: Iterable[str],
    written: Iterable[str] = (),
    writer: str = "call",
    *,
    searches: Iterable[Search] = (),
    reader: str = "the frame",
    folder: str | None = None,
    advice: str = ". Choose another folder",
    error: type[DaskImageIngestError] = ExportError,
) -> None:
    """Refuse to write or remove files that are read, by whatever name, or to add to them.

    Parameters
    ----------
    sources
        URLs of what is read.
    written
        URLs of what would be written or removed.
    writer
        What would do so, for the message: ``"export"``.
    searches
        Where the reader has looked for its sources: no file is written that it would find there.
    reader
        What reads the sources, for the message.
    folder
        A folder of which a later read takes whatever is there: no source may lie in it.
    advice, error
        The end of the message, and its class.
    """
    written = tuple(written)
    folders: dict[str, str] = {}
    targets = set().union(*(identities(url, folders) for url in written))
    whole = [] if folder is None else [start_of(identity) for identity in identities(folder)]
    for source in sorted(sources):
        for kind, host, path in identities(source, folders):
            if (kind, host, path) in targets:
                why = f"which this {writer} would write or remove"
            elif any((kind, host) == (k, h) and path.startswith(top) for k, h, top in whole):
                why = f"which lies in {folder}, where this {writer} writes files of its own"
            else:
                continue
            raise error(f"{reader} reads {source}, {why}{advice}")
    for search in searches:
        added = search.first_found(written)
        if added is not None:
            raise error(
                f"{reader} reads {search.pattern}, where its next read would find {added}, which "
                f"this {writer} would write{advice}"
            )


#: The file that exists while files are replaced.
JOURNAL = "part.unfinished.parquet"

#: The subfolder for files that replace others when all are whole.
REPLACEMENT = f"{STAGING}/new"

#: The file that says which call is to replace the others: it is written first, so that a call
#: that was killed before anything else goes on, too, and removed by the swap.
REPLACING = f"{STAGING}/replacing"


def replacement_of(output: OutputStore) -> OutputStore:
    """An output folder in the staging folder of another one, whose files it is to replace."""
    return replace(output, url=output.locate(REPLACEMENT))


def swap(output: OutputStore, new: Mapping[str, str], old: Sequence[str]) -> None:
    """Remove ``old`` files, then move staged ones to their names: a mark of completion comes last.

    Parameters
    ----------
    new
        Name of each file, by its name while it is staged.
    old
        A mark of completion comes first.
    """
    output.fsync()
    output.put(JOURNAL, json.dumps({"new": dict(new), "old": [*old, REPLACING]}).encode())
    output.fsync()
    finish_swap(output)


def refuse_unfinished(files: Iterable[str]) -> None:
    """Refuse to read a folder whose files are being replaced.

    Raises
    ------
    ShardError
    """
    for url in files:
        if url.rpartition("/")[2] == JOURNAL:
            raise ShardError(
                f"{url} says that the files beside it are being replaced, or that this was killed: "
                "writing there again finishes it first"
            )


def finish_swap(output: OutputStore) -> None:
    """Go on with a swap where it was killed; does nothing without one.

    Raises
    ------
    ExportError
        If the file that says so is none of this package's.
    """
    content = output.read(JOURNAL)
    if content is None:
        return
    journal = parsed(content)
    if not _is_journal(journal):
        raise ExportError(
            f"{output.locate(JOURNAL)} is damaged, or not from this release: it names the files "
            f"that a write which was interrupted goes on to replace by those in "
            f"{output.locate(STAGING)}. Move it away, and check what is there"
        )
    folders = {os.path.dirname(name) for name in journal["new"]}
    staged = {f"{folder}/{name}" for folder in folders for name in output.sizes(folder)}
    waiting = {name: at for name, at in journal["new"].items() if name in staged}
    moved = {*journal["new"].values()} - {*waiting.values()}
    output.remove(name for name in journal["old"] if name not in moved)
    for name, at in waiting.items():
        output.move(name, at)
    output.fsync()
    output.remove([JOURNAL])


def _is_journal(journal: dict[str, Any]) -> bool:
    """True if a swap may have written it: all of its names are of files in the folder."""
    new, old = journal.get("new"), journal.get("old")
    if not isinstance(new, dict) or not isinstance(old, list):
        return False
    names = [*new, *new.values(), *old]
    return all(name.startswith(f"{STAGING}/") for name in new) and all(
        isinstance(name, str) and "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))
        for name in names
    )
