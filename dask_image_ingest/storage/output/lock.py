"""Lock of an output folder: one writer at a time.

On a local file system, ``flock``: the kernel releases it when the process ends. Elsewhere, a record
that its writer creates if there is none. ``resume=True`` and ``overwrite=True`` take over what is
there, as of a writer that was killed.

Tasks may outlive their writer, on a cluster that goes on without its client. So each run has a
random id, stored in the folder, and a task commits no file once another id is there. A writer whose
record was taken over finds out before it removes or replaces anything.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output.store import (
    STAGING,
    LocalStore,
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
