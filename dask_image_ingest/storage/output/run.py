"""A run that writes to an output folder: its lock, and the replacement of what is there.

One writer at a time. On a local file system the lock is ``flock``: the kernel releases it when the
process ends. Elsewhere it is a record that its writer creates if there is none. ``resume=True`` and
``overwrite=True`` take over what is there, as of a writer that was killed.

Tasks may outlive their writer, on a cluster that goes on without its client. So each run has a
random id, stored in the folder, and a task commits no file once another id is there. A writer whose
record was taken over finds out before it removes or replaces anything.

Files that replace others are staged, and take their place at the end. A file of another name says
so from the first change to the last. Whoever next locks the folder finishes what a killed run
began; until then readers of parquet fail at this file, which is none, rather than take what is
there for the whole.

Before that, files that a frame reads are refused: none of them is written or removed, and none is
written where the frame's next read would find it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from dask_image_ingest.errors import DaskImageIngestError, ExportError, ShardError
from dask_image_ingest.storage.output.store import (
    STAGING,
    LocalStore,
    OutputStore,
    parsed,
    translate_write_errors,
)
from dask_image_ingest.storage.patterns import Search
from dask_image_ingest.storage.shard import identities, start_of

#: The file with the lock, or with the record of its owner.
LOCK = "_lock"

#: The file with the id of the current run.
RUN = f"{STAGING}/run"

# The file with the id of a run that was interrupted, or has failed.
_ENDED = f"{STAGING}/ended"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def acquire(output: OutputStore, steal: bool) -> Iterator[Callable[[], None]]:
    """Hold the lock of an output folder; yields a check that it is still held.

    First finishes what a killed run has left of a `swap`. A new folder in which nothing is written
    is removed.

    Parameters
    ----------
    steal
        Take over the record of another writer.

    Raises
    ------
    ExportError
        If another run holds the lock; from the check, if another run has taken it over.
    """
    file = None
    is_new = isinstance(output, LocalStore) and not os.path.exists(output.url)
    if isinstance(output, LocalStore):
        with translate_write_errors(output.url, output.advice):
            file = _locked_file(output)
    run = uuid.uuid4().hex

    def refuse_other_owner() -> None:
        # Nobody can take over a kernel lock.
        if file is None and parsed(output.read(LOCK)).get("run") != run:
            raise ExportError(f"another run has taken over {output.url}: this one ends here")

    if file is None:
        _create_record(output, run, steal)
    try:
        finish_swap(output)
        yield refuse_other_owner
    finally:
        try:
            # Before the release, else another run could lock a file about to be removed.
            if file is not None or parsed(output.read(LOCK)).get("run") == run:
                output.remove([LOCK])
        finally:
            if file is not None:
                os.close(file)
            if is_new:
                with suppress(OSError):  # not empty
                    os.rmdir(output.url)


def begin_run(output: OutputStore) -> str:
    """Start a run with a new id, so that tasks of earlier runs commit nothing any more."""
    run = uuid.uuid4().hex
    output.put(RUN, run.encode())
    return run


def end_run(output: OutputStore, run: str) -> None:
    """Note that a run was interrupted, or has failed: its tasks may finish, and begin no more."""
    output.put(_ENDED, run.encode())


def refuse_ended_run(output: OutputStore, run: str) -> None:
    """Refuse to go on in a task whose run was stopped.

    Raises
    ------
    ExportError
    """
    if output.read(_ENDED) == run.encode():
        raise ExportError(f"the run that writes to {output.url} was stopped: its tasks end, too")


def refuse_other_run(output: OutputStore, run: str) -> None:
    """Refuse to write in a task that outlived its run.

    Raises
    ------
    ExportError
    """
    if output.read(RUN) != run.encode():
        raise ExportError(f"another run writes to {output.url}, or has: this one ends here")


def _locked_file(output: LocalStore) -> int | None:
    """Create and lock the lock file; its descriptor, None on a file system without locks."""
    path = output.locate(LOCK)
    while True:
        os.makedirs(output.url, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file between our open and lock: try again.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    with suppress(OSError):  # a full disk: the owner's name is a courtesy
                        os.truncate(file, 0)
                        os.write(file, _who().encode())
                    return file
            os.close(file)
        except BlockingIOError:
            owner = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            raise ExportError(
                f"another run writes to {output.url} now ({owner or 'not known who'}). Let it "
                "finish, or choose another folder"
            ) from None
        except OSError as error:
            os.close(file)
            if error.errno in _NO_LOCKS:
                return None
            raise


def _create_record(output: OutputStore, run: str, steal: bool) -> None:
    record = json.dumps({"run": run, "who": _who()}).encode()
    if output.create(LOCK, record):
        return
    if not steal:
        who = parsed(output.read(LOCK)).get("who", "not known who")
        raise ExportError(
            f"another run writes to {output.url}, or was killed there ({who}). If it is dead, "
            "resume=True goes on where it stopped, and overwrite=True starts over"
        )
    output.put(LOCK, record)


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


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
