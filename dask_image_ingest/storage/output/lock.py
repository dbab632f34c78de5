"""Lock of an output folder: one writer at a time.

On a local file system, ``flock``: the kernel releases it when the process ends. Elsewhere, a lease:
a writer creates a record and renews it. A record that is not renewed is taken over by
``resume=True`` or ``overwrite=True`` after watching it for a while.

Tasks may outlive their writer, on a cluster that goes on without its client. So each run has a
random id, stored in the folder, and a task commits no file once another id is there. A writer that
was suspended, as on a closed laptop, checks that the record is its own before it removes or
replaces anything.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output.local_store import LocalStore
from dask_image_ingest.storage.output.store import (
    STAGING,
    OutputStore,
    parsed,
    translate_write_errors,
)
from dask_image_ingest.storage.output.swap import finish_swap

#: The file with the lock, or with the record of its owner.
LOCK = "_lock"

#: The file with the id of the current run.
RUN = f"{STAGING}/run"

# The file with the id of a run that was interrupted, or has failed.
_ENDED = f"{STAGING}/ended"

# Seconds between renewals of a record, and how many of these it is watched before a takeover.
_RENEWED_EVERY = 10.0
_WATCHED_FOR = 3
_TAKEN_OVER_AFTER = _RENEWED_EVERY * _WATCHED_FOR

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger("dask_image_ingest")


@contextmanager
def acquire(output: OutputStore, steal: bool) -> Iterator[Callable[[], None]]:
    """Hold the lock of an output folder; yields a check that it is still held.

    First finishes what a killed run has left of a `swap`. A new folder in which nothing is written
    is removed.

    Parameters
    ----------
    steal
        Take over the record of a writer that seems dead.

    Raises
    ------
    ExportError
        If another run holds the lock; from the check, if another run has taken it over.
    """
    if isinstance(output, LocalStore):
        is_new = not os.path.exists(output.url)
        try:
            file = _acquire_file(output)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                with translate_write_errors(output.url, output.advice):
                    raise
        else:
            try:
                finish_swap(output)
                yield lambda: None  # nobody can take over a kernel lock
            finally:
                try:
                    # Before the release, else another run could lock a file about to be removed.
                    output.remove([LOCK])
                finally:
                    # Releases the lock, even if the removal failed.
                    os.close(file)
                    if is_new:
                        with suppress(OSError):  # not empty
                            os.rmdir(output.url)
            return
    with _acquire_lease(output, steal) as check:
        finish_swap(output)
        yield check


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


def _acquire_file(output: LocalStore) -> int:
    """Create and lock the lock file; its descriptor."""
    path = output.locate(LOCK)
    while True:
        with translate_write_errors(output.url, output.advice):
            os.makedirs(output.url, exist_ok=True)
            if os.path.islink(path):  # to a file that would be overwritten
                with suppress(FileNotFoundError):
                    os.unlink(path)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file between our open and lock: try again.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    if os.fstat(file).st_nlink == 1:  # else it is another file, too
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
        except BaseException:
            os.close(file)
            raise


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


# --- leases, where there are no kernel locks ------------------------------------------------------


@contextmanager
def _acquire_lease(output: OutputStore, steal: bool) -> Iterator[Callable[[], None]]:
    run = uuid.uuid4().hex
    _create_record(output, run, steal)
    stop, busy = threading.Event(), threading.Lock()
    renewing = threading.Thread(
        target=_renew, args=(output, run, stop, busy), name="renew-export-lock", daemon=True
    )
    renewing.start()
    try:
        yield partial(_refuse_other_owner, output, run, stop, busy)
    finally:
        stop.set()
        renewing.join()
        if _owner(output) == run:
            output.remove([LOCK])


def _create_record(output: OutputStore, run: str, steal: bool) -> None:
    if output.create(LOCK, _record(run, 0)):
        return
    record = output.read(LOCK)
    who = parsed(record).get("who", "not known who")
    if not steal:
        raise ExportError(
            f"another run writes to {output.url}, or was killed there ({who}). If it is dead, "
            "resume=True goes on where it stopped, and overwrite=True starts over"
        )
    logger.info("watching whether the run of %s is alive", who)
    for _ in range(_WATCHED_FOR):
        time.sleep(_RENEWED_EVERY)
        if output.read(LOCK) != record:
            raise ExportError(
                f"another run writes to {output.url} now ({who}). Let it finish, or choose "
                "another folder"
            )
    output.put(LOCK, _record(run, 0))
    # If two take over at the same time, the last one to write wins.
    time.sleep(_RENEWED_EVERY / 5)
    if _owner(output) != run:
        raise ExportError(f"another run took over {output.url} at this moment")


def _renew(output: OutputStore, run: str, stop: threading.Event, busy: threading.Lock) -> None:
    """Renew a record until ``stop`` is set, or set it if another run has taken over.

    Holds ``busy`` while it reads and writes the record.
    """
    beat = 0
    while not stop.wait(_RENEWED_EVERY):
        beat += 1
        began = time.time()  # not monotonic, which may stand still while a machine sleeps
        try:
            with busy:
                is_lost = _owner(output) != run
                if not is_lost:
                    output.put(LOCK, _record(run, beat))
        except ExportError as error:  # tolerated: the next renewal may succeed
            logger.warning("the lock of %s was not renewed: %s", output.url, error)
            continue
        # A renewal that took so long may have overwritten the record of a run that took over.
        if is_lost or time.time() - began > _TAKEN_OVER_AFTER:
            stop.set()
            logger.error("another run took over %s", output.url)


def _refuse_other_owner(
    output: OutputStore, run: str, stop: threading.Event, busy: threading.Lock
) -> None:
    with busy:  # not while the record is half written
        is_lost = stop.is_set() or _owner(output) != run
    if is_lost:
        raise ExportError(
            f"another run has taken over {output.url}, where this one was not heard of for a "
            "while: this one ends here"
        )


def _owner(output: OutputStore) -> Any:
    """The run that the record names; None without a record."""
    return parsed(output.read(LOCK)).get("run")


def _record(run: str, beat: int) -> bytes:
    return json.dumps({"run": run, "who": _who(), "beat": beat}).encode()
