"""A row of an image column is an image; what pandas and dask do with such columns has an answer."""

from __future__ import annotations

import io
import pickle

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from cases import check_cases
from PIL import Image
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii
from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.image_dtype import DecodedImage

SHAPE = (2, 3, 3)
KEYS = [1, 2, 1, 3, 1]
HEIGHT = ("image", "int64[pyarrow]")


@pytest.fixture
def frame():
    """Images of the value of their key; that of key 2 is missing."""
    return small_frame(KEYS, SHAPE, bad={2})


@pytest.fixture
def lazy():
    """The same rows in three partitions, one of them empty."""
    parts = [small_frame(keys, SHAPE, bad={2}) for keys in ([1, 2, 1], [], [3, 1])]
    return lazy_frame(parts)


@pytest.fixture
def one(frame):
    return frame.image.iloc[0]


def values(column):
    """The value of each image's pixels, None where there is none."""
    return [None if image is pd.NA else int(np.asarray(image).flat[0]) for image in column]


class TestImage:
    def test_it_is_an_array_without_a_copy(self, frame, one):
        array = np.asarray(one)
        assert type(one) is DecodedImage
        assert one.shape == array.shape == SHAPE
        assert (one.dtype, one.ndim, one.size, one.nbytes) == (np.uint8, 3, 18, 18)
        assert np.shares_memory(array, frame.images.arrays()[0])
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, np.ones(SHAPE, np.uint8))
        assert one[0, 1].tolist() == [1, 1, 1]

    def test_numpy_asks_for_types_and_copies(self, one):
        as_float = np.asarray(one, dtype="float32")
        assert as_float.dtype == np.float32
        copy = np.array(one)
        copy[:] = 7
        assert values([one]) == [1]
        assert np.shares_memory(np.array(one, copy=False), np.asarray(one))
        with pytest.raises(ValueError, match="copy"):
            np.array(one, dtype="float32", copy=False)
        assert np.stack([one, one]).shape == (2, *SHAPE)
        assert np.mean(one) == 1

    def test_it_lives_as_long_as_its_pixels_are_used(self):
        image = small_frame(range(200), (40, 50, 3)).image.iloc[150]
        array = np.asarray(image)
        del image
        small_frame(range(200), (40, 50, 3))
        assert (array == 150).all()

    def test_it_shows_as_text_and_as_a_thumbnail(self):
        frame = small_frame([9], (300, 600, 3))
        image = frame.image.iloc[0]
        assert repr(image) == str(image) == "<image 300×600×3>"
        assert "<image 300×600×3>" in repr(frame)
        assert "&lt;image 300×600×3&gt;" in frame._repr_html_()
        with Image.open(io.BytesIO(image._repr_png_())) as thumbnail:
            assert thumbnail.size == (256, 128)
            assert thumbnail.getpixel((5, 5)) == (9, 9, 9)
        grey = small_frame([9], (5, 4, 1)).image.iloc[0]
        with Image.open(io.BytesIO(grey._repr_png_())) as thumbnail:
            assert thumbnail.mode == "L"
        assert small_frame([9], (5, 4, 2)).image.iloc[0]._repr_png_() is None

    def test_pillow_takes_it(self, one):
        assert Image.fromarray(one).size == (3, 2)

    def test_equal_images_are_equal_and_hash_alike(self, frame):
        first, _, again, other, _ = frame.image
        assert first == again
        assert first != other
        assert hash(first) == hash(again)
        assert len({first, again, other}) == 2
        assert first != small_frame([1], (3, 2, 3)).image.iloc[0]
        assert first != 1
        assert (first == np.asarray(again)).all()
        assert (np.asarray(again) == first).all()

    def test_it_is_pickled_without_its_column(self):
        image = small_frame(range(100), (100, 100, 3)).image.iloc[3]
        pickled = pickle.dumps(image)
        assert len(pickled) < 2 * image.nbytes
        assert pickle.loads(pickled) == image

    def test_it_is_one_value(self, one):
        assert not pd.api.types.is_list_like(one)
        assert pd.isna(one) is False
        with pytest.raises(TypeError):
            iter(one)


