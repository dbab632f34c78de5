"""A function that was passed in and fails: the error says which, where, and why."""

import dask
import numpy as np
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Pictures of which one is small, among others that are no pictures."""
    files = {}
    for number in range(30):
        edge = 20 if number == 17 else 100
        data = save(Image.new("RGB", (edge, edge), "red"), "JPEG")
        files[f"{number:02}.jpg"] = data[:60] if number % 10 == 3 else data
    return write_tar(tmp_path_factory.mktemp("errors") / "a.tar", files)


@pytest.fixture(params=["synchronous", "threads", "cluster"])
def anywhere(request):
    scheduler = request.param
    if scheduler == "cluster":
        scheduler = request.getfixturevalue("client")
    with dask.config.set(scheduler=scheduler):
        yield


def too_large(images):
    from nvidia.dali import fn

    return fn.crop(images, crop=(50, 50))


def too_large_at_random(images):
    from nvidia.dali import fn

    return too_large(fn.brightness(images, brightness=fn.random.uniform(range=(1, 2))))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [too_large, too_large_at_random])
def test_a_failing_transform_is_told_by_shard_key_and_reason(shard, transform, anywhere):
    ddf = dii.read_webdataset_images(
        shard, backend="pandas", transform=lambda images: transform(images)
    )
    with pytest.raises(dii.FunctionError) as told:
        ddf.compute()
    message = str(told.value)
    assert message.startswith(f"{shard}: transform= fails for sample '17': nvidia.dali.fn.crop: ")
    assert "input_shape={20 x 20 x 3}" in message
    assert len(message) < 500


def test_the_error_of_dali_stands_behind_that_of_the_transform(shard):
    ddf = dii.read_webdataset_images(shard, backend="pandas", transform=too_large)
    with pytest.raises(dii.FunctionError) as told:
        ddf.compute()
    assert "Critical error in pipeline" in str(told.value.__cause__)


def test_a_late_decode_tells_the_key_where_there_is_one(shard):
    table = dii.read_webdataset_images(shard, backend="pandas")
    table = table.drop(columns=["image", "error"]).compute()
    with pytest.raises(dii.FunctionError, match=f"{shard}: transform= fails for sample '17'"):
        dii.decode_images(table, transform=too_large)
    offset = table["offset"].iloc[17]
    without = table.drop(columns="__key__")
    with pytest.raises(dii.FunctionError, match=f"fails for the image at byte {offset}"):
        dii.decode_images(without, transform=too_large)


@pytest.mark.slow
def test_a_transform_that_raises_is_told_too(shard, anywhere):
    def transform(images):
        return images[{}]  # as a typing error might

    ddf = dii.read_webdataset_images(shard, backend="pandas", transform=transform)
    with pytest.raises(dii.FunctionError, match=f"{shard}: transform= fails for sample '00': Type"):
        ddf.compute()


@pytest.mark.parametrize("given", [None, [], 3, "images"])
def test_a_transform_that_gives_no_images_is_told(shard, given):
    ddf = dii.read_webdataset_images(shard, backend="pandas", transform=lambda images: given)
    with pytest.raises(dii.ArgumentError, match=r"transform= gave a \w+: it has to give one batch"):
        ddf.compute()


class Fails:
    """Fails for small pictures."""

    def __call__(self, images):
        if any(min(image.shape[:2]) < 50 for image in images):
            raise ValueError("this is too small")
        return np.zeros(len(images))


class CannotBeBuilt:
    def __init__(self):
        raise OSError("no such weights")

    def __call__(self, images):
        raise AssertionError


@pytest.mark.slow
def test_a_failing_function_of_map_batches_is_told_by_shard_key_and_reason(shard, anywhere):
    ddf = dii.read_webdataset_images(shard, backend="pandas")
    mapped = ddf.images.map_batches(Fails(), {"score": "float32"}, batch_size=4)
    with pytest.raises(dii.FunctionError) as told:
        mapped.compute()
    # On a cluster the worker is told behind it.
    assert str(told.value).partition(" [worker ")[0] == (
        f"map_batches: Fails fails for sample '17' of {shard}: ValueError: this is too small"
    )


def test_what_a_function_raised_stands_behind_the_error(shard):
    ddf = dii.read_webdataset_images(shard, backend="pandas")
    for function, error in ((Fails(), ValueError), (CannotBeBuilt, OSError)):
        with pytest.raises(dii.FunctionError) as told:
            ddf.images.map_batches(function, {"score": "float32"}).compute()
        assert isinstance(told.value.__cause__, error)


def test_where_key_and_shard_are_not_asked_for_the_row_is_told(shard):
    ddf = dii.read_webdataset_images(shard, backend="pandas")
    mapped = ddf.images.map_batches(Fails(), {"score": "float32"}, batch_size=4)
    with pytest.raises(dii.FunctionError, match="Fails fails for row 17 of a partition: ValueE"):
        mapped["score"].compute()


@pytest.mark.slow
def test_an_interrupt_is_no_failure_of_a_function(shard):
    def interrupted(images):
        raise KeyboardInterrupt

    ddf = dii.read_webdataset_images(shard, backend="pandas")
    with pytest.raises(KeyboardInterrupt):
        ddf.images.map_batches(interrupted, {"score": "float32"}).compute()
    with pytest.raises(KeyboardInterrupt):
        dii.read_webdataset_images(shard, backend="pandas", transform=interrupted).compute()
