"""A user's transform, with random numbers that depend on the sample alone.

In DALI, the random numbers of an image depend on the operator's state and on the image's position
in its batch. The content of a batch depends on the query: filters, bad images, partitions. To make
the numbers depend on the sample instead, operators get a state that is computed from the shard and
the number of the batch's first sample. The next positions then have the numbers of the next samples
of the shard, so a batch must hold consecutive samples.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from dask_image_ingest.decode.buffers import Origin, host_images
from dask_image_ingest.decode.dali import (
    BATCH_SIZE,
    BatchPipeline,
    dali,
    decode_pool,
    decode_threads,
    new_pipeline,
    raise_gpu_failure,
)
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.errors import ArgumentError, FunctionError, MissingDependencyError
from dask_image_ingest.typedefs import ImageBatch, TensorList
from dask_image_ingest.url_secrets import error_text, url_identity
from dask_image_ingest.user_functions import refuse_other_code

# Distance in DALI's counter between neighbours in a batch (`kSkipaheadPerSample`).
_STRIDE = 65537

# Operators that mix the images of a batch, whose content depends on the query.
_MIXING = frozenset(("BatchPermutation", "PermuteBatch"))

# In DALI's error for ``if``, which needs that option. Which images of a batch get into a branch
# depends on the query.
_CONDITIONALS = "enable_conditionals"


def add_state_inputs(output: Any, fn: ModuleType, types: ModuleType) -> list[str]:
    """Give each random operator of a graph an external source for its state (`state_name`).

    It uses the argument by which DALI's dynamic mode passes its generators to operators.

    Returns
    -------
    list of str
        Seed of each random operator, for `first_state`.
    """
    operators: dict[int, Any] = {}
    stack = [output.source]
    while stack:
        operator = stack.pop()
        if operator is not None and operator.id not in operators:
            operators[operator.id] = operator
            stack.extend(node.source for node in operator.inputs)
    seeds: list[str] = []
    unseeded = itertools.count()
    for _, operator in sorted(operators.items()):
        schema = operator._op.schema
        if schema.Name() in _MIXING:
            raise ArgumentError(
                f"transform= mixes the images of a batch ({schema.Name()}), and which images share "
                "a batch depends on the query: mix those of iter_batches() instead"
            )
        if not schema.HasRandomStateArg():
            continue
        state = fn.external_source(name=state_name(len(seeds)), dtype=types.UINT32, ndim=1)
        operator.spec.AddArgumentInput(
            "_random_state", state.name, state.ndim, state.dtype, state.layout
        )
        operator.inputs.append(state)
        # As in DALI, operators with the same explicit seed draw the same numbers. Unseeded ones are
        # numbered on their own, so that a seeded operator does not change what they draw.
        seed = operator._op._init_args.get("seed")
        is_unseeded = seed is None or seed < 0
        seeds.append(f"operator {next(unseeded)}" if is_unseeded else f"seed {seed}")
    return seeds


def state_name(number: int) -> str:
    """Name of the external source with the state of a random operator."""
    return f"random-state-{number}"


def first_state(origin: Origin, seed: str) -> np.ndarray:
    """State of an operator for a batch of consecutive samples, the first of which is ``origin``.

    uint32 array of a Philox generator's key, counter and phase. DALI adds an image's position in
    the batch, times `_STRIDE`, to the upper half of the counter.
    """
    shard = url_identity(origin.shard).encode("utf-8", "surrogateescape")
    draw = origin.draw.to_bytes(8, "little")
    key = hashlib.blake2b(shard, digest_size=8, salt=_digest(seed), person=draw).digest()
    stream = origin.number * _STRIDE % 2**64
    return np.frombuffer(struct.pack("<8sQQI", key, 0, stream, 0), np.uint32)


def _digest(seed: str) -> bytes:
    return hashlib.blake2b(seed.encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()


_INPUT = "images"

# Most parts of a batch that are transformed in parallel.
_MAX_PARALLEL = 8

# The operator and message in an error of DALI, without the stack.
_REASON = re.compile(
    r"(?:operator `([^`]+)`.*?)?encountered:\s+(.+?)\s*(?:C\+\+ context|Current pipeline|$)",
    re.DOTALL,
)


class Transform:
    """The transform of one set of options in this process. Thread-safe.

    On a CPU, a batch is split among several pipelines, which have `decode_threads` threads in all.
    """

    def __init__(self, decoding: DecodeSpec) -> None:
        assert decoding.transform is not None
        refuse_other_code("transform=", decoding.transform, decoding.transform_code)
        self._decoding = decoding
        self._parallel = 1 if decoding.device == "gpu" else min(_MAX_PARALLEL, decode_threads())
        # A thread pops the pipeline that it uses, and appends it again when its batch is done.
        self._idle: list[_TransformPipeline] = []
        # The user's function need not be thread-safe.
        self._build_lock = threading.Lock()

    def run(self, images: ImageBatch, origins: Sequence[Origin]) -> ImageBatch:
        """Transform the images of a batch: a DALI tensor list, or a list of images.

        Raises
        ------
        FunctionError
            If the transform fails, with the first image for which it does.
        ArgumentError
            If its output is not uint8 images of layout HWC, or it mixes images.
        """
        pipeline = self._take_pipeline(origins[0])
        length = -(-len(origins) // self._parallel)
        parts = _runs(origins, length) if pipeline.is_random else _slices(len(origins), length)
        self._idle.append(pipeline)
        if parts == [list(range(len(origins)))]:
            return self._transform(images, origins)
        images = list(images)

        def run(part: list[int]) -> Any:
            return self._transform([images[row] for row in part], [origins[row] for row in part])

        runs = map(run, parts) if self._parallel == 1 else decode_pool().map(run, parts)
        transformed: list[Any] = [None] * len(origins)
        for part, outputs in zip(parts, runs, strict=True):
            for row, output in zip(part, outputs, strict=True):
                transformed[row] = output
        return transformed

    def _transform(self, images: ImageBatch, origins: Sequence[Origin]) -> ImageBatch:
        pipeline = self._take_pipeline(origins[0])
        try:
            output = pipeline.run(images, origins[0])
        except RuntimeError as error:
            raise_gpu_failure(error, self._decoding)
            if len(origins) == 1:
                raise _function_error(origins[0], error) from error
            output = None
        self._idle.append(pipeline)
        if output is not None:
            if self._decoding.mode == "labels":
                _check_labels(images, output, origins)
            return output
        # Find the image that fails.
        one_by_one = zip(list(images), origins, strict=True)
        return [self._transform([image], [origin])[0] for image, origin in one_by_one]

    def _take_pipeline(self, first: Origin) -> _TransformPipeline:
        try:
            return self._idle.pop()
        except IndexError:
            pipeline = _TransformPipeline(self._decoding, -(-decode_threads() // self._parallel))
        with self._build_lock:
            try:
                pipeline.build()
            except (ArgumentError, FunctionError, MissingDependencyError):
                raise
            except Exception as error:
                raise _function_error(first, error) from error
        return pipeline


class _TransformPipeline:
    """One pipeline of a transform. Not thread-safe."""

    def __init__(self, decoding: DecodeSpec, threads: int) -> None:
        self._decoding = decoding
        self._threads = threads
        self._pipeline = BatchPipeline(self._build)
        # Of each random operator, set when the pipeline is built.
        self._seeds: list[str] = []

    @property
    def is_random(self) -> bool:
        """True if the transform has random operators; valid after `build`."""
        return bool(self._seeds)

    def build(self) -> None:
        """Build the pipeline with the user's function, unless it exists."""
        self._pipeline.build()

    def run(self, images: ImageBatch, first: Origin) -> Any:
        """Transform a batch of consecutive samples, of which ``first`` is the first."""
        self._pipeline.build()
        inputs: dict[str, Any] = {_INPUT: images}
        for operator, seed in enumerate(self._seeds):
            inputs[state_name(operator)] = np.tile(first_state(first, seed), (len(images), 1))
        (output,) = self._pipeline.run(**inputs)
        _check_output(output)
        return output

    def _build(self) -> Any:
        fn, types, _ = dali()
        device, transform = self._decoding.device, self._decoding.transform
        assert transform is not None
        pipeline = new_pipeline(device, self._threads)
        with pipeline:
            images = fn.external_source(
                name=_INPUT, no_copy=True, dtype=types.UINT8, layout="HWC", device=device
            )
            try:
                output = transform(images)
            except TypeError as error:
                if _CONDITIONALS not in str(error):
                    raise
                raise ArgumentError(
                    "transform= uses `if` on values of DALI, as its automatic augmentations do: "
                    "augment=['rand_augment'] or ['auto_augment'] makes these, and arithmetic "
                    "chooses between values, as in `mask * one + (mask ^ True) * other`"
                ) from error
            if not isinstance(output, type(images)):
                raise ArgumentError(
                    f"transform= gave a {type(output).__name__}: it has to give one batch of "
                    "images, as DALI's operators do"
                )
            self._seeds = add_state_inputs(output, fn, types)
            pipeline.set_outputs(output)
        pipeline.build()
        return pipeline