class TestColumn:
    """Of pandas."""

    def test_rows_come_out_as_images(self, frame, one):
        assert values(frame.image) == [1, None, 1, 3, 1]
        assert frame.iloc[0]["image"] == one
        assert frame.image.array[-1] == one
        assert frame.image.array[np.int64(0)] == one
        assert next(frame.iterrows())[1]["image"] == one
        assert next(frame.itertuples()).image == one
        assert frame.to_dict("records")[0]["image"] == one
        assert (
            values(frame.image.to_numpy()) == values(np.asarray(frame.image)) == values(frame.image)
        )
        assert frame.values.shape == (5, 2)
        with pytest.raises(IndexError):
            frame.image.array[5]

    def test_a_column_is_made_of_anything_that_is_an_image(self, one):
        picture = Image.new("L", (4, 5), 7)
        grey = np.full((5, 4), 7, np.uint8)
        column = pd.Series([one, None, grey, picture, pd.NA], dtype="image")
        assert [None if i is pd.NA else i.shape for i in column] == [
            SHAPE, None, (5, 4, 1), (5, 4, 1), None
        ]  # fmt: skip
        assert column.iloc[2] == column.iloc[3]
        frame = column.to_frame("image")
        assert frame.images.arrays()[2].shape == (5, 4, 1)
        stored = pd.arrays.ArrowExtensionArray(column.array._pa_array)
        assert pd.concat([column, pd.Series(stored)]).dtype == "image"

    def test_what_is_no_image_is_refused(self, frame):
        def check(value):
            with pytest.raises(OperandError, match="image"):
                pd.Series([value], dtype="image")
            with pytest.raises((OperandError, ValueError)):
                frame.image.array.copy()[0] = value
            assert values(frame.image) == [1, None, 1, 3, 1]

        check_cases(
            [5, "text", 1.5, [1], np.zeros((2, 2)), np.zeros(3, np.uint8), {"data": b""}, b"x"],
            check,
        )

    def test_values_are_set(self, frame, one):
        other = np.full((4, 4, 3), 8, np.uint8)
        column = frame.image.copy()
        column.iloc[3] = other
        column[column.isna()] = one
        assert values(column) == [1, 1, 1, 8, 1]
        column.iloc[0:2] = frame.image.iloc[[3, 1]].array
        assert values(column) == [3, None, 1, 8, 1]
        column.iloc[0] = None
        assert values(column) == [None, None, 1, 8, 1]
        changed = frame.copy()
        changed.loc[1, "image"] = one
        changed.at[0, "image"] = column.iloc[3]
        assert values(changed.image) == [8, 1, 1, 3, 1]
        assert values(frame.image) == [1, None, 1, 3, 1]

    def test_gaps_are_filled(self, frame, one):
        assert values(frame.image.fillna(one)) == [1, 1, 1, 3, 1]
        assert values(frame.fillna({"image": one}).image) == [1, 1, 1, 3, 1]
        assert values(frame.image.fillna(frame.image.shift(1))) == [1, 1, 1, 3, 1]
        assert values(frame.image.ffill()) == [1, 1, 1, 3, 1]
        assert values(frame.image.bfill()) == [1, 1, 1, 3, 1]
        assert values(frame.image.shift(1, fill_value=one)) == [1, 1, None, 1, 3]
        assert values(frame.reindex([3, 9]).image) == [3, None]
        assert values(frame.image.reindex([3, 9], fill_value=one)) == [3, 1]
        assert values(frame.image.where(frame.key > 1, one)) == [1, None, 1, 3, 1]
        assert values(frame.mask(frame.key == 3).image) == [1, None, 1, None, 1]
        with pytest.raises(OperandError, match="0 is no image"):
            frame.fillna(0)

    def test_equality_is_that_of_each_row(self, frame, one):
        assert (frame.image == frame.image).tolist() == [True, pd.NA, True, True, True]
        assert (frame.image == one).tolist() == [True, pd.NA, True, False, True]
        assert (frame.image != one).tolist() == [False, pd.NA, False, True, False]
        assert frame[frame.image == one].key.tolist() == [1, 1, 1]
        assert (frame.image == "text").tolist() == [False, pd.NA, False, False, False]
        assert frame.image.isin([one]).tolist() == [True, False, True, False, True]
        assert frame.image.isin([5, None]).tolist() == [False, True, False, False, False]
        assert one in frame.image.array
        assert frame.equals(frame.copy())
        pd.testing.assert_frame_equal(frame, frame.copy())
        with pytest.raises(AssertionError):
            pd.testing.assert_frame_equal(frame, frame.assign(image=frame.image[::-1].array))

    def test_equal_images_are_found(self, frame):
        assert values(frame.image.unique()) == [1, None, 3]
        assert frame.image.nunique() == 2
        assert frame.drop_duplicates().key.tolist() == [1, 2, 3]
        assert frame.drop_duplicates("image", keep="last").key.tolist() == [2, 3, 1]
        assert frame.duplicated().tolist() == [False, False, True, False, True]
        counts = frame.image.value_counts()
        assert dict(zip(values(counts.index), counts, strict=True)) == {1: 3, 3: 1}
        assert frame.image.value_counts(dropna=False).tolist() == [3, 1, 1]
        sizes = frame.groupby("image").size()
        assert dict(zip(values(sizes.index), sizes, strict=True)) == {1: 3, 3: 1}
        assert values(frame.image.mode()) == [1]
        assert frame.set_index("image").loc[frame.image.iloc[3]].tolist() == [3]

    def test_rows_of_other_shapes_are_other_images(self):
        flat = small_frame([1], (1, 12, 3)).image
        both = pd.concat([flat, small_frame([1], (12, 1, 3)).image])
        assert both.nunique() == 2
        assert flat.nunique() == 1

    def test_describe_counts_images(self, frame, one):
        told = frame.describe(include="all")["image"]
        assert told[["count", "unique", "freq"]].tolist() == [4, 2, 3]
        assert told["top"] == one
        assert "image" not in frame.describe()

    def test_groups_of_another_column_have_images(self, frame):
        groups = frame.groupby("key")
        assert values(groups.first().image) == [1, None, 3]
        assert values(groups.image.last()) == [1, None, 3]
        assert groups.image.count().tolist() == [3, 0, 1]
        assert groups.image.nunique().tolist() == [1, 0, 1]
        with pytest.raises(OperandError, match="no sum"):
            groups.sum()

    def test_functions_get_images(self, frame):
        means = frame.image.map(lambda image: np.asarray(image).mean(), na_action="ignore")
        assert means.tolist() == [1.0, pd.NA, 1.0, 3.0, 1.0]
        assert frame.dropna().image.apply(lambda image: image.shape[1]).tolist() == [3] * 4
        # pandas 3.0 makes objects of what a function gives.
        assert values(frame.image.apply(lambda image: image).astype("image")) == [1, None, 1, 3, 1]
        assert frame.explode("image").image.dtype == "image"

    def test_text_and_objects(self, frame):
        assert frame.image.astype(str).tolist()[:1] == ["<image 2×3×3>"]
        assert frame.image.astype("string[pyarrow]").isna().tolist() == [False, True] + [False] * 3
        assert values(frame.image.astype(object)) == [1, None, 1, 3, 1]
        assert len(frame.image.astype("category").cat.categories) == 2
        assert ",<image 2×3×3>" in frame.to_csv()

    def test_what_images_do_not_have_is_an_error_of_ours(self, frame):
        def check(operation):
            with pytest.raises(dii.ArgumentError, match="images"):
                operation(frame.image)

        check_cases(
            [
                lambda s: s + 1,
                lambda s: 1 - s,
                lambda s: -s,
                lambda s: ~s,
                lambda s: s & True,
                lambda s: s < s,
                lambda s: s.abs(),
                lambda s: s.sum(),
                lambda s: s.mean(),
                lambda s: s.min(),
                lambda s: s.any(),
                lambda s: s.std(),
                lambda s: s.idxmax(),
                lambda s: s.cumsum(),
                lambda s: s.diff(),
                lambda s: s.rank(),
                lambda s: s.quantile(),
                lambda s: s.clip(0, 1),
                lambda s: s.between(0, 1),
                lambda s: s.interpolate(),
                lambda s: s.sort_values(),
                lambda s: s.argsort(),
                lambda s: s.searchsorted(s.iloc[0]),
                lambda s: s.astype(int),
                lambda s: s.to_numpy(float),
                lambda s: np.sqrt(s),
                lambda s: s.to_frame().sort_values("image"),
                lambda s: s.to_frame().sum(),
            ],
            check,
        )

    def test_frames_with_images_have_no_ranks(self, frame, one):
        for columns in (["image"], ["key", "image"]):
            with pytest.raises(dii.ArgumentError, match="images have no order"):
                frame[columns].rank()
        assert frame.rank(numeric_only=True).columns.tolist() == ["key"]
        with pytest.raises(dii.ArgumentError, match="images have no order"):
            max(one, frame.image.iloc[3])
        assert (np.zeros(SHAPE) < one).all()

    def test_types_are_converted_beside_images(self, frame):
        converted = frame.convert_dtypes(dtype_backend="pyarrow")
        assert converted.dtypes["image"] == frame.dtypes["image"]

    def test_hashes_are_those_of_the_content(self, frame):
        hashes = pd.util.hash_pandas_object(frame.image, index=False)
        assert hashes[0] == hashes[2] == hashes[4]
        assert hashes.nunique() == 3
        again = pickle.loads(pickle.dumps(frame.image.iloc[[3, 0]]))
        assert pd.util.hash_pandas_object(again, index=False).tolist() == hashes[[3, 0]].tolist()


