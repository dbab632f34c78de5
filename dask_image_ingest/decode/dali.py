"""DALI pipelines: built once for each process and options, fed with bytes, read batch by batch."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from dask_image_ingest.decode.gpu import ROOM_FOR_DALI, current_device, is_gpu_failure
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.threads import decode_threads
from dask_image_ingest.errors import ArgumentError, MissingDependencyError

#: Images in a batch at most: each batch costs 1.3 ms more than its images, on two threads.
BATCH_SIZE = 256

Source = Literal["encoded", "suspect", "pixels"]

_INPUT = "images"

_CULPRIT = re.compile(r"Failed to decode sample #(\d+)")


class Refused(NamedTuple):
    """A batch that DALI could not decode, and the image that it blames, if it names one."""

    culprit: int | None


class Decoder:
    """A DALI pipeline that is kept between partitions and rebuilt after a failure.

    Parameters
    ----------
    decoding
        What the images should look like.
    source
        ``"encoded"``: files in memory; ``"suspect"``: files among which one has failed a batch;
        ``"pixels"``: (height, width, channels) arrays that another library has decoded, which get
        the same resize and transform.
    """

    def __init__(self, decoding: Decoding, source: Source) -> None:
        self._decoding = decoding
        self._source = source
        self._pipeline: Any = None
        self._seed = 0
        # A pipeline can't be fed from two threads; dask may run several tasks in one process.
        self._lock = threading.Lock()

    def run(self, batches: Iterable[list[np.ndarray]], seed: int = 0) -> Iterator[Any]:
        """Decode batches one after the other, each while the caller uses the one before.

        Parameters
        ----------
        batches
            Encoded images, or arrays; asked for one ahead.
        seed
            From which the random operators of a transform start, so that a task repeated gives the
            same.

        Yields
        ------
        DALI tensor list, or `Refused` for a batch in which DALI could not decode an image. Empty
        batches give an empty list.
        """
        with self._lock:
            if self._decoding.transform is not None:
                self._seed, self._pipeline = seed, None
            finished = False
            try:
                batches = iter(batches)
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
                finished = True
            finally:
                # Whatever is still in it must not come out for the next caller.
                if not finished:
                    self._pipeline = None

    def _schedule(self, batch: list[np.ndarray]) -> None:
        if self._pipeline is None:
            self._pipeline = self._build()
        self._pipeline.feed_input(_INPUT, batch)
        self._pipeline.schedule_run()

    def _collect(self) -> Any:
        try:
            (images,) = self._pipeline.share_outputs()
        except RuntimeError as error:
            # One image that DALI can't decode fails the batch, and the pipeline is dead after it.
            self._pipeline = None
            if self._decoding.device == "gpu" and is_gpu_failure(str(error)):
                error.add_note(ROOM_FOR_DALI)
                raise
            # Arrays are no bad images: it is the transform that has failed.
            if self._source == "pixels":
                raise
            named = _CULPRIT.search(str(error))
            return Refused(int(named[1]) if named else None)
        # The outputs stay valid: in the default execution model they own their buffers.
        self._pipeline.release_outputs()
        _check_output(images)
        return images

    def _build(self) -> Any:
        fn, types, pipeline_class = _dali()
        options = self._decoding
        gpu = options.device == "gpu"
        pipeline = pipeline_class(
            batch_size=BATCH_SIZE,
            num_threads=decode_threads(),
            device_id=current_device() if gpu else None,
            prefetch_queue_depth=1,
            seed=self._seed,
        )
        with pipeline:
            if self._source != "pixels":
                encoded = fn.external_source(
                    name=_INPUT, no_copy=True, dtype=types.UINT8, ndim=1, device="cpu"
                )
                images = fn.decoders.image(
                    encoded,
                    device="mixed" if gpu else "cpu",
                    output_type=types.RGB if options.mode == "RGB" else types.GRAY,
                    # Without it the GPU's chroma upsampling is not the CPU's.
                    **({"jpeg_fancy_upsampling": True} if gpu else {}),
                )
            else:
                images = fn.external_source(
                    name=_INPUT, dtype=types.UINT8, layout="HWC", device="cpu"
                )
                images = images.gpu() if gpu else images
            images = _resized(images, options, fn, types)
            if options.transform is not None:
                images = options.transform(images)
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline


def decoder(decoding: Decoding, source: Source) -> Decoder:
    """The decoder of this process for these options."""
    device = current_device() if decoding.device == "gpu" else None
    return _decoder(decoding, source, os.getpid(), device)


@functools.lru_cache(maxsize=9)
def _decoder(decoding: Decoding, source: Source, process: int, device: int | None) -> Decoder:
    # A fork of this process has none of the threads of its pipelines; another GPU has none of them.
    return Decoder(decoding, source)


def parses(data: Any) -> bool:
    """Whether DALI's parser takes an encoded image; a look at its headers, in 2 µs.

    Where it does not, a batch of 32 or more kills the process, one time in three: DALI 2.4 parses
    it on several threads, and does not wait for them when the part that it does itself fails
    (``ImageDecoder::RunImplImpl``), so they go on in memory that is gone. What fails only when it
    is decoded does no harm.
    """
    try:
        return _parser()(data).height > 0
    except RuntimeError:
        return False


def require_dali(gpu: bool) -> None:
    """Raise MissingDependencyError, which names the extra to install, where there is no DALI."""
    _dali(gpu)


def _check_output(images: Any) -> None:
    """Refuse what a transform must not give: anything but uint8 images, rows of pixels first.

    Raises
    ------
    ArgumentError
    """
    _, types, _ = _dali()
    if images.dtype != types.UINT8 or images.ndim() != 3 or images.layout() not in ("HWC", ""):
        raise ArgumentError(
            f"transform= gave {images.ndim()}-dimensional {images.dtype} images of layout "
            f"{images.layout()!r}; the image column holds uint8 images of layout 'HWC': cast and "
            "transpose them in map_batches() instead"
        )


def _resized(images, options: Decoding, fn, types):
    # Linear with antialiasing is the triangular filter where an image shrinks, as in Pillow.
    resize = functools.partial(fn.resize, images, interp_type=types.INTERP_LINEAR, antialias=True)
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
def _dali(gpu: bool = False):
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
