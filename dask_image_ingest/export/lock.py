"""One writer for a place at a time.

On this machine the kernel keeps the lock, and lets it go when the process ends, however it ends.
Elsewhere a writer leaves a record and renews it: a record that is renewed has a living owner. One
that is not is taken over by ``resume=True`` or ``overwrite=True``, after it was watched a while.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dask_image_ingest.errors import ExportError
from dask_image_ingest.export.local_place import LocalPlace
from dask_image_ingest.export.place import Place, writing

__all__ = ["LOCK", "hold"]

LOCK = "_lock"

# A record is renewed this often, and is watched three times as long before it is taken over.
_RENEWED_EVERY = 10.0
_WATCHED_FOR = 3

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger("dask_image_ingest")


@contextmanager
def hold(place: Place, take_over: bool) -> Iterator[None]:
    """Be the only writer of a place.

    Parameters
    ----------
    take_over
        Whether the record of a writer that seems dead may be removed.

    Raises
    ------
    ExportError
        If somebody else writes there.
    """
    if isinstance(place, LocalPlace):
        try:
            file = _lock_file(place)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            try:
                yield
            finally:
                try:
                    # While it is locked, so that nobody locks a file that is about to go.
                    place.remove([LOCK])
                finally:
                    # Else this process would lock itself out of the next try.
                    os.close(file)
            return
    with _record(place, take_over):
        yield


def _lock_file(place: LocalPlace) -> int:
    path = place.locate(LOCK)
    while True:
        with writing(place.url, place.writer):
            os.makedirs(place.url, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    os.truncate(file, 0)
                    os.write(file, _who().encode())
                    return file
            os.close(file)  # its last owner has removed it in the meantime
        except BlockingIOError:
            owner = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            raise ExportError(
                f"another run writes to {place.url} now ({owner or 'not known who'}). Let it "
                "finish, or choose another folder"
            ) from None
        except BaseException:
            os.close(file)
            raise


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


# --- where the kernel keeps no locks --------------------------------------------------------------


@contextmanager
def _record(place: Place, take_over: bool) -> Iterator[None]:
    run = uuid.uuid4().hex
    _claim(place, run, take_over)
    stop = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(place, run, stop), name="renew-export-lock", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        stop.set()
        renewing.join()
        if _owner(place) == run:
            place.remove([LOCK])


def _claim(place: Place, run: str, take_over: bool) -> None:
    if place.create(LOCK, _written(run, 0)):
        return
    found = place.read(LOCK)
    who = json.loads(found or b"{}").get("who", "not known who")
    if not take_over:
        raise ExportError(
            f"another run writes to {place.url}, or was killed there ({who}). If it is dead, "
            "resume=True goes on where it stopped, and overwrite=True begins anew"
        )
    logger.info("watching whether the run of %s is alive", who)
    for _ in range(_WATCHED_FOR):
        time.sleep(_RENEWED_EVERY)
        if place.read(LOCK) != found:
            raise ExportError(
                f"another run writes to {place.url} now ({who}). Let it finish, or choose "
                "another folder"
            )
    place.put(LOCK, _written(run, 0))
    # Of two who take over at the same time, the last one has it.
    time.sleep(_RENEWED_EVERY / 5)
    if _owner(place) != run:
        raise ExportError(f"another run took over {place.url} at this moment")


def _renew(place: Place, run: str, stop: threading.Event) -> None:
    beat = 0
    while not stop.wait(_RENEWED_EVERY):
        beat += 1
        try:
            if _owner(place) != run:
                logger.error("another run took over %s", place.url)
                return
            place.put(LOCK, _written(run, beat))
        except ExportError as error:  # one renewal may fail; the next may not
            logger.warning("the lock of %s was not renewed: %s", place.url, error)


def _owner(place: Place) -> str | None:
    record = place.read(LOCK)
    return json.loads(record)["run"] if record else None


def _written(run: str, beat: int) -> bytes:
    return json.dumps({"run": run, "who": _who(), "beat": beat}).encode()
