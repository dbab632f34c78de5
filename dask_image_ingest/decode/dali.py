"""Decoders of DALI: pipelines that are kept between partitions and fed batch by batch."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from dask_image_ingest.decode.gpu import (
    current_device,
    decoder_options,
    first_batch,
    raise_gpu_failure,
)
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.resources import decode_threads, keep_freed_memory
from dask_image_ingest.errors import MissingDependencyError


class BatchPipeline:
    """A pipeline that is built when it is first needed, and again after a failure that ends it.

    For one caller at a time, who collects what was scheduled. A caller who does not get that far,
    for an error or an interrupt, must not leave a batch to the next one: see `clear`.

    Parameters
    ----------
    build
        Makes the pipeline, of one output.
    survives
        Whether a pipeline can go on after this error. DALI calls it invalid after any; but its
        executor (``exec2.cc``) has popped the batch by then, and runs the next one as any other.
    """

    def __init__(
        self, build: Callable[[], Any], survives: Callable[[str], bool] = lambda error: False
    ) -> None:
        self._build = build
        self._survives = survives
        self._pipeline: Any = None
        self._busy = False
        _all.add(self)

    def build(self) -> None:
        """Build the pipeline, if it is not there."""
        if self._pipeline is None:
            self._pipeline = self._build()

    def schedule(self, **inputs: Any) -> None:
        """Begin a batch, given by the names of the pipeline's external sources."""
        # Before all else: an interrupt may come anywhere.
        self._busy = True
        self.build()
        # DALI reads this memory without a copy.
        self._pipeline.inputs_underway = inputs
        for name, batch in inputs.items():
            self._pipeline.feed_input(name, batch)
        self._pipeline.schedule_run()

    def collect(self) -> Any:
        """Wait for the batch, and give it as a tensor list.

        Raises
        ------
        RuntimeError
            Where an operator fails. Unless the pipeline survives, the next batch gets another.
        """
        try:
            (images,) = self._pipeline.share_outputs()
        except RuntimeError as error:
            if self._survives(str(error)):
                self._pipeline.inputs_underway = None
            else:
                self._pipeline = None
            self._busy = False
            raise
        # The outputs stay valid: in the default execution model they own their buffers.
        self._pipeline.release_outputs()
        self._pipeline.inputs_underway = None
        self._busy = False
        return images

    def clear(self) -> None:
        """Drop the pipeline if it holds a batch that was not collected."""
        if self._busy:
            self._busy, self._pipeline = False, None

    def abandon(self) -> None:
        """Let go of a pipeline that another process has: nothing can be ended that does not run."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # Never freed, since that would wait for threads that are not there.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
            pipeline._pipe = None


_all: weakref.WeakSet[BatchPipeline] = weakref.WeakSet()


def _forked() -> None:
    for pipeline in list(_all):
        pipeline.abandon()


os.register_at_fork(after_in_child=_forked)


#: Images in a batch at most: each batch costs 1.3 ms more than its images, on two threads.
BATCH_SIZE = 256

Input = Literal["encoded", "suspect", "pixels"]

_INPUT = "images"

_FAILED_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")


class Refused(NamedTuple):
    """A batch that DALI could not decode, and the image that it blames, if it names one."""

    failed_index: int | None


class DaliDecoder:
    """A DALI pipeline that is kept between partitions, for one caller at a time.

    Parameters
    ----------
    decoding
        What the images should look like, before a transform.
    source
        ``"encoded"``: files in memory; ``"suspect"``: files among which one has failed a batch;
        ``"pixels"``: (height, width, channels) arrays that another library has decoded, which go to
        a GPU and get the same resize.
    """

    def __init__(self, decoding: DecodeSpec, source: Input) -> None:
        self._decoding = decoding
        self._source = source
        # One on a GPU has states of the decoder for each thread, and its first batch behind it.
        self._batches = BatchPipeline(lambda: self._build(), self._is_bad_image)

    def run(self, batches: Iterable[list[np.ndarray]]) -> Iterator[Any]:
        """Decode batches one after the other, each while the caller uses the one before.

        Whoever does not exhaust the iterator has to `clear` the decoder. It holds nothing that
        another caller needs, since a traceback may keep it for ever.

        Parameters
        ----------
        batches
            Encoded images, or arrays; taken one ahead.

        Yields
        ------
        DALI tensor list, or `Refused` for a batch in which DALI could not decode an image. Empty
        batches give an empty list.
        """
        batches = map(self._as_input, batches)
        batch = next(batches, None)
        if batch:
            self._schedule(batch)
        while batch is not None:
            # While DALI is busy with the one before: it may take long to come by.
            following = next(batches, None)
            images = self._collect() if batch else []
            if following:
                self._schedule(following)
            yield images
            batch = following

    def clear(self) -> None:
        """Drop batches of an earlier caller."""
        self._batches.clear()

    def _as_input(self, batch: list[np.ndarray]) -> Any:
        # Made while the batch before is decoded; of arrays, DALI would make it when it is fed.
        if not batch or self._source == "pixels":
            return batch
        return tensor_list(batch)

    def _schedule(self, batch: Any) -> None:
        self._batches.schedule(**{_INPUT: batch})

    def _collect(self) -> Any:
        try:
            return self._batches.collect()
        except RuntimeError as error:
            # One image that DALI can't decode fails the batch.
            raise_gpu_failure(error, self._decoding)
            # Arrays are no bad images: it is the resize that has failed.
            if self._source == "pixels":
                raise
            named = _FAILED_SAMPLE.search(str(error))
            return Refused(int(named[1]) if named else None)

    def _is_bad_image(self, error: str) -> bool:
        """True if DALI names the image it could not decode, which leaves no other one pending."""
        return bool(_FAILED_SAMPLE.search(error)) and self._source != "pixels"

    def _build(self) -> Any:
        fn, types, _ = dali()
        options = self._decoding
        gpu = options.device == "gpu"
        pipeline = new_pipeline(options.device, decode_threads())
        with pipeline:
            if self._source != "pixels":
                encoded = fn.external_source(
                    name=_INPUT, no_copy=True, dtype=types.UINT8, ndim=1, device="cpu"
                )
                images = fn.decoders.image(
                    encoded,
                    device="mixed" if gpu else "cpu",
                    output_type=types.RGB if options.mode == "RGB" else types.GRAY,
                    **(decoder_options(options) if gpu else {}),
                )
            else:
                images = fn.external_source(
                    name=_INPUT, dtype=types.UINT8, layout="HWC", device="cpu"
                )
                images = images.gpu() if gpu else images
            pipeline.set_outputs(resized(images, options) if gpu else images)
        pipeline.build()
        if gpu and self._source != "pixels":
            self._prime(pipeline)
        return pipeline

    def _prime(self, pipeline: Any) -> None:
        """Decode a full batch of tiny JPEGs before any image."""
        pipeline.feed_input(_INPUT, first_batch(self._decoding, BATCH_SIZE))
        pipeline.schedule_run()
        try:
            pipeline.share_outputs()
        except RuntimeError as error:
            raise_gpu_failure(error, self._decoding)
            raise
        pipeline.release_outputs()


def new_pipeline(device: str, threads: int) -> Any:
    """An empty pipeline with this package's settings."""
    _, _, pipeline_class = dali()
    keep_freed_memory()
    return pipeline_class(
        batch_size=BATCH_SIZE,
        num_threads=threads,
        device_id=current_device() if device == "gpu" else None,
        prefetch_queue_depth=1,
    )


