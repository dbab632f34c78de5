"""DALI's pipelines as far as a decoder on a GPU drives them, which decode nothing."""

from types import SimpleNamespace

import numpy as np

from dask_image_ingest.decode import dali, planner
from dask_image_ingest.decode import dali as module


class Pipeline:
    """A pipeline that gives back the files that it was fed, as `Batch`."""

    made = []  # noqa: RUF012 - emptied by play()

    def __init__(self, **options):
        self.options, self.fed, self._outputs, self._held = options, [], [], 0
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def set_outputs(self, images):
        self.graph = images

    def build(self):
        pass

    def feed_input(self, name, batch):
        if name == "images":
            self.fed.append([np.asarray(image).tobytes() for image in batch])

    def schedule_run(self):
        assert self._held == 0, "what was shared is not released"
        self._outputs.append(self.fed[-1])

    def share_outputs(self):
        batch = self._outputs.pop(0)
        for number, content in enumerate(batch):
            if content in REFUSED:
                raise RuntimeError(REFUSED[content].format(number=number))
        self._held += 1
        return (Batch(batch),)

    def release_outputs(self):
        self._held -= 1


class Input:
    """An external source, of which parts can be taken."""

    def __getitem__(self, part):
        return self

    def gpu(self):
        return "on the GPU"


class Batch(list):
    """Decoded images: here the files themselves."""


#: What is said of files that can't be decoded.
REFUSED: dict[bytes, str] = {}


def play(monkeypatch, room=2**30):
    """Have decoders use such pipelines, on a GPU with room for so many bytes in a batch."""
    operators = SimpleNamespace(
        external_source=lambda **options: Input(),
        cast=lambda values, **options: values,
        decoders=SimpleNamespace(image=lambda files, **options: ("images", options)),
        resize=lambda images, **options: ("resized", images, options),
        slice=lambda images, **options: ("cropped", images, options),
    )
    names = ("UINT8", "INT32", "FLOAT", "RGB", "GRAY", "INTERP_NN", "INTERP_LINEAR")
    types = SimpleNamespace(**{name: name for name in names}, INTERP_CUBIC=3, INTERP_LANCZOS3=4)
    monkeypatch.setattr(Pipeline, "made", [])
    monkeypatch.setattr(module, "dali", lambda: (operators, types, Pipeline))
    for name in (module, dali, planner):
        monkeypatch.setattr(name, "current_device", lambda: 0)
    for name in (dali, planner):
        monkeypatch.setattr(name, "batch_bytes", lambda device: room)
    return Pipeline.made
