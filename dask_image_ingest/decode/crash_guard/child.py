"""The child process of `DecodeSubprocess`, which decodes images and may crash."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from typing import Any, NoReturn

import numpy as np

from dask_image_ingest.decode.buffers import EncodedImages
from dask_image_ingest.decode.crash_guard.guard import READY
from dask_image_ingest.decode.decode import decode_in_batches
from dask_image_ingest.decode.formats import BadImage


def serve() -> NoReturn:
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
            header, data, origin = pickle.load(requests)
        except EOFError:
            # Without a shutdown of the libraries, which takes seconds.
            os._exit(0)
        image = _OneImage()
        try:
            encoded = EncodedImages([header], [data].__getitem__, [origin].__getitem__)
            pixels = decode_in_batches(encoded, decoding, image)
        except Exception as error:  # of the user's transform, for example; the parent raises it
            _reply(replies, error)
            continue
        error_text = pixels.errors[0]
        _reply(replies, image.pixels if error_text is None else BadImage.of(error_text))


class _OneImage:
    """`PixelBuffer` that holds one image on the CPU; ``pixels`` is None before."""

    def __init__(self) -> None:
        self.pixels: np.ndarray | None = None

    def append(self, images: Any) -> None:
        for image in images:
            self.pixels = np.array(image.as_cpu() if hasattr(image, "as_cpu") else image)

    def finish(self) -> np.ndarray:
        return np.empty(0, np.uint8) if self.pixels is None else self.pixels.reshape(-1)


def _reply(replies: Any, reply: object) -> None:
    try:
        pickle.dump(reply, replies)
        replies.flush()
    except BrokenPipeError:
        os._exit(1)  # the worker was killed: a traceback would say nothing
