"""Decode in a subprocess that may crash, to find the image that kills it.

Only for a partition during which a process died before. One image at a time, so that the culprit is
certain.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn, TypeAlias

import numpy as np
from distributed.protocol.pickle import dumps

from dask_image_ingest.decode import crash_log
from dask_image_ingest.decode.buffers import EncodedImages, Origin, PixelBuffer, Pixels
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.formats import BadImage, Header
from dask_image_ingest.decode.region import Part
from dask_image_ingest.errors import DaskImageIngestError
from dask_image_ingest.typedefs import ImageBatch

# Set sys.path before the import, which may depend on it.
_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from dask_image_ingest.decode.crash_guard import serve; "
    "from dask_image_ingest.decode.decode import decode_in_batches; serve(decode_in_batches)"
)
READY = "ready"

# Errors of the pipes if the process died; UnpicklingError, if it died during a reply.
_DEATH = (EOFError, BrokenPipeError, pickle.UnpicklingError)

# Signals from outside, for example when memory is short: the image is not to blame.
_KILLED_BY_OTHERS = ("SIGKILL", "SIGTERM", "SIGHUP")


class DecodeSubprocess:
    """Subprocess that decodes images, restarted if it dies. A context manager, which ends it."""

    def __init__(self, decoding: DecodeSpec) -> None:
        self._decoding = dumps(decoding)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DecodeSubprocess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._exit_status()

    def decode(
        self, header: Header, data: bytes, origin: Origin, part: Part | None = None
    ) -> np.ndarray:
        """Decode one image, or a part of it.

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
                reply = self._request(process, (header, data, origin, part))
            except _DEATH:
                death = _death_name(self._exit_status())
                continue
            if isinstance(reply, Exception):
                raise reply
            return reply
        if death not in _KILLED_BY_OTHERS:
            crash_log.remember(data, death)
        raise crashed(death)

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
    with DecodeSubprocess(decoding) as guard:
        for row, header in enumerate(images.headers):
            if header.error is not None:
                continue
            try:
                data = bytes(images.read(row)[:])
                image = guard.decode(header, data, images.origin(row), images.part(row))
            except BadImage as bad:
                errors[row] = str(bad)
                continue
            shapes[row], itemsizes[row] = image.shape, image.dtype.itemsize
            buffer.append([image])
    return Pixels(buffer.finish(), shapes, errors, itemsizes)


def crashed(death: str) -> BadImage:
    """Error of an image that killed a process."""
    return BadImage("crashed-decoder", f"decoding it kills the process ({death})")


def _death_name(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"


# --- in the subprocess ----------------------------------------------------------------------------


Decode: TypeAlias = Callable[
    [EncodedImages, Sequence[DecodeSpec], Sequence[PixelBuffer]], list[Pixels]
]


def serve(decode: Decode) -> NoReturn:
    """Decode images from stdin until it is closed; replies go to stdout."""
    requests = sys.stdin.buffer
    # Send what decoders print to stderr, so that it does not mix with the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoding = pickle.loads(pickle.load(requests))
    _reply(replies, READY)
    while True:
        try:
            header, data, origin, part = pickle.load(requests)
        except EOFError:
            # Without a shutdown of the libraries, which takes seconds.
            os._exit(0)
        image = _OneImage()
        try:
            parts = None if part is None else [part]
            encoded = EncodedImages([header], [data].__getitem__, [origin].__getitem__, parts=parts)
            (pixels,) = decode(encoded, [decoding], [image])
        except Exception as error:  # of the user's transform, for example; the parent raises it
            _reply(replies, error)
            continue
        error_text = pixels.errors[0]
        _reply(replies, image.pixels if error_text is None else BadImage.of(error_text))


class _OneImage:
    """`PixelBuffer` that holds one image on the CPU; ``pixels`` is None before."""

    def __init__(self) -> None:
        self.pixels: np.ndarray | None = None

    def append(self, images: ImageBatch) -> None:
        for image in images:
            self.pixels = np.array(image.as_cpu() if hasattr(image, "as_cpu") else image)

    def finish(self) -> np.ndarray:
        return np.empty(0, np.uint8) if self.pixels is None else self.pixels.reshape(-1)


def _reply(replies: IO[bytes], reply: object) -> None:
    try:
        pickle.dump(reply, replies)
        replies.flush()
    except BrokenPipeError:
        os._exit(1)  # the worker was killed: a traceback would say nothing