def _runs(origins: Sequence[Origin], length: int) -> list[list[int]]:
    """Rows in parts of at most ``length`` consecutive samples.

    Rows that a shuffle has mixed are sorted first: some are neighbours in their shard.
    """
    parts: list[list[int]] = []
    before: Origin | None = None
    for row in sorted(range(len(origins)), key=lambda row: _stream_of(origins[row])):
        origin = origins[row]
        follows = before is not None and _stream_of(origin) == (
            *_stream_of(before)[:2],
            before.number + 1,
        )
        if not follows or len(parts[-1]) >= min(length, BATCH_SIZE):
            parts.append([])
        parts[-1].append(row)
        before = origin
    return parts


def _stream_of(origin: Origin) -> tuple[str, int, int]:
    return origin.shard, origin.draw, origin.number


def _slices(count: int, length: int) -> list[list[int]]:
    return [list(range(start, min(start + length, count))) for start in range(0, count, length)]


def _function_error(origin: Origin, error: Exception) -> FunctionError:
    reason = error_text(error)
    if match := _REASON.search(reason):
        reason = f"{match[1]}: {match[2]}" if match[1] else match[2]
    where = f"{origin.shard}: " if origin.shard else ""
    return FunctionError(f"{where}transform= fails for {origin.name}: {reason}")


# Usual fill values of operators: background, and the label that losses ignore.
_FILL_LABELS = {0, 255}


def _check_labels(inputs: Iterable[Any], outputs: Iterable[Any], origins: Sequence[Origin]) -> None:
    """Refuse labels that the image did not have before, such as the mean of two classes.

    Raises
    ------
    FunctionError
    """
    for before, after, origin in zip(inputs, outputs, origins, strict=True):
        new = _labels(after) - _labels(before) - _FILL_LABELS
        if new:
            raise FunctionError(
                f"{origin.shard}: transform= gave {origin.name} the label {min(new)}, which it did "
                "not have: have operators that resize, turn or warp labels take the nearest pixel, "
                "interp_type=types.INTERP_NN, and fill with 0 or 255. Rename classes in "
                "map_batches()"
            )


def _labels(image: Any) -> set[int]:
    pixels = np.asarray(host_images(image))
    # Twice as fast as np.unique.
    counts = Image.fromarray(pixels.reshape(1, -1)).histogram()
    return {label for label, count in enumerate(counts) if count}


def _check_output(images: TensorList) -> None:
    """Refuse a transform's output unless it is uint8 images of layout HWC.

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
