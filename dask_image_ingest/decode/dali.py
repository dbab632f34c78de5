"""DALI decoders: pipelines that are kept between partitions and fed batch by batch.

Threads and malloc settings are those of the process, for all pipelines. Settings for a GPU follow
the sources of DALI 2.4 and nvImageCodec 0.9, and have not run on one yet: see
``docs/design/gpu.md``.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, PriorityQueue
from typing import Any, Literal, NamedTuple, TypeAlias

import dask
import numpy as np
from dask.system import CPU_COUNT
from PIL import Image

from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.region import Region
from dask_image_ingest.errors import MissingDependencyError, warn_user

# Limit of a batch's decoded bytes: larger than on a CPU, to keep a GPU busy.
_MAX_BYTES = 2**30

# Limit of a batch as a share of the GPU's memory. DALI holds the pixels of two batches for each
# partition that is decoded, of which there are two at a time, and of one more before its resize;
# start_cluster leaves it 3/10 of the memory, for these and for its context and decoder tables.
_MAX_SHARE = 1 / 48

# Edge of the images in `first_batch`: whole blocks of 4:2:0, large enough for hardware decoders.
_EDGE = 64

# Codes of nvimgcodecStatus_t: 5 and 15 are allocator errors, 21 is a CUDA error.
_FAILURE = re.compile(
    r"CUDA (?:allocation failed|runtime API error|driver API error)|bad_alloc|[Oo]ut of memory"
    r"|[Cc]an't allocate|ALLOCATOR_FAILURE|nvImageCodec failure: '#(?:5|15|21)'"
)
_BAD_IMAGE = "Failed to decode sample #"

_NOTE = (
    "If the GPU is out of memory: DALI allocates its own, outside the pool of the frames. "
    "start_cluster(device_memory_limit=0.5) leaves it more; size= or smaller images need less"
)


def current_device() -> int:
    """CUDA device number of the GPU that this process uses."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def batch_bytes(device: int) -> int:
    """Limit of a batch's decoded bytes, so that it fits beside the memory pool of the frames."""
    import cupy

    with cupy.cuda.Device(device):
        _, total = cupy.cuda.runtime.memGetInfo()
    return min(_MAX_BYTES, int(total * _MAX_SHARE))


def decoder_options(decoding: DecodeSpec) -> dict[str, Any]:
    """Options of DALI's decoder for a GPU."""
    # Otherwise chroma upsampling differs from the CPU's.
    options: dict[str, Any] = {"jpeg_fancy_upsampling": True}
    load = decoding.hw_load
    return options if load is None else options | {"hw_decoder_load": load}


def first_batch(decoding: DecodeSpec, size: int) -> list[np.ndarray]:
    """Tiny JPEGs to prime a new pipeline: ``size``, or as many as fit after their resize.

    The first batch of a decoder fixes how many images of every later batch go to the hardware JPEG
    engines: a share of that first batch (``assigned_batch_size_`` in nvImageCodec's
    ``image_generic_codec.h``). After a first batch of 64 they would be idle for most of each 256;
    after one of 256, they get batches of up to 166 images whole.
    """
    nbytes = decoding.nbytes(Header("jpeg", _EDGE, _EDGE, decoding.channels, None, False))
    fit = batch_bytes(current_device()) // nbytes
    return [_tiny_jpeg()] * min(size, max(1, fit))


@functools.cache
def _tiny_jpeg() -> np.ndarray:
    file = io.BytesIO()
    Image.new("RGB", (_EDGE, _EDGE)).save(file, "JPEG", subsampling="4:2:0")
    return np.frombuffer(file.getvalue(), np.uint8)


def raise_gpu_failure(error: RuntimeError, decoding: DecodeSpec) -> None:
    """Re-raise an error of DALI, with a note, if the GPU failed rather than an image."""
    if decoding.device == "gpu" and is_gpu_failure(str(error)):
        error.add_note(_NOTE)
        raise error


def is_gpu_failure(error: str) -> bool:
    """True if this is the text of an error of the GPU, for which Pillow must not be a fallback."""
    return bool(_FAILURE.search(error)) and _BAD_IMAGE not in error


