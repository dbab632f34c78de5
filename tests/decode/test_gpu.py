"""What can be said of decoding on a GPU without one: batches, the first of them, and errors."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import played_dali
import pytest
from processes import SECONDS
from synthetic import encode, photograph

import dask_image_ingest as dii
from dask_image_ingest.decode import EncodedImages, planner
from dask_image_ingest.decode.dali import BATCH_SIZE, DaliDecoder, Refused, is_gpu_failure
from dask_image_ingest.decode.decode_spec import DecodeSpec, make_decode_spec
from dask_image_ingest.decode.formats.header import Header
from dask_image_ingest.decode.region import Region

PHOTO = np.frombuffer(encode(photograph(40, 50)), np.uint8)

GPU_FAILURES = [
    # As libdali, libdali_core and nvImageCodec 0.9 have them.
    "CUDA allocation failed",
    "Can't allocate 129499136 bytes on device 0.",
    "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory",
    "CUDA runtime API error cudaErrorIllegalAddress (700):\nan illegal memory access",
    "std::bad_alloc",
    "nvImageCodec failure: '#5'",
    "Error in thread 3: [/opt/dali/dali/core/mm/pool.cc:33] CUDA allocation failed\n"
    "Stacktrace (2 entries):\n[frame 0]: /opt/venv/nvidia/dali/libdali_core.so(+0x1) [0x2]",
]

BAD_IMAGES = [
    "Failed to decode sample #3 : ",
    "Failed to decode sample #3 : /data/cuda/alloc.jpg",
    "nvImageCodec failure: '#4'",
    "nvImageCodec failure: '#51'",
    "Error in thread 0: [/opt/dali/dali/cuda/alloc.h:500] Invalid sample_type: 0\n"
    "Stacktrace (2 entries):\n[frame 0]: /opt/cuda-12.9/nvidia/dali/libdali_core.so(+0x1) [0x2]",
]


def test_the_first_batch_that_a_pipeline_sees_is_a_full_one(monkeypatch):
    (pipeline,) = decoded_by(monkeypatch, DecodeSpec(device="gpu"), "encoded")
    assert [len(batch) for batch in pipeline.fed] == [BATCH_SIZE, 1]


def test_it_is_no_larger_than_what_fits_the_gpu(monkeypatch):
    (pipeline,) = decoded_by(monkeypatch, DecodeSpec(device="gpu", size=(4096, 4096)), "encoded")
    assert len(pipeline.fed[0]) == 2**30 // (3 * 4096**2) == 21


@pytest.mark.parametrize(
    ("shape", "images", "expected"),
    [
        ((3000, 4000), 400, 29),  # a batch of 1 GiB
        ((3000, 4000), 5, 7),  # pieces of 256 MiB, as those of a loader, will follow
        ((1000, 1500), 20, 59),
        ((1000, 1500), 200, 200),
        ((1000, 1500), 2000, 238),
        ((375, 500), 20, BATCH_SIZE),
    ],
)
def test_the_first_batch_is_as_large_as_those_that_are_expected(
    monkeypatch, shape, images, expected
):
    made = played_dali.play(monkeypatch, room=2**30)
    decode_like(shape, images)
    assert [len(pipeline.fed[0]) for pipeline in made] == [expected]


def test_a_pipeline_for_other_batches_is_another_one_and_one_for_fewer_is_built_anew(monkeypatch):
    made = played_dali.play(monkeypatch, room=2**30)
    middle = (1000, 1500)
    for shape, images in [(middle, 20), ((3000, 4000), 40), (middle, 9), (middle, 900)]:
        decode_like(shape, images)
    assert [len(pipeline.fed[0]) for pipeline in made] == [59, 29, 238]
    decode_like(middle, 20)
    decode_like((3000, 4000), 7)
    assert len(made) == 3


def test_batches_of_the_partition_that_came_first_go_first(monkeypatch):
    played_dali.play(monkeypatch)
    begun, other_waits, all_wait = (threading.Event() for _ in range(3))
    schedule, order = played_dali.Pipeline.schedule_run, []

    def held(pipeline):
        assert all_wait.wait(SECONDS)
        order.append(pipeline.fed[-1][0])
        schedule(pipeline)

    def of_first():
        yield [np.frombuffer(b"first 1", np.uint8)]
        begun.set()
        assert other_waits.wait(SECONDS)
        yield [np.frombuffer(b"first 2", np.uint8)]

    def of_second():
        yield [np.frombuffer(b"second 1", np.uint8)]
        other_waits.set()

    start, started = DaliDecoder._start, []

    def counted(decoder, turn, inputs):
        decoded = start(decoder, turn, inputs)
        started.append(inputs is not None)
        if sum(started) == 3:
            all_wait.set()
        return decoded

    monkeypatch.setattr(played_dali.Pipeline, "schedule_run", held)
    monkeypatch.setattr(DaliDecoder, "_start", counted)
    decoder = DaliDecoder(DecodeSpec(device="gpu"), "encoded")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: [*decoder.run(of_first())])
        assert begun.wait(SECONDS)
        second = threads.submit(lambda: [*decoder.run(of_second())])
        assert first.result(SECONDS) == [[b"first 1"], [b"first 2"]]
        assert second.result(SECONDS) == [[b"second 1"]]
    assert order[1:] == [b"first 1", b"first 2", b"second 1"], "behind the batch that primes"


@pytest.fixture(autouse=True)
def no_decoders():
    planner._decoders.cache_clear()
    yield
    planner._decoders.cache_clear()


def decode_like(shape, images):
    """Decode a photograph as one of so many of this shape."""
    headers = [Header("jpeg", *shape, 3, None, False)] * images
    encoded = EncodedImages(headers, lambda row: PHOTO)
    decoders = planner.BatchPlanner(encoded, DecodeSpec(device="gpu")).decoders()
    assert [*decoders.encoded.run([[PHOTO]])] == [[PHOTO.tobytes()]]


def decoded_by(monkeypatch, decoding, source):
    """The pipelines that decode a photograph."""
    made = played_dali.play(monkeypatch, room=2**30)
    photo = (PHOTO, Region(0, 0, 40, 50)) if decoding.takes_regions else PHOTO
    (images,) = DaliDecoder(decoding, source).run([[photo]])
    assert images == [PHOTO.tobytes()], "what came out is what was asked for"
    return made


@pytest.mark.parametrize(("room", "expected"), [(100 * 10**6, 2), (10**6, 1)])
@pytest.mark.parametrize("threads", [1, 16])
def test_batches_of_large_images_fit_the_gpu_whatever_the_threads(
    monkeypatch, room, expected, threads
):
    played_dali.play(monkeypatch, room=room)
    headers = [Header("jpeg", 3000, 4000, 3, None, False)] * 40  # 36 MB each
    with dask.config.set({"image-ingest.decode-threads": threads}):
        batches = list(
            planner.BatchPlanner(
                EncodedImages(headers, lambda row: PHOTO), DecodeSpec(device="gpu")
            )
        )
    assert [len(batch.rows) for batch in batches] == [expected] * (40 // expected)


@pytest.mark.parametrize("load", [None, 0, 0.5, 1])
def test_the_share_of_the_jpeg_engines_is_that_of_the_configuration_where_it_is_read(
    monkeypatch, load
):
    with dask.config.set({"image-ingest.hw-decoder-load": load}):
        decoding = decoding_of(device="gpu")
        assert decoding_of(device="cpu") == DecodeSpec()
    # As a worker has it, where nothing is configured.
    (pipeline,) = decoded_by(monkeypatch, pickle.loads(pickle.dumps(decoding)), "encoded")
    _, options = pipeline.graph
    assert options.get("hw_decoder_load") == load
    assert (decoding == decoding_of(device="gpu")) == (load is None), "other pixels, other tasks"


@pytest.mark.parametrize("load", [-0.1, 1.5, "half", True])
def test_a_share_that_is_none_is_refused(load):
    with (
        dask.config.set({"image-ingest.hw-decoder-load": load}),
        pytest.raises(dii.ArgumentError, match="hw-decoder-load"),
    ):
        decoding_of(device="gpu")


def decoding_of(device):
    return make_decode_spec(
        device=device, size=None, resize="stretch", mode="RGB", transform=None, max_pixels=None
    )


@pytest.mark.parametrize("message", GPU_FAILURES)
def test_an_error_of_the_gpu_is_raised_and_says_what_to_do(monkeypatch, message):
    assert is_gpu_failure(message)
    played_dali.play(monkeypatch)
    monkeypatch.setattr(played_dali, "REFUSED", {b"bad": message})
    bad = np.frombuffer(b"bad", np.uint8)
    with pytest.raises(RuntimeError) as raised:
        list(DaliDecoder(DecodeSpec(device="gpu"), "encoded").run([[PHOTO, bad]]))
    assert "device_memory_limit" in raised.value.__notes__[0]


@pytest.mark.parametrize("message", GPU_FAILURES)
def test_an_error_in_building_a_pipeline_says_so_too(monkeypatch, message):
    played_dali.play(monkeypatch)

    def fails(pipeline):
        raise RuntimeError(message)

    monkeypatch.setattr(played_dali.Pipeline, "build", fails)
    with pytest.raises(RuntimeError) as raised:
        list(DaliDecoder(DecodeSpec(device="gpu"), "encoded").run([[PHOTO]]))
    assert "device_memory_limit" in raised.value.__notes__[0]


@pytest.mark.parametrize("message", BAD_IMAGES)
def test_a_bad_image_is_no_error_of_the_gpu(monkeypatch, message):
    played_dali.play(monkeypatch)
    monkeypatch.setattr(played_dali, "REFUSED", {b"bad": message})
    bad = np.frombuffer(b"bad", np.uint8)
    refused, following = DaliDecoder(DecodeSpec(device="gpu"), "encoded").run(
        [[PHOTO, bad], [PHOTO]]
    )
    assert isinstance(refused, Refused)
    assert following == [PHOTO.tobytes()]


def test_what_the_installed_dali_says_of_a_bad_image_is_no_error_of_the_gpu():
    dali = pytest.importorskip("nvidia.dali")
    good = PHOTO.tobytes()
    table = good.index(b"\xff\xc4") + 5
    for bad in (b"this is no image" * 10, good[:table] + b"\xff" * 16 + good[table + 16 :]):
        pipeline = dali.Pipeline(batch_size=2, num_threads=1, device_id=None)
        with pipeline:
            encoded = dali.fn.external_source(name="images", ndim=1, dtype=dali.types.UINT8)
            pipeline.set_outputs(dali.fn.decoders.image(encoded))
        pipeline.build()
        pipeline.feed_input("images", [np.frombuffer(image, np.uint8) for image in (good, bad)])
        with pytest.raises(RuntimeError) as failed:
            pipeline.run()
        assert __file__ in str(failed.value)
        assert not is_gpu_failure(str(failed.value).replace(__file__, "/opt/cuda/alloc/dali.py"))