class TestDask:
    def test_equality_and_duplicates(self, lazy, one):
        assert (lazy.image == lazy.image).compute().tolist() == [True, pd.NA, True, True, True]
        assert lazy[lazy.image == one].key.compute().tolist() == [1, 1, 1]
        assert sorted(lazy.drop_duplicates().key.compute()) == [1, 2, 3]
        assert sorted(lazy.drop_duplicates(split_out=2).key.compute()) == [1, 2, 3]
        assert lazy.image.nunique().compute() == 2
        counts = lazy.image.value_counts().compute()
        assert dict(zip(values(counts.index), counts, strict=True)) == {1: 3, 3: 1}
        sizes = lazy.groupby("image").size().compute()
        assert dict(zip(values(sizes.index), sizes, strict=True)) == {1: 3, 3: 1}
        assert values(lazy.image.unique().compute())[0] == 1

    @pytest.mark.filterwarnings("ignore:The behavior:FutureWarning")
    def test_describe_and_groups(self, lazy, one):
        told = lazy.describe(include="all").compute()["image"]
        assert told[["count", "unique", "freq"]].tolist() == [4, 2, 3]
        assert told["top"] == one
        assert values(lazy.groupby("key").first().compute().image) == [1, None, 3]
        assert lazy.groupby("key").image.count().compute().tolist() == [3, 0, 1]

    def test_gaps_functions_and_joins(self, lazy, one):
        assert values(lazy.fillna({"image": one}).compute().image) == [1, 1, 1, 3, 1]
        heights = lazy.image.map(
            lambda image: image.shape[0], na_action="ignore", meta=HEIGHT
        ).compute()
        assert heights.tolist() == [2, pd.NA, 2, 2, 2]
        assert values(dd.concat([lazy, lazy]).compute().image) == [1, None, 1, 3, 1] * 2
        shuffled = lazy.shuffle("image", npartitions=3)
        parts = [values(part.compute().image) for part in shuffled.partitions]
        assert sum(1 in part for part in parts) == 1
        assert len(lazy.dropna()) == 4

    def test_what_images_do_not_have_is_an_error_of_ours(self, lazy):
        def check(operation):
            with pytest.raises(dii.ArgumentError, match="image"):
                operation(lazy).compute()

        check_cases(
            [
                lambda d: d.image + 1,
                lambda d: d.image.mean(),
                lambda d: d.image < d.image,
                lambda d: d.sort_values("image"),
                lambda d: d.image.quantile(0.5),
                lambda d: d.image.cumsum(),
                lambda d: d.image.astype(int),
                lambda d: d.fillna(0),
                lambda d: d.sum(),
            ],
            check,
        )


