"""What ``.images`` and its batches say of themselves, without computing anything."""

from __future__ import annotations

import pytest
from counted import work  # noqa: F401  a fixture
from small_frames import small_frame

import dask_image_ingest as dii


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, size=(20, 30), columns=["cls", "image"])


def test_columns_are_told_without_computing_anything(ddf, work):  # noqa: F811
    assert repr(ddf.images) == "<images in column 'image'; columns 'cls', 'image'>"
    assert not work
    assert repr(small_frame([1]).images) == "<images in column 'image'; columns 'key', 'image'>"


def test_a_frame_without_images_says_what_is_missing(ddf):
    assert repr(ddf[["cls"]].images).startswith("<images of 'cls': the frame has no column of imag")


def test_references_are_said_to_be_references(shards):
    refs = dii.read_webdataset_images(shards, decode=False, columns=["cls", "image"])
    assert repr(refs.images).startswith("<images of 'cls', 'image': the frame has references, not")
    assert repr(refs.head(1).images).startswith("<images of 'cls', 'image': the frame has refer")
    with pytest.raises(dii.ArgumentError, match=r"not decoded, in 'image'.*decode_imag"):
        refs.images.stack()


def test_a_lazy_frame_lists_no_method_that_it_has_not(ddf):
    assert "arrays" not in dir(ddf.images)
    assert "arrays" in dir(ddf.head(1).images)
    with pytest.raises(AttributeError, match=r"no pixels yet: call \.compute\(\)\.images"):
        ddf.images.arrays()
    with pytest.raises(AttributeError, match="has no 'stak'"):
        ddf.images.stak()


def test_batches_tell_their_size_their_columns_and_where_they_are(ddf, work):  # noqa: F811
    batches = ddf.images.iter_batches(5)
    assert repr(batches) == "<batches of 5 rows; epoch 0; numpy of columns 'image', 'cls'>"
    assert not work
    next(batches)
    assert "; at row 5; " in repr(batches)
    for _ in batches:
        pass
    assert "; at the end; " in repr(batches)
    assert "; shuffle=7; " in repr(ddf.images.iter_batches(5, shuffle=7))
