"""Encoded images in a column of any frame become images: as bytes, or as Hugging Face has them."""

import io

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from counted import work  # noqa: F401
from PIL import Image, ImageOps

import dask_image_ingest as dii

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(scope="module")
def encoded(photos):
    """Ten photographs, one that is cut, one that is no image, one that is not there."""
    images = [photo.encoded for photo in photos[:10]]
    return [*images, images[0][:-200], b"<html>", None]


@pytest.fixture(scope="module")
def pixels(photos):
    return [photo.pixels for photo in photos[:10]]


def as_struct(encoded):
    return [{"bytes": data, "path": f"{n:03d}.jpg"} for n, data in enumerate(encoded)]


COLUMNS = {
    "binary": lambda e: pd.Series(pd.array(e, dtype=pd.ArrowDtype(pa.binary()))),
    "large_binary": lambda e: pd.Series(pd.array(e, dtype=pd.ArrowDtype(pa.large_binary()))),
    "objects": lambda e: pd.Series(e, dtype=object),
    "struct": lambda e: pd.Series(pd.array(as_struct(e), dtype=pd.ArrowDtype(STRUCT))),
    "dicts": lambda e: pd.Series(as_struct(e), dtype=object),
    # What cuDF has in the place of bytes.
    "lists": lambda e: pd.Series(
        pd.array(
            [None if each is None else list(each) for each in e],
            dtype=pd.ArrowDtype(pa.list_(pa.uint8())),
        )
    ),
}


def frame_of(encoded, kind="binary"):
    frame = pd.DataFrame({"jpg": COLUMNS[kind](encoded)})
    return frame.assign(number=np.arange(len(frame)))


def check(frame, pixels):
    assert frame.number.tolist() == list(range(13))
    for array, expected in zip(frame.images.arrays()[:10], pixels, strict=True):
        assert array.shape == expected.shape
        # DALI and Pillow round the inverse transform and the chroma each in their own way.
        assert np.abs(array.astype(int) - expected).mean() < 1
    assert frame.error[:10].isna().all()
    told = [error.partition(":")[0] for error in frame.error[10:]]
    assert told == ["truncated", "not-an-image", "missing"]
    assert frame.image[10:].isna().all()


@pytest.mark.parametrize("kind", COLUMNS)
def test_each_kind_of_column_gives_the_images_and_the_errors(kind, encoded, pixels):
    check(dii.decode_images(frame_of(encoded, kind), image={"image": "jpg"}), pixels)


@pytest.mark.parametrize("kind", ["binary", "large_binary", "struct"])
def test_a_lazy_frame_gives_the_same_from_any_partitions(kind, encoded, pixels):
    lazy = dd.from_pandas(frame_of(encoded, kind), npartitions=3)
    check(dii.decode_images(lazy, image={"image": "jpg"}).compute(), pixels)


def test_python_objects_of_a_lazy_frame_are_read_where_dask_leaves_them_be(encoded, pixels):
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_pandas(frame_of(encoded, "objects"), npartitions=2)
        check(dii.decode_images(lazy, image={"image": "jpg"}).compute(), pixels)


def test_exif_orientation_is_as_pillow_turns_it():
    picture = Image.linear_gradient("L").convert("RGB").resize((64, 40))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=95, exif=exif)
    (array,) = dii.decode_images(
        frame_of([file.getvalue()]), image={"image": "jpg"}
    ).images.arrays()
    assert array.shape == (64, 40, 3)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)).convert("RGB"))
    assert np.abs(array.astype(int) - expected).mean() < 1


def test_a_column_called_image_is_replaced_and_others_stay(encoded):
    frame = frame_of(encoded).rename(columns={"jpg": "image"})
    assert list(dii.decode_images(frame, image="image").columns) == ["image", "number", "error"]
    frame = frame_of(encoded)
    columns = ["jpg", "number", "error", "image"]
    assert list(dii.decode_images(frame, image={"image": "jpg"}).columns) == columns
    lazy = dii.decode_images(dd.from_pandas(frame, npartitions=2), image={"image": "jpg"})
    assert list(lazy.columns) == columns