class TestLists:
    """Columns of vectors have the same answers."""

    @pytest.fixture
    def lists(self):
        rows = [[1.0, 2.0], None, [1.0, 2.0], [3.0]]
        return pd.DataFrame({"key": [1, 2, 1, 3], "v": pd.array(rows, dtype="list<float32>")})

    def test_rows_are_compared_counted_and_set(self, lists):
        assert (lists.v == lists.v).tolist() == [True, pd.NA, True, True]
        assert lists.drop_duplicates().key.tolist() == [1, 2, 3]
        assert lists.v.value_counts().tolist() == [2, 1]
        assert lists.describe(include="all")["v"][["count", "unique"]].tolist() == [3, 2]
        assert lists.groupby("key").first().v.tolist() == [[1.0, 2.0], pd.NA, [3.0]]
        assert lists.v.explode().tolist() == [1.0, 2.0, pd.NA, 1.0, 2.0, 3.0]
        column = lists.v.copy()
        column.iloc[1] = [9]
        assert column.tolist() == [[1.0, 2.0], [9.0], [1.0, 2.0], [3.0]]
        assert lists.v.map(len, na_action="ignore").tolist() == [2, pd.NA, 2, 1]

    @pytest.mark.parametrize(
        "operation",
        [
            lambda s: s + 1,
            lambda s: s.mean(),
            lambda s: s.sort_values(),
            lambda s: s.astype(float),
            lambda s: s.rank(),
            lambda s: pd.Series(["text"], dtype=s.dtype),
        ],
    )
    def test_what_lists_do_not_have_is_an_error_of_ours(self, lists, operation):
        with pytest.raises(dii.ArgumentError, match="lists"):
            operation(lists.v)


