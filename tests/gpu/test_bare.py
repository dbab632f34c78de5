"""What needs CuPy and a GPU, and not cuDF; torch and DALI if they are there."""

import io
from types import SimpleNamespace

import gpu_probes
import numpy as np
import pytest
from PIL import Image

from dask_image_ingest.curate import Head
from dask_image_ingest.curate.fingerprints import pdq
from dask_image_ingest.curate.quality import PIXEL_SIGNALS, pixel_signals

cupy = pytest.importorskip("cupy")


def groups(xp):
    random = np.random.default_rng(0)
    shapes = [(3, 200, 300, 3), (1, 97, 1031, 3), (2, 64, 64, 3), (1, 5, 7, 3)]
    return [xp.asarray(random.integers(0, 256, shape, np.uint8)) for shape in shapes]


def test_signals_and_hashes_of_cupy_arrays_are_those_of_numpy():
    expected, found = pixel_signals(groups(np), np), pixel_signals(groups(cupy), cupy)
    for name in PIXEL_SIGNALS:
        np.testing.assert_allclose(found[name].get(), expected[name], atol=1e-4)
    (own, mirrored), quality = pdq(groups(np), np, ("mirrored",))
    (own_there, mirrored_there), quality_there = pdq(groups(cupy), cupy, ("mirrored",))
    for here, there in ((own, own_there), (mirrored, mirrored_there)):
        assert np.bitwise_count(here ^ there.get()).sum(axis=1).max() <= 2
    assert abs(quality.astype(int) - quality_there.get()).max() <= 1


def arrays():
    random = np.random.default_rng(1)
    return [random.integers(0, 256, (40, 30 + n, 3), np.uint8) for n in range(50)]


@pytest.mark.parametrize("predicted", [0, 10**6])
def test_pixels_of_the_host_come_into_one_buffer(predicted):
    from dask_image_ingest.frames.cudf.pixels import DevicePixels

    buffer = DevicePixels(predicted)
    for image in arrays():
        buffer.append([image])
    want = np.concatenate([image.reshape(-1) for image in arrays()])
    np.testing.assert_array_equal(buffer.finish().get(), want)


def test_they_are_right_and_do_not_wait_for_a_busy_default_stream():
    from dask_image_ingest.frames.cudf.pixels import DevicePixels

    buffer = DevicePixels(10**6)
    gpu_probes.queue_work(cupy.cuda.Stream.null, 1)
    buffer.append(arrays())
    assert not cupy.cuda.Stream.null.done
    want = np.concatenate([image.reshape(-1) for image in arrays()])
    np.testing.assert_array_equal(buffer.finish().get(), want)


def test_levels_are_counted_as_by_numpy():
    from dask_image_ingest.frames.cudf.pixels import count_levels

    images = [cupy.asarray(image) for image in arrays()]
    pixels = np.concatenate([image.reshape(-1, 3) for image in arrays()])
    want = [np.bincount(channel, minlength=256) for channel in pixels.T]
    np.testing.assert_array_equal(count_levels(images, SimpleNamespace(numpy=cupy)), want)


def test_a_head_over_embeddings_gives_what_it_gives_on_the_host():
    random = np.random.default_rng(0)
    layers = [(random.standard_normal((1, 16)).astype(np.float32), np.float32([0.5]))]
    vectors = random.standard_normal((50, 16)).astype(np.float32)
    head = Head(layers, output="sigmoid")
    np.testing.assert_allclose(head(cupy.asarray(vectors)).get(), head(vectors), rtol=1e-5)


def test_a_gpu_decodes_and_resizes_photographs_as_a_cpu_does():
    pytest.importorskip("nvidia.dali")
    from synthetic import encode, photograph

    from dask_image_ingest.decode import DecodeSpec
    from dask_image_ingest.decode.dali import DaliDecoder
    from dask_image_ingest.decode.region import Region

    files = [encode(photograph(150 + n, 200, n)) for n in range(20)]
    encoded = [np.frombuffer(file, np.uint8) for file in files]
    originals = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    for size in (None, (64, 64)):
        decoding = DecodeSpec(device="gpu", size=size)
        regions = [Region.whole(np.asarray(original)) for original in originals]
        batch = list(zip(encoded, regions, strict=True)) if decoding.takes_regions else encoded
        (images,) = DaliDecoder(decoding, "encoded").run([batch])
        on_host = images.as_cpu()
        for place, original in enumerate(originals):
            want = original if size is None else original.resize(size, Image.Resampling.BILINEAR)
            apart = np.abs(np.array(on_host[place]).astype(int) - np.asarray(want))
            assert apart.mean() < 1


@pytest.mark.card
def test_torch_shares_the_memory_of_a_batch():
    torch = pytest.importorskip("torch")
    batch = cupy.asarray(np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3))
    tensor = torch.from_dlpack(batch)
    assert tensor.is_cuda
    assert tensor.data_ptr() == batch.data.ptr
    tensor += 1
    assert batch.get().reshape(-1).tolist() == [*range(1, 25)]
