"""What the hardware's JPEG engines do with a batch, and what pipelines cost; not run on a GPU yet.

share    batches of 256, of 119 (as of 3 MP) and of 29 (12 MP), decoded over and over in
         pipelines that first saw 1, 29, 119 or 256 images: the engines' use and images per second.
         If the first batch settles the engines' share, they differ; the package has a pipeline
         begin with as many as its batches will have.
places   one photograph at every place of a batch of 256, by the share of the hardware: how many
         different pictures of it there are, and by how much they differ.
build    seconds for a pipeline that is built and primed, and for the batch that it takes.
refused  a batch with a bad image, and the good batch behind it: is the pipeline kept or built
         anew, and what does either take.
"""

import contextlib
import functools
import itertools
import statistics
import sys
import threading
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

BATCH = 256
BATCHES = 40

#: Images of the batches, and of the first one that a pipeline sees.
SHARES = ((BATCH, (1, 119, BATCH)), (119, (29, 119, BATCH)), (29, (29, BATCH)))


def main():
    for batch, firsts in SHARES:
        for first in firsts:
            share(batch, first)
    for load in (0.0, 0.65, 1.0):
        places(load)
    build()
    refused()


def share(batch, first):
    """Decode batches behind a first one of so many images."""
    from dask_image_ingest.decode import dali

    images = photographs()
    count = BATCH * BATCHES // batch
    with mock.patch.object(dali, "first_batch", return_value=images[:first]):
        decoder = new_decoder()
        drain(decoder, [images[:batch]])
        with engines() as seen:
            start = time.perf_counter()
            drain(decoder, itertools.repeat(images[:batch], count))
            speed = batch * count / (time.perf_counter() - start)
    used = f"{statistics.mean(seen):.0f} %" if seen else "unknown"
    print(
        f"share: batches of {batch}, first {first}: JPEG engines {used} busy, "
        f"{speed:,.0f} images/s",
        flush=True,
    )


def places(load):
    """Compare one photograph's pixels over the places of a batch."""
    import numpy as np

    with hardware_load(load):
        (images,) = new_decoder().run([[photographs()[0]] * BATCH])
        on_host = images.as_cpu()
        pictures = [np.array(on_host[place]).astype(np.int16) for place in range(BATCH)]
    kinds = {picture.tobytes() for picture in pictures}
    apart = [np.abs(picture - pictures[0]) for picture in pictures]
    print(
        f"places: hw_decoder_load {load}: {len(kinds)} pictures of one photograph, "
        f"{max(each.max() for each in apart)} levels apart at most, "
        f"{max(each.mean() for each in apart):.4f} in the mean",
        flush=True,
    )


def build():
    """Time pipelines beside one that is there already, as after a first read."""
    images = photographs()
    kept = new_decoder()
    drain(kept, [images])
    for _ in range(3):
        decoder = new_decoder()
        start = time.perf_counter()
        drain(decoder, [images])
        first = time.perf_counter()
        drain(decoder, [images])
        print(
            f"build: {first - start:.3f} s with its first batch of {BATCH}, "
            f"{time.perf_counter() - first:.3f} s for the next",
            flush=True,
        )


def refused():
    """Time a batch that DALI refuses, and the one behind it."""
    import numpy as np
    from _gpu_images import corrupted

    images = photographs()
    bad = np.frombuffer(corrupted(images[0].tobytes(), 0), np.uint8)
    decoder = new_decoder()
    drain(decoder, [images])
    for _ in range(3):
        before = decoder._batch_pipeline._pipeline
        start = time.perf_counter()
        drain(decoder, [[*images[1:], bad]])
        failed = time.perf_counter()
        drain(decoder, [images])
        kept = decoder._batch_pipeline._pipeline is before
        print(
            f"refused: {failed - start:.3f} s, the batch behind it "
            f"{time.perf_counter() - failed:.3f} s, pipeline {'kept' if kept else 'built anew'}",
            flush=True,
        )


@functools.cache
def photographs():
    """A batch of baseline JPEGs of 500 x 375."""
    from _gpu_images import photograph

    made = [dali_input(photograph(375, 500, seed)) for seed in range(16)]
    return [made[number % len(made)] for number in range(BATCH)]


def dali_input(content):
    import numpy as np

    return np.frombuffer(content, np.uint8)


def new_decoder():
    from dask_image_ingest.decode.dali import DaliDecoder
    from dask_image_ingest.decode.decode_spec import DecodeSpec

    return DaliDecoder(DecodeSpec(device="gpu"), "encoded")


def drain(decoder, batches):
    for _ in decoder.run(batches):
        pass


@contextlib.contextmanager
def engines():
    """What NVML says of the JPEG engines meanwhile, in percent."""
    import pynvml
    from _gpu_machine import nvml_handle

    pynvml.nvmlInit()
    handle, stop, seen = nvml_handle(), threading.Event(), []

    def sample():
        with contextlib.suppress(pynvml.NVMLError):
            while not stop.wait(0.05):
                seen.append(pynvml.nvmlDeviceGetJpgUtilization(handle)[0])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def hardware_load(load):
    """Decode with this share of the images on the hardware decoder."""
    from nvidia.dali import fn

    changed = functools.partial(fn.decoders.image, hw_decoder_load=load)
    with mock.patch.object(fn.decoders, "image", changed):
        yield


if __name__ == "__main__":
    main()