def decode_threads() -> int:
    """Number of threads for a DALI pipeline in this process.

    The configuration value ``image-ingest.decode-threads`` if set, as ``start_cluster`` does;
    otherwise the worker's number of threads; outside a worker the cores that this process may use.
    """
    configured = dask.config.get("image-ingest.decode-threads", None)
    if configured:
        return int(configured)
    try:
        from distributed import get_worker

        return int(get_worker().state.nthreads)
    except (ImportError, ValueError):
        return CPU_COUNT


def decode_pool() -> ThreadPoolExecutor:
    """Pool of `decode_threads` threads for work outside DALI: Pillow, reduced JPEGs, copies."""
    return _pool(decode_threads(), os.getpid())


@functools.lru_cache(maxsize=1)
def _pool(count: int, process: int) -> ThreadPoolExecutor:
    # Keyed by process, since a fork lacks the threads.
    return ThreadPoolExecutor(count, thread_name_prefix="decode")


# What Dask sets for its workers. It makes glibc map each block above 128 kB anew: 155 page faults
# per image in DALI, 640 with a resize, a third of the time.
_DASKS_TRIM_THRESHOLD = "65536"

# Parameters of mallopt(3), and their values in bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIMMED, _MAPPED = 64 << 20, 16 << 20


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for the next image, unless the user has configured malloc."""
    of_dask = os.environ.get("MALLOC_TRIM_THRESHOLD_") == _DASKS_TRIM_THRESHOLD
    if not of_dask or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED)


class BatchPipeline:
    """DALI pipeline that is built on first use, and rebuilt after a fatal error. Not thread-safe.

    Parameters
    ----------
    build
        Builds the pipeline.
    survives
        Whether the pipeline is usable after an error with this text. DALI documents that it never
        is, but its executor (``exec2.cc``) has popped the batch by then and runs the next normally.
    """

    def __init__(
        self, build: Callable[[], Any], survives: Callable[[str], bool] = lambda error: False
    ) -> None:
        self._build = build
        self._survives = survives
        self._pipeline: Any = None
        _all.add(self)

    def build(self) -> None:
        """Build the pipeline unless it exists."""
        if self._pipeline is None:
            self._pipeline = self._build()

    def drop(self) -> None:
        """Have the next batch get a new pipeline."""
        self._pipeline = None

    def run(self, **inputs: Any) -> Any:
        """Run a batch; ``inputs`` by the names of the pipeline's external sources.

        Returns
        -------
        tuple of tensor lists
            Each output.

        Raises
        ------
        RuntimeError
            If an operator fails. Unless the pipeline survives, the next batch gets a new one.
        """
        self.build()
        try:
            # DALI reads this memory without a copy; ``inputs`` keeps it until there are outputs.
            for name, batch in inputs.items():
                self._pipeline.feed_input(name, batch)
            self._pipeline.schedule_run()
            outputs = self._pipeline.share_outputs()
            # They stay valid: in DALI's default execution model they own their buffers.
            self._pipeline.release_outputs()
        except BaseException as error:
            # Otherwise, after an interrupt, the next batch would get the outputs of this one.
            if not (isinstance(error, RuntimeError) and self._survives(str(error))):
                self.drop()
            raise
        return outputs

    def abandon(self) -> None:
        """Leak the pipeline of the parent process after a fork."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # Its destructor would wait for threads that do not exist in this process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
            pipeline._pipe = None


_all: weakref.WeakSet[BatchPipeline] = weakref.WeakSet()


def _abandon_all() -> None:
    for pipeline in list(_all):
        pipeline.abandon()


os.register_at_fork(after_in_child=_abandon_all)


#: Most images in a batch. The overhead of a batch is 1.3 ms on two threads.
BATCH_SIZE = 256

Input = Literal["encoded", "pixels"]

_INPUT, _REGIONS, _PICTURES = "images", "regions", "pictures"

#: Encoded image or array to decode: all of it, or a region.
Item: TypeAlias = "np.ndarray | tuple[np.ndarray, Region]"

