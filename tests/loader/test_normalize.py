"""``normalize=``: batches as a network takes them, the numbers that torch would make."""

import re

import numpy as np
import pytest

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, size=(16, 24), backend="pandas")


def expected(images: np.ndarray, mean, std) -> np.ndarray:
    made = (images.astype(np.float64) / 255 - np.asarray(mean)) / np.asarray(std)
    return made.transpose(0, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), (0.5, 0.25), (MEAN, 0.5)])
def test_batches_are_floats_of_channels_first(ddf, mean, std, shuffle):
    plain = ddf.images.iter_batches(5, shuffle=shuffle)
    ready = ddf.images.iter_batches(5, shuffle=shuffle, normalize=(mean, std))
    for one, other in zip(plain, ready, strict=True):
        assert other["image"].dtype == np.float32
        assert other["image"].flags.c_contiguous
        np.testing.assert_allclose(other["image"], expected(one["image"], mean, std), atol=2e-6)
        assert one["__key__"].tolist() == other["__key__"].tolist()


def test_one_channel_has_one_mean(shards):
    ddf = dii.read_webdataset_images(shards, size=16, mode="L", backend="pandas")
    (plain,), (ready,) = (
        list(ddf.images.iter_batches(100, normalize=normalize)) for normalize in (None, (0.4, 0.2))
    )
    np.testing.assert_allclose(ready["image"], expected(plain["image"], 0.4, 0.2), atol=2e-6)
    with pytest.raises(ArgumentError, match="3 means, and the images have 1 channels"):
        next(ddf.images.iter_batches(100, normalize=(MEAN, STD)))


def test_images_of_several_shapes_are_refused_by_name_of_size(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=20, resize="longer")
    with pytest.raises(ArgumentError, match=r"one shape, and a batch has .* read with size="):
        list(ddf.images.iter_batches(100, normalize=(MEAN, STD)))


def test_what_is_no_mean_and_deviation_is_refused(ddf):
    for wrong in [
        0.5,
        (0.5,),
        (0.5, 0),
        (0.5, -1),
        ("a", 1),
        ((0.1, 0.2), (1, 1, 1)),
        (np.nan, 1),
        ((), ()),
        5,
    ]:
        with pytest.raises(ArgumentError, match="pass \\(mean, std\\)"):
            ddf.images.iter_batches(5, normalize=wrong)


def test_means_of_values_up_to_255_are_refused_with_those_that_were_meant(ddf):
    for normalize, meant in [
        (((123, 116, 103), (58, 57, 57)), "((0.482, 0.455, 0.404), (0.227, 0.224, 0.224))"),
        ((127.5, 127.5), "((0.5,), (0.5,))"),
        (((0.5, 0.5, 1.1), 0.25), "((0.002, 0.002, 0.004), (0.001, 0.001, 0.001))"),
        ((0.5, 64), "((0.002,), (0.251,))"),
    ]:
        said = rf"values from 0 to 1, .* divide both by 255, {re.escape(meant)}"
        with pytest.raises(ArgumentError, match=said):
            ddf.images.iter_batches(5, normalize=normalize)


def test_zero_and_one_are_values_from_0_to_1(ddf):
    batch = next(ddf.images.iter_batches(5, normalize=((0, 1, 0), 1)))
    plain = next(ddf.images.iter_batches(5))
    np.testing.assert_allclose(batch["image"], expected(plain["image"], (0, 1, 0), 1), atol=2e-6)


@pytest.mark.torch
def test_a_tensor_is_what_torch_makes_by_itself(ddf):
    torch = pytest.importorskip("torch")
    mean, std = (torch.tensor(part)[:, None, None] for part in (MEAN, STD))
    plain = ddf.images.iter_batches(7, format="torch")
    ready = ddf.images.iter_batches(7, format="torch", normalize=(MEAN, STD))
    for one, other in zip(plain, ready, strict=True):
        made = (one["image"].permute(0, 3, 1, 2).float() / 255 - mean) / std
        torch.testing.assert_close(other["image"], made)
        assert other["image"].is_contiguous()


def test_channels_are_first_or_last_as_asked_for_by_views(ddf):
    half = (0.5, 0.5)
    (plain,), (first,), (ready,), (last,) = (
        list(ddf.images.iter_batches(100, columns=[], **options))
        for options in (
            {},
            {"channels_first": True},
            {"normalize": half, "channels_first": True},
            {"normalize": half, "channels_first": False},
        )
    )
    assert first["image"].dtype == np.uint8
    np.testing.assert_array_equal(first["image"], plain["image"].transpose(0, 3, 1, 2))
    np.testing.assert_allclose(ready["image"], expected(plain["image"], 0.5, 0.5), atol=2e-6)
    np.testing.assert_array_equal(last["image"], ready["image"].transpose(0, 2, 3, 1))
    assert not first["image"].flags.owndata


def test_channels_of_images_of_several_shapes_and_of_rows_are_first_too(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=20, resize="longer")
    (plain,), (first,), (shapes,) = (
        list(ddf.images.iter_batches(100, columns=[], **options))
        for options in (
            {},
            {"channels_first": True},
            {"channels_first": True, "collate_fn": lambda rows: [r["image"].shape for r in rows]},
        )
    )
    for image, other in zip(plain["image"], first["image"], strict=True):
        np.testing.assert_array_equal(image.transpose(2, 0, 1), other)
    assert shapes == [image.shape for image in first["image"]]
    with pytest.raises(ArgumentError, match="channels_first='yes'"):
        ddf.images.iter_batches(4, channels_first="yes")
