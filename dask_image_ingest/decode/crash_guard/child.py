"""The process that decodes images and may die of one: the other end of `DecodeSubprocess`."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from typing import Any

import numpy as np

from dask_image_ingest.decode.crash_guard.guard import READY
from dask_image_ingest.decode.decode import decode_in_batches
from dask_image_ingest.decode.formats import BadImage


def serve() -> None:
    """Be the guarded process: decode what comes in until nothing more comes."""
    questions = sys.stdin.buffer
    # What decoders print must not get among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoding = pickle.loads(pickle.load(questions))
    _answer(answers, READY)
    while True:
        try:
            header, data, origin = pickle.load(questions)
        except EOFError:
            return
        image = _OneImage()
        try:
            pixels = decode_in_batches(
                [header], [data].__getitem__, decoding, image, [origin].__getitem__
            )
        except Exception as error:  # of the user's transform, for example: raised over there
            _answer(answers, error)
            continue
        failed = pixels.errors[0]
        _answer(answers, image.pixels if failed is None else BadImage.of(failed))


class _OneImage:
    """Takes one decoded image, from wherever it lies."""

    pixels: np.ndarray

    def append(self, images: Any) -> None:
        for image in images:
            self.pixels = np.array(image.as_cpu() if hasattr(image, "as_cpu") else image)

    def finish(self) -> np.ndarray:
        return self.pixels.reshape(-1) if hasattr(self, "pixels") else np.empty(0, np.uint8)


def _answer(answers: Any, answer: object) -> None:
    pickle.dump(answer, answers)
    answers.flush()
