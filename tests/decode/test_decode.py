"""What holds from one partition to the next, and from one thread to another."""

import io

import numpy as np
import pytest
from forked_python import run_python
from photo_shards import encode, write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.decode import DecodeSpec, EncodedImages, decode
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.frames.pandas_backend import HostPixels

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

EDGE = 40


def jpeg(colour) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (EDGE, EDGE), colour).save(file, "JPEG")
    return file.getvalue()


def crop_at_random(images):
    from nvidia.dali import fn

    return fn.random_resized_crop(images, size=(24, 24))


def crop_too_much(images):
    from nvidia.dali import fn

    return fn.crop(images, crop=(900, 900))


def as_float(images):
    from nvidia.dali import fn, types

    return fn.cast(images, dtype=types.FLOAT)


@pytest.mark.parametrize("fails_at", [0, 1, 63, 64, 65, 100, 199])
def test_a_partition_that_fails_leaves_no_pixels_for_the_next_one(fails_at):
    def read(data, count, fails_at=None):
        def image_bytes(row):
            if row == fails_at:
                raise OSError("the network is gone")
            return data

        headers = [read_header(data, 1 << 22)] * count
        buffer = HostPixels(count * EDGE * EDGE * 3)
        (pixels,) = decode(EncodedImages(headers, image_bytes), [DecodeSpec()], [buffer])
        return pixels

    with pytest.raises(OSError, match="the network is gone"):
        read(jpeg("red"), 200, fails_at)
    blue = read(jpeg("blue"), 64).flat.reshape(-1, 3)
    assert (blue[:, 2] > 200).all()
    assert (blue[:, 0] < 50).all()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Shards of images for DALI and for Pillow, large and small."""
    random = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("mixed")
    paths = []
    for shard in range(4):
        files = {}
        for number in range(12):
            edge = (40, 200)[number % 2]
            image = Image.fromarray(random.integers(0, 255, (edge, edge, 3), dtype=np.uint8))
            extension = ("jpg", "jpg", "png")[number % 3]
            files[f"{shard}-{number:02}.{extension}"] = encode(image, extension)
        paths.append(write_tar(folder / f"{shard}.tar", files))
    return paths


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("transform", "error"), [(crop_too_much, "crop"), (as_float, "float")])
def test_a_transform_that_fails_says_so_and_gives_no_pixels(mixed, scaled, transform, error):
    ddf = dii.read_webdataset_images(
        mixed, backend="pandas", size=16, transform=transform, scaled_decode=scaled
    )
    with pytest.raises((RuntimeError, dii.ArgumentError), match=f"(?i){error}"):
        ddf.compute(scheduler="synchronous")


def test_random_transforms_give_the_same_on_threads_as_one_by_one(mixed):
    ddf = dii.read_webdataset_images(mixed, backend="pandas", transform=crop_at_random)
    one_by_one = ddf.compute(scheduler="synchronous").images.stack()
    for _ in range(3):
        on_threads = ddf.compute(scheduler="threads", num_workers=4).images.stack()
        np.testing.assert_array_equal(on_threads, one_by_one)


FORKS = """
import gc, os, signal, sys, warnings
import dask_image_ingest as dii
from dask_image_ingest.decode import planner

warnings.simplefilter("ignore")  # Python's own, of forks in processes with threads

def brighter(images):
    from nvidia.dali import fn
    return fn.brightness(images, brightness=fn.random.uniform(range=(1, 2)))

def read():
    frames = (
        dii.read_webdataset_images(sys.argv[1:], backend="pandas", size=16, transform=transform)
        for transform in (None, brighter)
    )
    return [frame.compute(scheduler="synchronous").images.stack() for frame in frames]

want = read()
child = os.fork()
if not child:
    signal.alarm(60)
    for _ in range(2):
        same = all((images == wanted).all() for images, wanted in zip(read(), want, strict=True))
        assert same, "the fork has read something else"
        # What the parent had goes, and so does the fork in the end.
        planner._decoders.cache_clear()
        gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0, "the fork hung, crashed, or read something else"
"""


@pytest.mark.slow
def test_a_fork_reads_like_its_parent(mixed):
    finished = run_python(FORKS, *mixed)
    assert finished.returncode == 0, finished.stderr


HELD = """
import os, signal, sys, threading, warnings
from dask_image_ingest.decode.formats import pillow_image as opening

warnings.simplefilter("ignore")  # Python's own, of forks in processes with threads
before = list(warnings.filters)
inside, go = threading.Event(), threading.Event()

def other():
    with opening.pillow_errors(), opening._silence._lock:
        inside.set()
        go.wait()

thread = threading.Thread(target=other)
thread.start()
inside.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    with opening.pillow_errors():
        pass
    os._exit(warnings.filters != before)
go.set()
thread.join()
assert os.waitpid(child, 0)[1] == 0, "the fork hung, or its warnings are gone"
"""


@pytest.mark.slow
def test_a_fork_waits_for_no_thread_of_its_parent():
    finished = run_python(HELD)
    assert finished.returncode == 0, finished.stderr