_FAILED_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")


class Refused(NamedTuple):
    """Result of a batch that DALI could not decode.

    ``failed_index`` is the image that DALI named in its error, None if it named none.
    """

    failed_index: int | None


class DaliDecoder:
    """Decoder with a DALI pipeline that is kept between partitions. Thread-safe.

    DALI runs in a thread of its own, one batch after the other. So the threads that decode
    partitions prepare and copy batches while DALI has one, and none waits for another's bytes.
    The partition that came first goes first: if they took turns, they would all be scanned at one
    time, and DALI would have nothing to do.

    Parameters
    ----------
    decoding
        Decode options; the transform is not applied here.
    source
        Input of the pipeline. ``"encoded"``: image files. ``"pixels"``: (height, width, channels)
        arrays that another library has decoded, only to be moved to a GPU and resized there. If
        images have regions, an array has been cropped to its region already.
    """

    def __init__(self, decoding: DecodeSpec, source: Input) -> None:
        self._decoding = decoding
        self._source = source
        # Images of the batches to come, and of the first batch of the pipeline; for a GPU.
        self._expected, self._primed = 0, 0
        # Survive bad images: rebuilding is expensive, on a GPU above all.
        self._batch_pipeline = BatchPipeline(lambda: self._build(), self._is_bad_image)
        device = current_device() if decoding.device == "gpu" else None
        self._thread = ThreadPoolExecutor(1, "dali", _use_device, (device,))
        # Number of the call of `run`, number of the batch, its inputs, and its result.
        self._waiting: PriorityQueue[tuple[int, int, dict[str, Any], Future[Any]]] = PriorityQueue()
        self._numbers = itertools.count()

    def expect(self, images: int) -> None:
        """Announce batches of so many images, as which a pipeline for a GPU is primed.

        A pipeline that was primed with less than half of it is built anew.
        """
        self._expected = max(self._expected, images)

    def run(self, batches: Iterable[list[Item]]) -> Iterator[Any]:
        """Decode batches; the next one is decoded while the caller uses the last.

        Parameters
        ----------
        batches
            Encoded images, or arrays. Read one batch ahead.

        Yields
        ------
        DALI tensor list, or `Refused` for a batch in which DALI could not decode an image. Empty
        batches give an empty list.
        """
        inputs = map(self._as_input, batches)
        turn = next(self._numbers)
        decoded = self._start(turn, next(inputs, None))
        while decoded is not None:
            # Read ahead while DALI decodes: this may wait for bytes.
            following = self._start(turn, next(inputs, None))
            images = decoded.result()
            decoded = following
            yield images
            del images

    def _start(self, turn: int, inputs: dict[str, Any] | None) -> Future[Any] | None:
        if inputs is None:
            return None
        decoded: Future[Any] = Future()
        self._waiting.put((turn, next(self._numbers), inputs, decoded))
        self._thread.submit(self._decode_all)
        return decoded

    def _decode_all(self) -> None:
        """Decode the batches that wait, in DALI's thread: also those of callers that have gone."""
        while True:
            try:
                *_, inputs, decoded = self._waiting.get_nowait()
            except Empty:
                return
            try:
                decoded.set_result(self._decode(inputs))
            except BaseException as error:
                decoded.set_exception(error)
            del inputs, decoded  # the error's traceback has this frame

    @property
    def _repeats_pictures(self) -> bool:
        """True if pictures are decoded once for several parts: on a CPU, before they come here."""
        options = self._decoding
        return options.in_parts and options.device == "gpu" and self._source != "pixels"

    def _as_input(self, batch: list[Any]) -> dict[str, Any]:
        """Inputs of the pipeline; none for an empty batch."""
        if not batch:
            return {}
        regions: dict[str, Any] = {}
        if self._decoding.takes_regions:
            places = [place(region, self._decoding) for _, region in batch]
            regions = {_REGIONS: np.array(places, np.int32)}
            batch = [image for image, _ in batch]
        if self._repeats_pictures:
            batch, regions[_PICTURES] = _each_once(batch)
        # Convert now, while the batch before is decoded; DALI would do it when the batch is fed.
        return {_INPUT: batch if self._source == "pixels" else tensor_list(batch), **regions}

    def _decode(self, inputs: dict[str, Any]) -> Any:
        """Run DALI."""
        if not inputs:
            return []
        if self._expected > 2 * self._primed:
            self._batch_pipeline.drop()
        pictures = inputs.get(_PICTURES)
        try:
            # Taken out of the dict, so that nothing else holds the files once they are decoded.
            (images,) = self._batch_pipeline.run(**{name: inputs.pop(name) for name in [*inputs]})
            return images
        except RuntimeError as error:
            # One image that DALI can't decode fails the batch.
            raise_gpu_failure(error, self._decoding)
            # Decoded arrays can't be bad images: the resize failed.
            if self._source == "pixels":
                raise
            failed = _FAILED_SAMPLE.search(str(error))
            if failed and pictures is not None:
                return Refused(pictures.tolist().index(int(failed[1])))
            return Refused(int(failed[1]) if failed else None)

    def _is_bad_image(self, error: str) -> bool:
        """True if DALI named an image that it could not decode: the pipeline is then usable."""
        return bool(_FAILED_SAMPLE.search(error)) and self._source != "pixels"

    def _build(self) -> Any:
        fn, types, _ = dali()
        options = self._decoding
        gpu = options.device == "gpu"
        pipeline = new_pipeline(options.device, decode_threads())
        with pipeline:
            region = None
            if options.takes_regions:
                region = fn.external_source(name=_REGIONS, dtype=types.INT32, ndim=1, device="cpu")
            if self._source != "pixels":
                encoded = fn.external_source(
                    name=_INPUT, no_copy=True, dtype=types.UINT8, ndim=1, device="cpu"
                )
                output_types = {"RGB": types.RGB, "L": types.GRAY}
                decoder = fn.decoders.image
                if region is not None and not gpu:
                    # Of the upright image, as the header's height and width are.
                    decoder = functools.partial(fn.decoders.image_slice, **_part(region))
                images = decoder(
                    encoded,
                    device="mixed" if gpu else "cpu",
                    output_type=output_types[options.mode],
                    **(decoder_options(options) if gpu else {}),
                )
                if self._repeats_pictures:
                    numbers = fn.external_source(name=_PICTURES, dtype=types.INT32, ndim=0)
                    images = fn.permute_batch(images, indices=numbers)
            else:
                images = fn.external_source(
                    name=_INPUT, dtype=types.UINT8, layout="HWC", device="cpu"
                )
                images = images.gpu() if gpu else images
            # On a CPU `ResizedImage` is ten times as fast as DALI's resize.
            pipeline.set_outputs(gpu_resized(images, options, region) if gpu else images)
        try:
            pipeline.build()
            self._primed = self._expected or BATCH_SIZE
            if gpu and self._source != "pixels":
                self._prime(pipeline)
        except RuntimeError as error:
            raise_gpu_failure(error, self._decoding)
            raise
        return pipeline

    def _prime(self, pipeline: Any) -> None:
        """Decode a batch of tiny JPEGs first, as many as are expected: see `first_batch`."""
        batch = first_batch(self._decoding, self._expected or BATCH_SIZE)
        pipeline.feed_input(_INPUT, batch)
        if self._decoding.takes_regions:
            whole = place(Region(0, 0, _EDGE, _EDGE), self._decoding)
            pipeline.feed_input(_REGIONS, np.array([whole] * len(batch), np.int32))
        if self._repeats_pictures:
            pipeline.feed_input(_PICTURES, np.arange(len(batch), dtype=np.int32))
        pipeline.schedule_run()
        pipeline.share_outputs()
        pipeline.release_outputs()


