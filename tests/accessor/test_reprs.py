"""What ``.images`` and its batches say of themselves, without computing anything."""

from __future__ import annotations

import pytest
from counted import work  # noqa: F401  a fixture
from small_frames import small_frame

import dask_image_ingest as dii


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, size=(20, 30), columns=["cls", "image"])


def test_a_lazy_frame_tells_partitions_shape_and_columns(ddf, work):  # noqa: F811
    assert repr(ddf.images) == (
        "<images in column 'image'; 3 partitions; 20 × 30 × 3; decoded when computed; "
        "columns 'cls', 'image'>"
    )
    assert "; 1 partitions; " in repr(ddf.partitions[:1].images)
    assert not work


def test_shapes_that_differ_and_frames_that_are_computed_say_so(ddf, shards):
    assert "; ? × ? × 3; decoded when" in repr(dii.read_webdataset_images(shards).images)
    assert "20 × 30 × 3; made by the tasks of the frame" in repr(ddf.persist().images)


def test_an_eager_frame_tells_rows_and_bytes():
    frame = small_frame([1, 2, 3], (4, 5, 3), bad=[2])
    assert repr(frame.images) == (
        "<images in column 'image'; 3 rows, 1 without an image; 4 × 5 × 3; 120 bytes of pixels; "
        "columns 'key', 'image'>"
    )


def test_a_frame_without_images_says_what_is_missing(ddf):
    assert repr(ddf[["cls"]].images).startswith("<images of 'cls': the frame has no column of imag")


def test_references_are_said_to_be_references(shards):
    refs = dii.read_webdataset_images(shards, decode=False, columns=["cls", "image"])
    assert repr(refs.images).startswith("<images of 'cls', 'image': the frame has references, not")
    assert repr(refs.head(1).images).startswith("<images of 'cls', 'image': the frame has refer")
    with pytest.raises(dii.ArgumentError, match=r"not decoded, in 'image'.*decode_imag"):
        refs.images.stack()


def test_rows_are_told_where_they_are_known(photos, tmp_path, work):  # noqa: F811
    for number, photo in enumerate(photos[:5]):
        (tmp_path / f"{number}.{photo.extension}").write_bytes(photo.encoded)
    assert "partitions; 5 rows; " in repr(dii.read_images(tmp_path).images)
    assert not work


def test_a_lazy_frame_lists_no_method_that_it_has_not(ddf):
    assert "arrays" not in dir(ddf.images)
    assert "arrays" in dir(ddf.head(1).images)
    with pytest.raises(AttributeError, match=r"no pixels yet: call \.compute\(\)\.images"):
        ddf.images.arrays()
    with pytest.raises(AttributeError, match="has no 'stak'"):
        ddf.images.stak()


def test_batches_tell_their_size_their_columns_and_where_they_are(ddf, work):  # noqa: F811
    batches = ddf.images.iter_batches(5)
    assert repr(batches) == (
        "<batches of 5 rows; 3 partitions; epoch 0; from batch 0 on; images 'image', 20 × 30 × 3, "
        "numpy; columns 'cls'>"
    )
    assert not work
    next(batches)
    assert "; at row 5; " in repr(batches)
    for _ in batches:
        pass
    assert "; at the end; " in repr(batches)
    options = {"shuffle": 7, "normalize": (0.5, 0.5), "columns": [], "start": 2}
    assert repr(ddf.images.iter_batches(5, **options)) == (
        "<batches of 5 rows; 3 partitions; shuffle=7; epoch 0; from batch 2 on; "
        "images 'image', 20 × 30 × 3, numpy, normalized>"
    )
    for_ever = ddf.images.iter_batches(5, shuffle=7, repeat=True)
    assert "; epoch 0; for ever; " in repr(for_ever)
