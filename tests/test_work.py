"""How much work a read does, by counts that are the same on every machine: no clocks here."""

import gc
import sys
from importlib import import_module
from pathlib import Path

import dask
import numpy as np
import pytest
from corpus import bad_images
from photo_shards import Photo, encode, make_photos, write_photo_shards, write_tar
from PIL import Image

from dask_image_ingest import read_webdataset_images
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.samples import SampleRows
from dask_image_ingest.dataset.schema.columns import (
    ImageMember,
    make_schema,
    parse_image_extensions,
)
from dask_image_ingest.decode.decode_spec import MAX_PIXELS, DecodeSpec
from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import IMAGE_EXTENSIONS, index_tar

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

from dask_image_ingest.decode.dali import BATCH_SIZE, DaliDecoder
from dask_image_ingest.frames.pandas_backend import HostPixels
from dask_image_ingest.frames.pixel_pool import PixelMemory, pixel_memory

pytestmark = pytest.mark.slow

SAMPLES = 2 * BATCH_SIZE + 42


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    (path,) = write_photo_shards(make_photos(SAMPLES), tmp_path_factory.mktemp("work"), SAMPLES)
    return path


@pytest.fixture
def counted(monkeypatch):
    """Counts calls: ``counted(Class, "method", weigh)`` gives a list that grows with each."""

    def count(owner, name, weigh=lambda *_: 1):
        calls: list = []
        original = getattr(owner, name)

        def counting(*args):
            result = original(*args)
            calls.append(weigh(*args))
            return result

        monkeypatch.setattr(owner, name, counting)
        return calls

    return count


@pytest.mark.newest
def test_each_pixel_is_copied_once_on_its_way_to_the_frame(shard, counted):
    copied = counted(HostPixels, "_reserve", lambda _, nbytes: nbytes)
    frame = read_webdataset_images(shard, backend="pandas").compute()
    decoded = int((frame.height.astype(int) * frame.width * 3).sum())
    assert sum(copied) == decoded
    # And the frame is that very memory: the arrays of its images lie side by side.
    views = frame.images.arrays()
    addresses = [view.__array_interface__["data"][0] for view in views]
    assert addresses[-1] + views[-1].nbytes - addresses[0] == decoded


@pytest.mark.parametrize("extension", ["jpg", "png"])
def test_images_of_one_format_come_in_whole_batches(extension, counted, tmp_path):
    image = Image.fromarray(np.full((16, 24, 3), 200, np.uint8))
    photos = [
        Photo(f"{number:04}", extension, encode(image, extension), "", 0, 0.0)
        for number in range(SAMPLES)
    ]
    batches = counted(HostPixels, "append", lambda _, images: (type(images).__name__, len(images)))
    read_webdataset_images(
        write_photo_shards(photos, tmp_path, SAMPLES), backend="pandas"
    ).compute()
    assert {kind for kind, _ in batches} == {"TensorListCPU"}
    # A short one first, while which the next images are looked at.
    first, second, last = (size for _, size in batches)
    assert (second, first + second + last) == (BATCH_SIZE, SAMPLES)


def test_no_batch_is_lost_for_few_images_of_a_format_that_cannot_be_checked(counted, tmp_path):
    photo = Image.fromarray(np.full((16, 24, 3), 200, np.uint8))
    webp = encode(photo, "webp")
    files = {f"{number:04}.jpg": encode(photo) for number in range(300)}
    files["bad.webp"] = webp[:40] + b"\xff" * (len(webp) - 40)
    isolated = counted(import_module("dask_image_ingest.decode.decode"), "decode_in_parts")
    frame = read_webdataset_images(write_tar(tmp_path / "a.tar", files), backend="pandas").compute()
    assert frame.image.isna().sum() == 1
    assert not isolated


def test_pipelines_are_built_once_for_all_partitions(shard, counted):
    built = counted(DaliDecoder, "_build", lambda decoder: decoder._source)
    ddf = read_webdataset_images(shard, backend="pandas", size=(61, 67), partition_size="400 kB")
    assert ddf.npartitions > 2
    ddf.compute()
    # Pillow's images need none.
    assert built == ["encoded"]