def _each_once(images: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """A batch with each picture once, filled up with tiny ones; and the place of each image in it.

    Parts of a picture have its bytes at one address.
    """
    by_address = {image.ctypes.data: image for image in images}
    places = {address: place for place, address in enumerate(by_address)}
    numbers = np.array([places[image.ctypes.data] for image in images], np.int32)
    return [*by_address.values(), *[_tiny_jpeg()] * (len(images) - len(by_address))], numbers


def _use_device(device: int | None) -> None:
    """Select the GPU of this thread, which starts on the first one."""
    if device is not None and device != current_device():
        import cupy

        cupy.cuda.runtime.setDevice(device)


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


def parsed_shape(data: Any) -> tuple[int, int] | None:
    """Stored height and width by DALI's parser; None if it rejects the image. Takes 2 µs.

    An image that it rejects must not be in a batch: in a batch of 32 or more it kills the process
    one time in three. DALI 2.4 parses on several threads and, if its own share fails, does not wait
    for the others (``ImageDecoder::RunImplImpl``), which then use freed memory. An image that fails
    only later, in the decode, does no harm.
    """
    try:
        image = _parser()(data)
        # It parses when it is asked for these.
        return (image.height, image.width) if image.height > 0 else None
    except RuntimeError:
        return None


def place(region: Region, options: DecodeSpec) -> tuple[int, ...]:
    """Numbers of a region for DALI; on a GPU, also the height, width and start of its resize."""
    if options.device == "cpu" or options.size is None:
        return region
    geometry = options.geometry(region.height, region.width)
    return (*region, *geometry.whole, *geometry.start)


def _part(region: Any) -> dict[str, Any]:
    """Arguments of DALI's slices for a batch of `place`."""
    return {"start": region[0:2], "shape": region[2:4], "axes": (0, 1)}


def gpu_resized(images: Any, options: DecodeSpec, places: Any = None) -> Any:
    """Append the DALI operators that resize on a GPU, given the `place` of each image."""
    fn, types, _ = dali()
    if options.cuts:
        # Black where a part reaches beyond its picture.
        beyond = {"out_of_bounds_policy": "pad"} if options.in_parts else {}
        images = fn.slice(images, **_part(places), **beyond)
    if options.size is None:
        return images
    filters = {
        "nearest": types.INTERP_NN,
        # Linear with antialiasing is a triangular filter when an image shrinks, as in Pillow.
        "bilinear": types.INTERP_LINEAR,
        "bicubic": types.INTERP_CUBIC,
        "lanczos": types.INTERP_LANCZOS3,
    }
    # DALI's own sizes would be rounded otherwise.
    images = fn.resize(
        images,
        size=fn.cast(places[5:7], dtype=types.FLOAT),
        interp_type=filters[options.filter],
        antialias=options.filter != "nearest",
    )
    if options.resize in ("crop", "pad"):
        images = fn.slice(
            images,
            start=places[7:9],
            shape=options.size,
            axes=(0, 1),
            out_of_bounds_policy="pad",
        )
    return images if options.augment is None else fn.flip(images, horizontal=places[4])


@functools.cache
def _parser() -> Any:
    from nvidia.nvimgcodec import CodeStream  # DALI depends on it, and decodes with it

    return CodeStream


@functools.cache
def _tensors() -> Any:
    from nvidia.dali.tensors import TensorCPU, TensorListCPU

    return TensorCPU, TensorListCPU


def import_decoders() -> None:
    """Import DALI and nvImageCodec, if they are installed: 0.3 s of a core, once before forks."""
    with suppress(ImportError, MissingDependencyError):
        dali(), _tensors(), _parser()


@functools.cache
def has_dali() -> bool:
    """True if DALI can be imported; else a warning, once, that Pillow decodes in its place."""
    try:
        dali()
    except MissingDependencyError as error:
        warn_user(f"Pillow decodes all images, at about 0.7 of the speed of NVIDIA DALI. {error}")
        return False
    return True


@functools.cache
def dali() -> Any:
    """DALI's modules ``fn`` and ``types``, and its class ``Pipeline``.

    Raises
    ------
    MissingDependencyError
    """
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise MissingDependencyError(
            f"DALI, which transform= and GPUs need, can't be imported ({error}): "
            "pip install 'dask-image-ingest[cpu]' ('cpu' has no GPU, 'cuda12' and 'cuda13' do)"
        ) from error
    return fn, types, Pipeline
