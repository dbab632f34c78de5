"""Lock of an output folder: one writer at a time.

On this machine the kernel keeps the lock, and lets it go when the process ends, however it ends.
Elsewhere a writer leaves a record and renews it: a record that is renewed has a living owner. One
that is not is taken over by ``resume=True`` or ``overwrite=True``, after it was watched a while.

Tasks may outlive their writer, on a cluster that goes on without its client. So each run has a
random name, which lies in the place while it writes, and no task puts a file under its final name
when that is another one. A writer that was stopped for a while, as on a laptop that was shut, asks
whether the record is still its own before it removes or replaces what is there.
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

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output.local_store import LocalStore
from dask_image_ingest.storage.output.store import STAGING, OutputStore, translate_write_errors

#: Who holds a place, where the kernel keeps no lock; and the name of the run that writes there.
LOCK = "_lock"
RUN = f"{STAGING}/run"

# A record is renewed this often, and is watched three times as long before it is taken over.
_RENEWED_EVERY = 10.0
_WATCHED_FOR = 3
_TAKEN_OVER_AFTER = _RENEWED_EVERY * _WATCHED_FOR

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger("dask_image_ingest")


@contextmanager
def acquire(output: OutputStore, steal: bool) -> Iterator[Callable[[], None]]:
    """Hold the lock of an output folder; yields a check that it is still held.

    Parameters
    ----------
    steal
        Take over the lock of a writer that seems dead.

    Raises
    ------
    ExportError
        If somebody else writes there; from the check, if somebody has taken over meanwhile.
    """
    if isinstance(output, LocalStore):
        try:
            file = _acquire_file(output)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            try:
                yield lambda: None  # the kernel takes no lock away
            finally:
                try:
                    # While it is locked, so that nobody locks a file that is about to go.
                    output.remove([LOCK])
                finally:
                    # Else this process would lock itself out of the next try.
                    os.close(file)
            return
    with _record(output, steal) as check:
        yield check


def begin_run(output: OutputStore) -> str:
    """Start a run with a new id, so that tasks of earlier runs write nothing any more."""
    run = uuid.uuid4().hex
    output.put(RUN, run.encode())
    return run


def refuse_other_run(output: OutputStore, run: str) -> None:
    """Refuse to write for a task that outlived its run.

    Raises
    ------
    ExportError
    """
    if output.read(RUN) != run.encode():
        raise ExportError(f"another run writes to {output.url}, or has: this one ends here")


def _acquire_file(output: LocalStore) -> int:
    path = output.locate(LOCK)
    while True:
        with translate_write_errors(output.url, output.advice):
            os.makedirs(output.url, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    with suppress(OSError):  # a full disk: the lock holds, whatever is in it
                        os.truncate(file, 0)
                        os.write(file, _who().encode())
                    return file
            os.close(file)  # its last owner has removed it in the meantime
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


# --- where the kernel keeps no locks --------------------------------------------------------------


@contextmanager
def _record(output: OutputStore, steal: bool) -> Iterator[Callable[[], None]]:
    run = uuid.uuid4().hex
    _acquire_record(output, run, steal)
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


def _acquire_record(output: OutputStore, run: str, steal: bool) -> None:
    if output.create(LOCK, _written(run, 0)):
        return
    found = output.read(LOCK)
    who = json.loads(found or b"{}").get("who", "not known who")
    if not steal:
        raise ExportError(
            f"another run writes to {output.url}, or was killed there ({who}). If it is dead, "
            "resume=True goes on where it stopped, and overwrite=True begins anew"
        )
    logger.info("watching whether the run of %s is alive", who)
    for _ in range(_WATCHED_FOR):
        time.sleep(_RENEWED_EVERY)
        if output.read(LOCK) != found:
            raise ExportError(
                f"another run writes to {output.url} now ({who}). Let it finish, or choose "
                "another folder"
            )
    output.put(LOCK, _written(run, 0))
    # Of two who take over at the same time, the last one has it.
    time.sleep(_RENEWED_EVERY / 5)
    if _owner(output) != run:
        raise ExportError(f"another run took over {output.url} at this moment")


def _renew(output: OutputStore, run: str, stop: threading.Event, busy: threading.Lock) -> None:
    """Renew a record until it is another's; ``stop`` says so too, ``busy`` that it is written."""
    beat = 0
    while not stop.wait(_RENEWED_EVERY):
        beat += 1
        began = time.time()  # which goes on where a machine sleeps
        try:
            with busy:
                is_lost = _owner(output) != run
                if not is_lost:
                    output.put(LOCK, _written(run, beat))
        except ExportError as error:  # one renewal may fail; the next may not
            logger.warning("the lock of %s was not renewed: %s", output.url, error)
            continue
        # What took so long may have been written over the record of another.
        if is_lost or time.time() - began > _TAKEN_OVER_AFTER:
            stop.set()
            logger.error("another run took over %s", output.url)


def _refuse_other_owner(
    output: OutputStore, run: str, stop: threading.Event, busy: threading.Lock
) -> None:
    with busy:  # half written, a record is nobody's
        is_lost = stop.is_set() or _owner(output) != run
    if is_lost:
        raise ExportError(
            f"another run has taken over {output.url}, where this one was not heard of for a "
            "while: this one ends here"
        )


def _owner(output: OutputStore) -> str | None:
    record = output.read(LOCK)
    return json.loads(record)["run"] if record else None


def _written(run: str, beat: int) -> bytes:
    return json.dumps({"run": run, "who": _who(), "beat": beat}).encode()