def test_the_memory_of_a_partition_that_is_let_go_serves_the_next(shard):
    pixel_memory.release()
    ddf = read_webdataset_images(shard, backend="pandas", size=224)
    first = ddf.compute().images.arrays()[0].__array_interface__["data"][0]
    gc.collect()
    again = ddf.compute()
    assert again.images.arrays()[0].__array_interface__["data"][0] == first
    assert pixel_memory.unused < again.image.array.nbytes


@pytest.mark.parametrize("kind", bad_images())
def test_a_bad_image_holds_nothing_of_its_partition(kind, tmp_path):
    # An exception that outlives its handling would, through the frames of its traceback.
    photo = np.full((999, 1013, 3), 7, np.uint8)
    files = {"bad.img": bad_images()[kind][0], "good.jpg": encode(Image.fromarray(photo))}
    ddf = read_webdataset_images(write_tar(tmp_path / "a.tar", files), backend="pandas")
    assert ddf.compute(scheduler="synchronous").image.isna().tolist() == [True, False]
    gc.collect()
    kept = pixel_memory.unused
    pixel_memory.release()
    assert kept >= photo.nbytes


def test_memory_that_is_still_looked_at_is_not_given_away():
    memory = PixelMemory()
    array = memory.take(5_000_000, keep=10**9)
    array[:] = 1
    view = array[100:200].reshape(10, 10)
    del array
    assert not memory.unused
    memory.take(5_000_000, keep=10**9)[:] = 2
    assert np.all(view == 1)
    del view
    assert memory.unused > 10_000_000 - 1


def test_no_more_memory_is_kept_than_was_allowed():
    memory = PixelMemory()
    arrays = [memory.take(1 << 20, keep=3 << 20) for _ in range(5)]
    arrays.clear()
    assert 2 << 20 <= memory.unused <= 3 << 20
    memory.release()
    assert not memory.unused


def test_metadata_is_read_with_few_calls_of_python(shard):
    # Calls of functions, C's included, for each sample of four members: a stable stand-in for time.
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    with open_shard(str(shard)) as buffer:
        sys.setprofile(count)
        try:
            index = index_tar(buffer)
        finally:
            sys.setprofile(None)
        scanning, calls = calls, 0
        images = parse_image_extensions(IMAGE_EXTENSIONS)
        options = ReadOptions((ImageMember("image", images, DecodeSpec(max_pixels=MAX_PIXELS)),))
        schema = make_schema(index, buffer, images={"image": images})
        columns = ["__key__", "offset", "txt", "height", "width"]
        members = [m for m in schema.member_columns if m.column in columns]
        rows = SampleRows(str(shard), buffer, index, options, members)
        sys.setprofile(count)
        try:
            rows.table(columns, rows.numbers)
        finally:
            sys.setprofile(None)
    assert scanning / SAMPLES < 4 * 12
    assert calls / SAMPLES < 70


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads")
@pytest.mark.parametrize("errors", ["null", "drop"])
def test_the_first_rows_cost_no_read_of_the_whole_shard(errors, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (200, 160, 160, 3), np.uint8)
    members = [
        (f"{row:03d}.png", encode(Image.fromarray(image), "png")) for row, image in enumerate(noise)
    ]
    path = write_tar(tmp_path / "noise.tar", members)

    def bytes_read(query):
        before = int(Path("/proc/self/io").read_text().split()[1])
        query(read_webdataset_images(path, errors=errors, backend="pandas"))
        return int(Path("/proc/self/io").read_text().split()[1]) - before

    with dask.config.set(scheduler="synchronous"):
        whole = bytes_read(lambda ddf: ddf.compute())
        assert whole > path.stat().st_size > 15e6
        assert bytes_read(lambda ddf: ddf.head(5)) < whole / 4
