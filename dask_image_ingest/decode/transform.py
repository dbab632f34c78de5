"""A user's transform, with random numbers that belong to the sample.

DALI draws an image's random numbers by the state of an operator and by the image's place in its
batch, and what is in a batch depends on the query: filters, bad images, partitions. So operators
get the state by which each place has the numbers of its sample: of a shard, and a number in it.
Samples that follow one another can share a batch, since the places in a batch do; a short gap is
filled with a neighbour whose picture is thrown away, a longer one begins another batch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.decode.dali import BATCH_SIZE, BatchPipeline, dali, new_pipeline
from dask_image_ingest.decode.gpu import raise_gpu_failure
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.random_state import (
    state_from,
    state_name,
    take_over_random_numbers,
)
from dask_image_ingest.decode.resources import decode_pool, decode_threads
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.user_functions import refuse_other_code

_INPUT = "images"

# Parts of a batch that are transformed side by side.
_MOST_SHARES = 8

# So many fillers cost less than another batch.
_LONGEST_GAP = 3

# What DALI says about an operator that fails, without its stack.
_REASON = re.compile(
    r"(?:operator `([^`]+)`.*?)?encountered:\s+(.+?)\s*(?:C\+\+ context|Current pipeline|$)",
    re.DOTALL,
)


class _Part(NamedTuple):
    """Rows that are transformed together, and the places of those that are no fillers."""

    rows: list[int]
    places: list[int]


class Transform:
    """The transform of some options in this process; any number of threads may use it at once.

    On the CPU, the images of a batch are shared out among several pipelines, which have as many
    threads together as decode: samples without neighbours are transformed one by one, slowly.
    """

    def __init__(self, decoding: DecodeSpec) -> None:
        assert decoding.transform is not None
        refuse_other_code("transform=", decoding.transform, decoding.transform_code)
        self._decoding = decoding
        self._shares = 1 if decoding.device == "gpu" else min(_MOST_SHARES, decode_threads())
        # Whoever uses one has taken it from here, and brings back only what is whole.
        self._idle: list[_TransformPipeline] = []
        self._building = threading.Lock()

    def run(self, images: Any, origins: Sequence[Origin]) -> Any:
        """Transform the images of a batch, a DALI tensor list or a list of DALI tensors.

        Raises
        ------
        FunctionError
            If the transform fails, for the first image for which it does.
        ArgumentError
            If it gives anything but uint8 images of layout HWC, or mixes images.
        """
        pipeline = self._take(origins[0])
        share = -(-len(origins) // self._shares)
        parts = _runs(origins, share) if pipeline.is_random else _slices(len(origins), share)
        self._idle.append(pipeline)
        if len(parts) == 1 and parts[0].rows == parts[0].places:
            return self._transformed(images, origins)
        made = self._each(parts, list(images), origins)
        return [
            pictures[place]
            for part, pictures in zip(parts, made, strict=True)
            for place in part.places
        ]

    def _each(self, parts: list[_Part], images: list[Any], origins: Sequence[Origin]) -> list[Any]:
        given = [
            ([images[row] for row in part.rows], [origins[row] for row in part.rows])
            for part in parts
        ]
        if self._shares == 1:
            return [self._transformed(*each) for each in given]
        begun = [decode_pool().submit(self._transformed, *each) for each in given]
        return [future.result() for future in begun]

    def _transformed(self, images: Any, origins: Sequence[Origin]) -> Any:
        pipeline = self._take(origins[0])
        try:
            made = pipeline.run(images, origins[0])
        except RuntimeError as error:
            raise_gpu_failure(error, self._decoding)
            if len(origins) == 1:
                raise _failed(origins[0], error) from error
            made = None
        self._idle.append(pipeline)
        if made is not None:
            if self._decoding.mode == "labels":
                _check_labels(images, made, origins)
            return made
        # For one of them, which is found like this; it may be one that only fills a gap.
        one_by_one = zip(list(images), origins, strict=True)
        return [self._transformed([image], [origin])[0] for image, origin in one_by_one]

    def _take(self, first: Origin) -> _TransformPipeline:
        try:
            return self._idle.pop()
        except IndexError:
            pipeline = _TransformPipeline(self._decoding, -(-decode_threads() // self._shares))
        # A user's function need not be ready for several threads.
        with self._building:
            try:
                pipeline.build()
            except (ArgumentError, FunctionError):
                raise
            except Exception as error:
                raise _failed(first, error) from error
        return pipeline


class _TransformPipeline:
    """One pipeline of a transform, for one thread at a time."""

    def __init__(self, decoding: DecodeSpec, threads: int) -> None:
        self._decoding = decoding
        self._threads = threads
        self._pipeline = BatchPipeline(self._build)
        self._seeds: list[str] = []

    @property
    def is_random(self) -> bool:
        """True if the transform has random operators; known once it is built."""
        return bool(self._seeds)

    def build(self) -> None:
        """Call the user's function, unless that was done."""
        self._pipeline.build()

    def run(self, images: Any, first: Origin) -> Any:
        """Transform images that come one after the other from ``first`` on."""
        self._pipeline.build()
        states = {
            state_name(number): np.tile(state_from(first, seed), (len(images), 1))
            for number, seed in enumerate(self._seeds)
        }
        self._pipeline.schedule(**{_INPUT: images}, **states)
        made = self._pipeline.collect()
        _check_output(made)
        return made

    def _build(self) -> Any:
        fn, types, _ = dali()
        device = self._decoding.device
        pipeline = new_pipeline(device, self._threads)
        assert self._decoding.transform is not None
        with pipeline:
            images = fn.external_source(
                name=_INPUT, no_copy=True, dtype=types.UINT8, layout="HWC", device=device
            )
            made = self._decoding.transform(images)
            if not isinstance(made, type(images)):
                raise ArgumentError(
                    f"transform= gave a {type(made).__name__}: it has to give one batch of images, "
                    "as DALI's operators do"
                )
            self._seeds = take_over_random_numbers(made, fn, types)
            pipeline.set_outputs(made)
        pipeline.build()
        return pipeline


