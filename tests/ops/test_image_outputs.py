"""``map_batches`` that makes images: a typed column of them, as if they had been read."""

import dask.dataframe as dd
import numpy as np
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")


@pytest.fixture(scope="module")
def ddf(tmp_path_factory):
    """Two shards of eight images of four shapes, one of them damaged."""
    folder = tmp_path_factory.mktemp("outputs")
    for shard in range(2):
        files = {}
        for number in range(8):
            shape = (20 + number % 4, 30, 3)
            noise = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
            data = save(Image.fromarray(noise), "PNG")
            files[f"{shard}{number}.png"] = data[:50] if number == 3 else data
        write_tar(folder / f"{shard}.tar", files)
    return dii.read_webdataset_images(folder, backend="pandas")


def mirrored(images):
    return [image[:, ::-1] for image in images]


def grey(images):
    return np.stack([image[:16, :16].mean(axis=2, keepdims=True) for image in images]).astype("u1")


def compare(made, ddf, change):
    before, after = ddf.compute().images.arrays(), made.images.arrays()
    assert [image is None for image in before] == [image is None for image in after]
    assert sum(image is None for image in after) == 2
    for one, other in zip(before, after, strict=True):
        if one is not None:
            np.testing.assert_array_equal(change([one])[0], other)


@pytest.mark.parametrize("change", [mirrored, grey])
@pytest.mark.parametrize("batch_size", [3, 256])
def test_arrays_of_one_shape_or_of_several_become_images_again(ddf, change, batch_size):
    lazy = ddf.images.map_batches(change, {"image": "image"}, batch_size=batch_size)
    assert lazy.dtypes["image"] == ddf.dtypes["image"]
    compare(lazy.compute(), ddf, change)
    compare(
        ddf.compute().images.map_batches(change, {"image": "image"}, batch_size=batch_size),
        ddf,
        change,
    )


@pytest.mark.slow
def test_on_a_cluster_too_and_from_a_file(ddf, client, tmp_path):
    made = ddf.images.map_batches(mirrored, {"image": "image"})
    compare(made.compute(), ddf, mirrored)
    made.to_parquet(tmp_path / "made", write_index=False)
    compare(dd.read_parquet(tmp_path / "made").compute(), ddf, mirrored)


def test_images_stand_beside_other_outputs_in_the_order_that_was_said(ddf):
    def both(images):
        return {"side": mirrored(images), "height": np.array([len(image) for image in images])}

    made = ddf[["__key__", "image"]].images.map_batches(
        both, {"side": "image", "height": "int32"}, keep_image=True
    )
    frame = made.compute()
    assert list(frame.columns) == list(made.columns) == ["__key__", "image", "side", "height"]
    assert frame["side"].isna().equals(frame["height"].isna())
    assert frame["side"].dtype == frame["image"].dtype


def test_what_is_made_can_be_mapped_again_stacked_and_filtered(ddf):
    small = ddf.images.map_batches(grey, {"image": "image"})
    there = small[small["image"].notnull()]
    assert there.images.stack().compute().shape == (14, 16, 16, 1)
    means = there.images.map_batches(lambda images: images.mean(axis=(1, 2, 3)), {"m": "float32"})
    assert means.compute()["m"].notna().sum() == 14


def test_a_frame_without_any_image_has_a_column_of_none(ddf):
    frame = ddf.compute()
    none = frame[frame["image"].isna()].images.map_batches(mirrored, {"image": "image"})
    assert none["image"].isna().all()
    assert none["image"].dtype == frame["image"].dtype


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda images: [image / 255 for image in images], "uint8"),
        (lambda images: images[:1], "a list of 1"),
        (lambda images: [image[..., 0] for image in images], "height, width, channels"),
        (lambda images: np.zeros((len(images), 9), "u1"), r"shape \(\d, 9\)"),
        (lambda images: [image[:0] for image in images], "a pixel at least"),
    ],
)
def test_what_is_no_image_is_refused(ddf, wrong, said):
    with pytest.raises(ArgumentError, match=said):
        ddf.images.map_batches(wrong, {"image": "image"}).compute(scheduler="synchronous")