@pytest.mark.parametrize("lazy", [False, True])
def test_images_go_into_a_column_of_any_name_beside_others(encoded, pixels, lazy, tmp_path):
    frame = frame_of(encoded).assign(png=COLUMNS["binary"](encoded[::-1]))
    frame = dd.from_pandas(frame, npartitions=3) if lazy else frame
    first = dii.decode_images(frame, image={"image": "jpg"})
    both = dii.decode_images(first, image={"turned": "png"})
    both = dii.decode_images(both, image="jpg", errors="drop")
    made = ["jpg", "number", "png", "error", "image", "turned.error", "turned", "jpg.error"]
    assert list(both.columns) == made
    kept = both.compute() if lazy else both
    assert kept.number.tolist() == list(range(10))
    assert kept["error"].isna().all()
    assert kept["turned.error"].notna().tolist() == [True] * 3 + [False] * 7
    images = (kept.images[name].arrays() for name in ("image", "jpg", "turned"))
    for number, (one, other, turned) in enumerate(zip(*images, strict=True)):
        assert np.array_equal(one, other)
        assert turned is None if number < 3 else turned.shape == pixels[12 - number].shape
    for wrong in ({}, {3: "jpg"}, {"": "jpg"}, {"a": "jpg", "b": "png"}, [], ["jpg", "png"]):
        with pytest.raises(dii.ArgumentError, match="image="):
            dii.decode_images(frame, image=wrong)


def test_filters_and_columns_go_below_the_decode(encoded, work):  # noqa: F811
    lazy = dii.decode_images(
        dd.from_pandas(frame_of(encoded), npartitions=3), image={"image": "jpg"}
    )
    assert lazy[lazy.number < 5].number.sum().compute() == 10
    assert len(lazy) == 13
    assert work["decoded"] == 0
    assert len(lazy[lazy.number < 5].compute()) == 5
    assert work["decoded"] == 5


def test_images_are_decoded_after_a_shuffle_and_a_sort(encoded, pixels):
    lazy = dii.decode_images(
        dd.from_pandas(frame_of(encoded), npartitions=3), image={"image": "jpg"}
    )
    shuffled = lazy.sort_values("number", ascending=False)
    frame = shuffled.compute().sort_values("number")
    check(frame, pixels)


@pytest.mark.parametrize("errors", ["drop", "raise"])
def test_bad_images_are_dropped_or_raised(errors, encoded):
    frame = frame_of(encoded, "struct")
    if errors == "drop":
        assert len(dii.decode_images(frame, image={"image": "jpg"}, errors="drop")) == 10
    else:
        with pytest.raises(dii.ImageDecodeError, match=r"^the image of sample '010.jpg'.*trunc"):
            dii.decode_images(frame, image={"image": "jpg"}, errors="raise")


def test_a_row_is_named_by_its_key_before_its_path(encoded):
    frame = frame_of(encoded, "struct").assign(__key__=lambda f: "k" + f.number.astype(str))
    with pytest.raises(dii.ImageDecodeError, match="sample 'k10'"):
        dii.decode_images(frame, image={"image": "jpg"}, errors="raise")


@pytest.mark.parametrize(
    ("column", "message"),
    [("number", r"holds no encoded images.*astype"), ("png", "frame has 'jpg', 'number'")],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_other_columns_are_refused(column, message, lazy, encoded):
    frame = frame_of(encoded)
    with pytest.raises(dii.ArgumentError, match=message):
        dii.decode_images(
            dd.from_pandas(frame, npartitions=2) if lazy else frame, image={"image": column}
        )


def test_a_struct_that_is_null_is_a_missing_image(encoded):
    values = pd.array([None, *as_struct(encoded[:1])], dtype=pd.ArrowDtype(STRUCT))
    decoded = dii.decode_images(pd.DataFrame({"jpg": values}), image={"image": "jpg"})
    assert decoded.image.isna().tolist() == [True, False]
    assert decoded.error[0].startswith("missing")


def test_equal_images_are_decoded_once(encoded, work):  # noqa: F811
    frame = pd.concat([frame_of(encoded[:2])] * 3)
    arrays = dii.decode_images(frame, image={"image": "jpg"}).images.arrays()
    assert work["decoded"] == 2
    assert np.array_equal(arrays[0], arrays[4])
    assert arrays[0].shape != arrays[1].shape


def test_an_empty_frame_gives_an_empty_frame(encoded):
    made = dii.decode_images(frame_of(encoded)[:0], image={"image": "jpg"})
    assert len(made) == 0
    assert list(made.columns) == ["jpg", "number", "error", "image"]


def test_random_numbers_are_those_of_the_image_wherever_its_row_is(encoded):
    from nvidia.dali import fn

    def turned(images):
        return fn.rotate(images, angle=fn.random.uniform(range=(-90, 90)), keep_size=True)

    frame = frame_of(encoded[:10])
    options = {"image": {"image": "jpg"}, "size": 32, "transform": turned}
    one = dii.decode_images(frame, **options).images.arrays()
    other = dii.decode_images(frame[::-1], **options).images.arrays()[::-1]
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    same = pd.concat([frame_of(encoded[:1])] * 2)
    first, second = dii.decode_images(same, **options).images.arrays()
    assert np.array_equal(first, second)
    # Each image its own numbers: with those of the first one for all, it would be turned alike.
    angles = {array[0, 0].tobytes() for array in one}
    assert len(angles) > 1
