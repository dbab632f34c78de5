"""Decoding in a process that may die: how the image that kills a decoder is found.

Only for a partition in whose midst a process died before. One image at a time, so that there is no
doubt which one it was.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from distributed.protocol.pickle import dumps

from dask_image_ingest.decode.buffers import Origin, Pixels
from dask_image_ingest.decode.crash_guard import crash_log
from dask_image_ingest.decode.formats import BadImage, Header
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.errors import DaskImageIngestError

# The path first: it may lead to this very package.
_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from dask_image_ingest.decode.crash_guard.child import serve; serve()"
)
READY = "ready"

# What its pipes say of a process that died: the last one, in the midst of an answer.
_DEATH = (EOFError, BrokenPipeError, pickle.UnpicklingError)

# For want of memory, for example, and perhaps only today.
_KILLED_BY_OTHERS = ("SIGKILL", "SIGTERM", "SIGHUP")


class DecodeSubprocess:
    """A process that decodes images for this one, and is started anew when it dies.

    A context manager; the process ends with it.
    """

    def __init__(self, decoding: DecodeSpec) -> None:
        self._decoding = dumps(decoding)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DecodeSubprocess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def decode(self, header: Header, data: bytes, origin: Origin) -> np.ndarray:
        """Decode one image.

        Raises
        ------
        BadImage
            With the code ``crashed-decoder`` if that killed two processes, of which the second had
            seen no other image: one that came before it may have left the first one damaged.
        """
        death = ""
        for _ in range(2):
            process = self._started()
            try:
                reply = self._ask(process, (header, data, origin))
            except _DEATH:
                death = _name_of(self._end())
                continue
            if isinstance(reply, Exception):
                raise reply
            return reply
        if death not in _KILLED_BY_OTHERS:
            crash_log.remember(data, death)
        raise crashed(death)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                reply = self._ask(self._process, sys.path, self._decoding)
            except _DEATH:
                reply = None
            if reply != READY:
                raise DaskImageIngestError(
                    "a process died while it decoded these images, and the guarded process that "
                    f"should find out which one did it does not start: exit status {self._end()}"
                )
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], *messages: object) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            pickle.dump(message, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            process.communicate(timeout=60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.communicate()
        return process.returncode


def decode_guarded(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: DecodeSpec,
    buffer: Any,
    origin: Callable[[int], Origin],
) -> Pixels:
    """Decode the images of a partition one by one in a guarded process."""
    errors = [header.error for header in headers]
    shapes = np.zeros((len(headers), 3), np.int32)
    itemsizes = np.ones(len(headers), np.int64)
    with DecodeSubprocess(decoding) as guard:
        for row, header in enumerate(headers):
            if header.error is not None:
                continue
            try:
                image = guard.decode(header, bytes(image_bytes(row)), origin(row))
            except BadImage as bad:
                errors[row] = str(bad)
                continue
            shapes[row], itemsizes[row] = image.shape, image.dtype.itemsize
            buffer.append([image])
    return Pixels(buffer.finish(), shapes, errors, itemsizes)


def crashed(death: str) -> BadImage:
    """Error of an image that killed a process."""
    return BadImage("crashed-decoder", f"decoding it kills the process ({death})")


def _name_of(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"
