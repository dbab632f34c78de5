"""Columns may have any names that pandas gives; one that is there twice is refused by name."""

from __future__ import annotations

import datetime

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii


@pytest.fixture
def frame():
    made = small_frame([1, 2, 3, 4], (8, 9, 3), bad=[2])
    return made.assign(v=pd.array([[n, n + 0.5] for n in range(4)], dtype="list<float32>"))


@pytest.fixture(params=["eager", "lazy"])
def lazy_or_not(request):
    """What makes either kind of an eager frame."""
    return (lambda frame: frame) if request.param == "eager" else (lambda f: lazy_frame([f, f[:2]]))


def brightness(images):
    return images.mean(axis=(1, 2, 3))


def computed(value):
    return value.compute(scheduler="sync") if hasattr(value, "compute") else value


def assert_same(one, other):
    """Two results are alike, images by their pixels."""
    one, other = computed(one), computed(other)
    if isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
        return
    if isinstance(one, pd.Series) and one.dtype == "binary[pyarrow]":
        assert one.tolist() == other.tolist()
        return
    assert one.astype("string").equals(other.astype("string"))


METHODS = {
    "thumbnails": lambda images: images.thumbnails(4),
    "one column of thumbnails": lambda images: images.thumbnails(4)[["key"]],
    "encode": lambda images: images.encode("png"),
    "map_batches": lambda images: images.map_batches(brightness, {"m": "float32"}),
    "keep_image": lambda images: images.map_batches(brightness, {"m": "float32"}, keep_image=True)[
        images.column
    ],
    "an image output": lambda images: images.map_batches(lambda x: x * 2, {"o": "image"}),
    "channel_stats": lambda images: images.channel_stats(),
}


@pytest.mark.parametrize("name", [0, 2.5, np.int64(3)])
def test_names_that_are_no_strings(frame, lazy_or_not, name):
    for method in METHODS.values():
        made = method(lazy_or_not(frame.rename(columns={"image": name})).images)
        usual = computed(method(lazy_or_not(frame).images))
        if isinstance(usual, pd.DataFrame):
            usual = usual.rename(columns={"image": name})
        elif isinstance(usual, pd.Series):
            assert computed(made).name == name
        assert_same(made, usual)


def test_names_that_are_tuples_or_dates(frame):
    for name in ((1, 2), datetime.date(2020, 1, 1)):
        renamed = frame.rename(columns={"image": name})
        small = renamed.images.thumbnails(4)
        assert list(small.columns) == list(renamed.columns)
        assert_same(small[name], frame.images.thumbnails(4)["image"])
        assert renamed.images.encode("png").name == name


def test_vectors_and_batches_of_columns_with_numbers_as_names(frame, lazy_or_not):
    renamed = lazy_or_not(frame.rename(columns={"image": 0, "v": 1}))
    assert_same(renamed.images.vectors(1), lazy_or_not(frame).images.vectors("v"))
    batches = list(renamed.images.iter_batches(2))
    assert all(batch.keys() == {"key", 0, 1} for batch in batches)
    assert sum(len(batch[0]) for batch in batches) == (
        3 if isinstance(renamed, pd.DataFrame) else 4
    )


class TestTwice:
    @pytest.fixture
    def twice(self, frame, lazy_or_not):
        return lazy_or_not(pd.concat([frame, frame[["key"]]], axis=1))

    @pytest.mark.parametrize(
        "method",
        [
            lambda images: images.thumbnails(4),
            lambda images: images.map_batches(brightness, {"m": "float32"}),
            lambda images: images.iter_batches(2),
            lambda images: images.vectors("key"),
            lambda images: images.show(2, columns="key"),
        ],
    )
    def test_a_column_that_is_there_twice_is_refused_by_name(self, twice, method):
        with pytest.raises(dii.ArgumentError, match="the frame has 2 columns 'key': rename or dr"):
            method(twice.images)

    def test_the_others_can_be_used(self, twice):
        assert computed(twice.images.vectors("v")).shape[1] == 2
        assert next(iter(twice.images.iter_batches(2, columns=["v"]))).keys() == {"image", "v"}
        assert len(computed(twice.images.encode("png"))) in (4, 6)


class TestVectors:
    @pytest.mark.parametrize("kind", ["list", "large_list"])
    def test_of_either_kind_of_list(self, frame, lazy_or_not, kind):
        made = lazy_or_not(frame.assign(v=frame.v.astype(f"{kind}<float64>")))
        got = computed(made.images.vectors("v"))
        assert got[:4].tolist() == [[n, n + 0.5] for n in range(4)]
        none = computed(made[made.key > 9].images.vectors("v"))
        assert none.ndim == 2
        assert len(none) == 0

    @pytest.mark.parametrize("column", ["key", "text", "texts", "pairs", "image"])
    def test_what_is_no_column_of_vectors_is_refused_at_once(self, frame, lazy_or_not, column):
        other = frame.assign(
            text=pd.array([*"abcd"], "string[pyarrow]"),
            texts=pd.array([["a", "b"]] * 4, dtype="list<string>"),
            pairs=pd.array([[[1], [2]]] * 4, dtype="list<list<int8>>"),
        )
        for rows in (other, other[:0]):
            with pytest.raises(dii.ArgumentError, match="is no column of lists of numbers"):
                lazy_or_not(rows).images.vectors(column)  # and computes nothing

    def test_a_lazy_frame_computes_nothing_for_that(self, frame):
        lazy = lazy_frame([frame], fails=[0])
        assert isinstance(lazy, dd.DataFrame)
        with pytest.raises(dii.ArgumentError, match="no column of lists"):
            lazy.images.vectors("key")