def test_the_column_is_still_arrow(frame):
    assert pa.array(frame.image).type == frame.image.dtype.pyarrow_dtype
    assert frame.image.struct.field("height").tolist() == [2, pd.NA, 2, 2, 2]


def test_rows_of_large_images_are_taken_as_pandas_takes_others():
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (300 + n, 301, 3), np.uint8) for n in range(6)]
    column = pd.Series([*images[:4], None, images[5]], dtype="image")
    column = pd.concat([column, column.iloc[3:]], ignore_index=True)
    numbers = pd.Series([0, 1, 2, 3, 4, 5, 3, 4, 5], dtype="int64[pyarrow]")

    def check(operation):
        taken, want = operation(column), operation(numbers)
        assert taken.index.equals(want.index)
        for image, number in zip(taken, want, strict=True):
            if pd.isna(number) or number == 4:
                assert pd.isna(image)
            else:
                np.testing.assert_array_equal(np.asarray(image), images[number])

    check(lambda series: series.iloc[[5, -1, 4, 0, 0]])
    check(lambda series: series[[True, False, False, True, True] + [False] * 4])
    check(lambda series: series.iloc[2:8].iloc[::-2])
    check(lambda series: series.reindex([8, 99, 1]))
    check(lambda series: series[numbers > 99])
    with pytest.raises(IndexError):
        column.array.take([0, 99])
