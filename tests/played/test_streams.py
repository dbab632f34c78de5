"""What streams may do in any order, when the work of each is done as late as CUDA allows."""

import cupy
import dask
import numpy as np
import pytest
from simulated.decoder import Images
from simulated.streams import prompt
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest.decode.dali import DaliDecoder, tensor_list
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.cudf.convert import to_cudf
from dask_image_ingest.frames.cudf.pixels import DevicePixels

NULL = cupy.cuda.Stream.null


def batches():
    random = np.random.default_rng(0)
    return [[random.integers(0, 256, (9, 8 + n, 3), np.uint8) for n in range(m)] for m in (7, 5, 9)]


WANT = np.concatenate([image.reshape(-1) for batch in batches() for image in batch])


def of_dali(batch):
    """Images on the GPU, whose memory DALI takes back with their last reference."""
    return Images(tensor_list(batch))


@pytest.mark.parametrize("images", [of_dali, list, lambda batch: [*of_dali(batch)]])
@pytest.mark.parametrize("predicted", [0, len(WANT), 2 * len(WANT)])
def test_pixels_are_copied_before_their_memory_is_used_again(images, predicted):
    """Freed memory of frames is written to at once: the default stream is idle."""
    buffer = DevicePixels(predicted)
    with prompt(NULL):
        for batch in batches():
            buffer.append(images(batch))
        pixels = buffer.finish()
    np.testing.assert_array_equal(pixels.get(), WANT)


def test_memory_that_the_default_stream_still_uses_is_written_to_later():
    freed = cupy.zeros(len(WANT), cupy.uint8)
    freed += 1
    address = freed.data.ptr
    del freed
    assert not NULL.done
    buffer = DevicePixels(len(WANT))
    for batch in batches():
        buffer.append(of_dali(batch))
    pixels = buffer.finish()
    assert pixels.data.ptr == address
    np.testing.assert_array_equal(pixels.get(), WANT)


def test_copies_do_not_wait_for_the_default_stream():
    buffer = DevicePixels(len(WANT))
    cupy.zeros(3)[:] = 1
    for batch in batches():
        buffer.append(of_dali(batch))
        buffer.append([np.zeros((0, 0, 3), np.uint8)])
        assert not NULL.done


def test_dali_has_its_inputs_until_a_batch_is_decoded():
    """Its threads read them without a copy, in the time between."""
    photos = [photograph(20, 16, n) for n in range(5)]
    files = [np.frombuffer(encode(photo, "png"), np.uint8) for photo in photos]
    (images,) = DaliDecoder(DecodeSpec(device="gpu"), "encoded").run([files])
    buffer = DevicePixels(5 * 20 * 16 * 3)
    buffer.append(images)
    want = np.stack([np.asarray(photo) for photo in photos])
    np.testing.assert_array_equal(buffer.finish().get().reshape(want.shape), want)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    members = {f"{n:03}.png": encode(photograph(20, 16, n), "png") for n in range(5)}
    return write_shard(tmp_path_factory.mktemp("shards") / "shard.tar", members)


def read(shard, backend, **options):
    with dask.config.set(scheduler="synchronous"):
        return dii.read_webdataset_images(shard, backend=backend, **options).compute()


def outputs(images):
    """Arrays that the current stream has yet to write."""
    numbers, lists = images.mean(axis=(1, 2, 3)), images.mean(axis=(1, 2))
    return {"number": numbers, "list": lists, "half": images[:, ::2].copy()}


OUTPUTS = {"number": "float32", "list": "list<float32>", "half": "image"}


def mapped(shard, backend, name):
    frame = read(shard, backend)
    return frame.images.map_batches(lambda x: {name: outputs(x)[name]}, {name: OUTPUTS[name]})


def from_pandas(shard, backend, _):
    frame = read(shard, "pandas")
    return frame if backend == "pandas" else to_cudf(frame)


def from_storage(shard, backend, _):
    frame = read(shard, backend)
    there = get_backend(backend)
    return there.from_storage(there.to_storage(frame), frame.iloc[:0])


@pytest.mark.parametrize(
    ("make", "name"),
    [*((mapped, name) for name in OUTPUTS), (from_pandas, "image"), (from_storage, "image")],
)
def test_a_stream_of_the_users_has_written_a_column_before_libcudf_reads_it(shard, make, name):
    with cupy.cuda.Stream(non_blocking=True):
        made = make(shard, "cudf", name)[name]
    want = make(shard, "pandas", name)[name]
    moved = made.take([4, 3, 2, 1, 0])  # by libcudf, on the default stream
    if made.dtype == "float32":
        np.testing.assert_allclose(moved.to_numpy()[::-1], want.to_numpy(), rtol=1e-6)
    elif name == "list":
        rows = np.stack(moved.to_arrow().to_pylist())
        np.testing.assert_allclose(rows[::-1], np.stack(want.to_list()), rtol=1e-6)
    else:
        for one, other in zip(moved.images.arrays()[::-1], want.images.arrays(), strict=True):
            np.testing.assert_array_equal(one.get(), other)
