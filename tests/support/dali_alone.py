"""DALI's own answer for an image, asked in a process that it may kill.

Each image gets a pipeline of its own, since one that has failed is dead.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

#: Raised by DALI, and: the process was gone.
RAISED, KILLED = "raised", "killed"


def ask_dali(images: dict[str, bytes], mode: str, folder: Path) -> dict[str, np.ndarray | str]:
    """The pixels that DALI's CPU decoder gives for each image, or what became of it."""
    questions, answers = folder / "questions", folder / "answers"
    answers.touch()
    pending, found = dict(images), {}
    while pending:
        questions.write_bytes(pickle.dumps((mode, pending)))
        command = [sys.executable, __file__, str(questions), str(answers)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=280)
        found |= _read(answers)
        pending = {name: data for name, data in images.items() if name not in found}
        if pending and process.returncode < 0:
            found[next(iter(pending))] = KILLED
            del pending[next(iter(pending))]
        elif pending:
            raise AssertionError(process.stderr[-2000:])
    return found


def _read(path: Path) -> dict[str, np.ndarray | str]:
    found = {}
    with path.open("rb") as file:
        while True:
            try:
                name, answer = pickle.load(file)
            except EOFError:
                return found
            found[name] = answer


def _answer(questions: Path, answers: Path) -> None:
    mode, images = pickle.loads(questions.read_bytes())
    with answers.open("ab", buffering=0) as file:
        for name, data in images.items():
            file.write(pickle.dumps((name, _decode(data, mode))))


def _decode(data: bytes, mode: str) -> np.ndarray | str:
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        kind = {"RGB": types.RGB, "L": types.GRAY}[mode]
        pipeline.set_outputs(fn.decoders.image(encoded, device="cpu", output_type=kind))
    pipeline.build()
    pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8)])
    try:
        (pixels,) = pipeline.run()
    except RuntimeError:
        return RAISED
    return np.array(pixels[0])


if __name__ == "__main__":
    _answer(*map(Path, sys.argv[1:]))