def tensor_list(arrays: list[np.ndarray]) -> Any:
    """Arrays as a DALI tensor list, without a copy."""
    tensor, tensors = _tensors()
    return tensors([tensor(array) for array in arrays], contiguous=False)


def parses(data: Any) -> bool:
    """True if DALI's parser accepts an encoded image; it reads the headers, in 2 µs.

    Where it does not, a batch of 32 or more kills the process, one time in three: DALI 2.4 parses
    it on several threads, and does not wait for them when the part that it does itself fails
    (``ImageDecoder::RunImplImpl``), so they go on in freed memory. What fails only when it
    is decoded does no harm.
    """
    try:
        return _parser()(data).height > 0
    except RuntimeError:
        return False


def resized(images: Any, options: DecodeSpec) -> Any:
    """DALI's operators for a size, for a GPU; on a CPU `ResizedImage` is ten times as fast."""
    fn, types, _ = dali()
    # Linear with antialiasing is the triangular filter where an image shrinks, as in Pillow.
    resize = functools.partial(
        fn.resize,
        images,
        interp_type=types.INTERP_NN if options.nearest else types.INTERP_LINEAR,
        antialias=not options.nearest,
        # The whole image is what becomes the rounded size, as on a CPU; else a pixel is shifted.
        subpixel_scale=False,
    )
    if options.size is None:
        return images
    if options.resize == "shorter":
        return resize(resize_shorter=options.size[0])
    if options.resize == "longer":
        return resize(resize_longer=options.size[0])
    if options.resize == "stretch":
        return resize(size=options.size)
    mode = "not_smaller" if options.resize == "crop" else "not_larger"
    return fn.crop(
        resize(size=options.size, mode=mode),
        crop=options.size,
        out_of_bounds_policy="pad",
    )


@functools.cache
def _parser() -> Any:
    from nvidia.nvimgcodec import CodeStream  # DALI depends on it, and decodes with it

    return CodeStream


@functools.cache
def _tensors() -> Any:
    from nvidia.dali.tensors import TensorCPU, TensorListCPU

    return TensorCPU, TensorListCPU


@functools.cache
def dali(gpu: bool = False) -> Any:
    """DALI: its functions, its types, and its class of pipelines.

    Raises
    ------
    MissingDependencyError
    """
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        extra = "cuda12" if gpu else "cpu"
        raise MissingDependencyError(
            "decoding images needs NVIDIA DALI, which is not installed: "
            f"pip install 'dask-image-ingest[{extra}]' ('cpu' has no GPU, 'cuda12' and 'cuda13' do)"
        ) from error
    return fn, types, Pipeline