def _runs(origins: Sequence[Origin], most: int) -> list[_Part]:
    """Samples that follow one another, with fillers in short gaps; ``most`` to a part at most."""
    parts: list[_Part] = []
    for row, origin in enumerate(origins):
        gap = -1
        if row and origin.shard == origins[row - 1].shard:
            gap = origin.number - origins[row - 1].number - 1
        fits = parts and len(parts[-1].rows) + gap < min(most, BATCH_SIZE)
        if not fits or not 0 <= gap <= _LONGEST_GAP:
            parts.append(_Part([], []))
            gap = 0
        rows, wanted = parts[-1]
        rows.extend([row - 1] * gap)
        wanted.append(len(rows))
        rows.append(row)
    return parts


def _slices(count: int, most: int) -> list[_Part]:
    return [
        _Part(list(range(start, min(start + most, count))), list(range(min(most, count - start))))
        for start in range(0, count, most)
    ]


def _failed(origin: Origin, error: Exception) -> FunctionError:
    reason = _REASON.search(str(error))
    if reason is None:
        said = f"{type(error).__name__}: {error}"
    else:
        said = f"{reason[1]}: {reason[2]}" if reason[1] else reason[2]
    where = f"{origin.shard}: " if origin.shard else ""
    return FunctionError(f"{where}transform= fails for {origin.name}: {said}")


# Fill values of operators: background, and the label that losses ignore.
_FILLED = {0, 255}


def _check_labels(given: Any, made: Any, origins: Sequence[Origin]) -> None:
    """Refuse labels that an image did not have, as a mean of two classes is.

    Raises
    ------
    FunctionError
    """
    for before, after, origin in zip(given, made, origins, strict=True):
        new = _labels(after) - _labels(before) - _FILLED
        if new:
            raise FunctionError(
                f"{origin.shard}: transform= gave {origin.name} the label {min(new)}, which it did "
                "not have: have operators that resize, turn or warp labels take the nearest pixel, "
                "interp_type=types.INTERP_NN, and fill with 0 or 255. Rename classes in "
                "map_batches()"
            )


def _labels(image: Any) -> set[int]:
    pixels = np.asarray(image.as_cpu() if hasattr(image, "as_cpu") else image)
    # In half of the time that NumPy takes.
    counts = Image.fromarray(pixels.reshape(1, -1)).histogram()
    return {label for label, count in enumerate(counts) if count}


def _check_output(images: Any) -> None:
    """Refuse what a transform must not give: anything but uint8 images, rows of pixels first.

    Raises
    ------
    ArgumentError
    """
    _, types, _ = dali()
    if images.dtype != types.UINT8 or images.ndim() != 3 or images.layout() not in ("HWC", ""):
        raise ArgumentError(
            f"transform= gave {images.ndim()}-dimensional {images.dtype} images of layout "
            f"{images.layout()!r}; the image column holds uint8 images of layout 'HWC': cast and "
            "transpose them in map_batches() instead"
        )
