"""Decode in a subprocess that may crash, to find the image that kills it.

Only for a partition during which a process died before. One image at a time, so that the culprit is
certain. The subprocess takes seconds to start, and a worker that dies leaves several such
partitions: so it is kept for a while, for the next one with the same options.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from distributed.protocol.pickle import dumps

from dask_image_ingest.decode.buffers import EncodedImages, Origin, PixelBuffer, Pixels
from dask_image_ingest.decode.crash_guard import crash_log
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.formats import BadImage, Header
from dask_image_ingest.errors import DaskImageIngestError

# Set sys.path before the import, which may depend on it.
_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from dask_image_ingest.decode.crash_guard.child import serve; serve()"
)
READY = "ready"

# Errors of the pipes if the process died; UnpicklingError, if it died during a reply.
_DEATH = (EOFError, BrokenPipeError, pickle.UnpicklingError)

# Signals from outside, for example when memory is short: the image is not to blame.
_KILLED_BY_OTHERS = ("SIGKILL", "SIGTERM", "SIGHUP")


_IDLE_SECONDS = 15.0  # that a subprocess waits for another partition


class DecodeSubprocess:
    """Subprocess that decodes images, restarted if it dies. A context manager, which ends it."""

    def __init__(self, decoding: DecodeSpec) -> None:
        self._decoding = dumps(decoding)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DecodeSubprocess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def decode(self, header: Header, data: bytes, origin: Origin) -> np.ndarray:
        """Decode one image.

        Raises
        ------
        BadImage
            If the image can't be decoded. The code is ``crashed-decoder`` if it killed two
            processes. The second one was fresh; the first may have been corrupted by an earlier
            image.
        """
        death = ""
        for _ in range(2):
            process = self._running()
            try:
                reply = self._request(process, (header, data, origin))
            except _DEATH:
                death = _death_name(self._exit_status())
                continue
            if isinstance(reply, Exception):
                raise reply
            return reply
        if death not in _KILLED_BY_OTHERS:
            crash_log.remember(data, death)
        raise crashed(death)

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._exit_status()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if necessary."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                reply = self._request(self._process, sys.path, self._decoding)
            except _DEATH:
                reply = None
            if reply != READY:
                status = self._exit_status()
                raise DaskImageIngestError(
                    "a process died while it decoded these images, and the guarded process that "
                    f"should find out which one did it does not start: exit status {status}"
                )
        return self._process

    def _request(self, process: subprocess.Popen[bytes], *messages: object) -> Any:
        """Send messages and wait for the reply."""
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            pickle.dump(message, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    def _exit_status(self) -> int:
        """Exit status of the process, which is ending."""
        process, self._process = self._process, None
        assert process is not None
        try:
            process.communicate(timeout=60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.communicate()
        return process.returncode


def decode_guarded(images: EncodedImages, decoding: DecodeSpec, buffer: PixelBuffer) -> Pixels:
    """Decode the images of a partition one by one in a `DecodeSubprocess`."""
    errors = [header.error for header in images.headers]
    shapes = np.zeros((len(images), 3), np.int32)
    itemsizes = np.ones(len(images), np.int64)
    with _decode_subprocess(decoding) as guard:
        for row, header in enumerate(images.headers):
            if header.error is not None:
                continue
            try:
                image = guard.decode(header, bytes(images.read(row)), images.origin(row))
            except BadImage as bad:
                errors[row] = str(bad)
                continue
            shapes[row], itemsizes[row] = image.shape, image.dtype.itemsize
            buffer.append([image])
    return Pixels(buffer.finish(), shapes, errors, itemsizes)


# Subprocesses to use again, by the process that started them, as a fork inherits this, and options.
_idle: defaultdict[tuple[int, str], list[DecodeSubprocess]] = defaultdict(list)


@contextmanager
def _decode_subprocess(decoding: DecodeSpec) -> Iterator[DecodeSubprocess]:
    """A subprocess for a partition, kept for `_IDLE_SECONDS` afterwards."""
    idle = _idle[os.getpid(), decoding.token]
    try:
        guard = idle.pop()
    except IndexError:
        guard = DecodeSubprocess(decoding)
    try:
        yield guard
    except BaseException:
        guard.end()  # it may owe a reply
        raise
    idle.append(guard)
    timer = threading.Timer(_IDLE_SECONDS, _end_idle, [idle, guard])
    timer.daemon = True
    timer.start()


def _end_idle(idle: list[DecodeSubprocess], guard: DecodeSubprocess) -> None:
    with suppress(ValueError):  # in use again
        idle.remove(guard)
        guard.end()


def crashed(death: str) -> BadImage:
    """Error of an image that killed a process."""
    return BadImage("crashed-decoder", f"decoding it kills the process ({death})")


def _death_name(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"
