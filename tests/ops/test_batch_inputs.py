"""What a function of ``map_batches`` gets of the columns that ``inputs=`` names."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from counted import work  # noqa: F401  a fixture
from photo_shards import write_tar
from small_frames import small_frame

import dask_image_ingest as dii
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.frames import parse_type
from dask_image_ingest.frames.pandas_backend import pandas_type

BOXES = [[[0, 0, 20, 10], [5, 5, 15, 45]], [], None, [[1, 2, 31, 42]], [[0, 0, 8, 8]]]


@pytest.fixture(scope="module")
def boxed(photos, tmp_path_factory):
    """Five samples with captions and boxes in their JSON; the fourth has no readable image."""
    members = {}
    for number, boxes in enumerate(BOXES):
        photo = photos[number]
        encoded = b"no image" if number == 3 else photo.encoded
        members[f"{number}.{photo.extension}"] = encoded
        if number != 1:
            members[f"{number}.txt"] = photo.caption.encode()
        members[f"{number}.json"] = json.dumps({"boxes": boxes, "n": number}).encode()
    return write_tar(tmp_path_factory.mktemp("boxed") / "boxed.tar", members)


@pytest.fixture
def ddf(boxed):
    fields = {"boxes": "list<list<float32>>", "n": "int32"}
    return dii.read_webdataset_images(boxed, json_fields=fields, backend="pandas")


class Recorded:
    """A function that keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return np.arange(len(arguments[0]))


def column(values, type_):
    return pd.Series(pandas_type(type_).__from_arrow__(pa.array(values, type_)))


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_a_function_gets_the_columns_in_the_order_of_inputs(ddf, photos, kind):
    frame = ddf if kind == "lazy" else ddf.compute()
    told = Recorded()
    made = frame.images.map_batches(
        told, {"o": "int64"}, inputs=("txt", "image", "json.boxes", "json.n"), batch_size=3
    )
    made = made.compute() if kind == "lazy" else made
    first, second = told.calls
    captions, images, boxes, numbers = (
        [*first[0], *second[0]], [*first[1], *second[1]], [*first[2], *second[2]],
        np.concatenate([first[3], second[3]]),
    )  # fmt: skip
    rows = [0, 1, 2, 4]
    assert captions == [None if row == 1 else photos[row].caption for row in rows]
    assert [image.shape for image in images] == [photos[row].pixels.shape for row in rows]
    for image, row in zip(images, rows, strict=True):
        assert abs(image.astype(int) - photos[row].pixels).mean() < 3
    assert numbers.dtype == np.int32
    assert numbers.tolist() == rows
    assert [None if each is None else each.tolist() for each in boxes] == [BOXES[r] for r in rows]
    assert {each.dtype for each in boxes if each is not None} == {np.dtype("float32")}
    assert boxes[1].shape == (0, 0)
    assert made["o"].fillna(-1).tolist() == [0, 1, 2, -1, 0]
    assert "image" not in made.columns


@pytest.mark.parametrize(
    ("type_", "rows", "shape"),
    [
        ("list<list<int16>>", [[[1, 2, 3, 4]], [], [[1], [2, 3]], [[]]], (0, 0)),
        ("list<float32>", [[1.5], [], [2, 3]], (0,)),
        ("list<list<list<bool>>>", [[[[True]]], [], [[], []]], (0, 0, 0)),
    ],
)
def test_a_row_is_the_same_array_whatever_its_neighbours_are(type_, rows, shape):
    values = column(rows, parse_type(type_))
    alone = []
    for row in range(len(rows)):
        told = Recorded()
        frame = pd.DataFrame({"boxes": values.iloc[[row]].reset_index(drop=True)})
        frame.images.map_batches(told, {"o": "int64"}, inputs=["boxes"])
        alone += told.calls[0][0]
    for part in (slice(0, 2), slice(1, None), slice(None)):
        told = Recorded()
        frame = pd.DataFrame({"boxes": values.iloc[part].reset_index(drop=True)})
        frame.images.map_batches(told, {"o": "int64"}, inputs=["boxes"])
        for together, single in zip(told.calls[0][0], alone[part], strict=True):
            np.testing.assert_equal(together, single)
            for attribute in ("shape", "dtype"):
                assert getattr(together, attribute, 0) == getattr(single, attribute, 0)
    assert alone[1].shape == shape


def test_rows_without_an_image_are_none_where_the_function_wants_them(ddf):
    told = Recorded()
    made = ddf.images.map_batches(
        told, {"o": "int64"}, inputs=["image", "json.n"], skip_missing=False
    ).compute()
    ((images, numbers),) = told.calls
    assert [image is None for image in images] == [False, False, False, True, False]
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert made["o"].tolist() == [0, 1, 2, 3, 4]


def test_images_of_one_shape_are_one_array_beside_other_columns(boxed):
    ddf = dii.read_webdataset_images(boxed, size=16, backend="pandas")
    told = Recorded()
    ddf.images.map_batches(told, {"o": "int64"}, inputs=["image", "txt"]).compute()
    assert told.calls[0][0].shape == (4, 16, 16, 3)


def test_only_inputs_and_what_is_kept_are_read(ddf, work):  # noqa: F811
    mapped = ddf.images.map_batches(Recorded(), {"o": "int64"}, inputs=["image", "txt"])
    asked = mapped[["width", "o"]].optimize(fuse=False).expr
    (read,) = asked.find_operations(Scan)
    assert sorted(read.columns) == ["image", "txt", "width"]
    mapped[["width", "txt"]].compute()
    assert work["decoded"] == 0


def test_no_image_is_decoded_where_inputs_name_none(ddf, photos, work):  # noqa: F811
    told = Recorded()
    made = ddf.images.map_batches(told, {"o": "int64"}, inputs=["txt"])[["o"]].compute()
    captions = [None if n == 1 else photos[n].caption for n in range(5)]
    assert told.calls == [(captions,)]
    assert made["o"].tolist() == [0, 1, 2, 3, 4]
    assert work["decoded"] == 0


def test_filters_on_other_columns_go_below(ddf, work):  # noqa: F811
    told = Recorded()
    mapped = ddf.images.map_batches(told, {"o": "int64"}, inputs=["image", "json.n"])
    mapped[mapped["json.n"] < 2].compute()
    ((images, numbers),) = told.calls
    assert numbers.tolist() == [0, 1]
    assert len(images) == work["decoded"] == 2


def test_values_of_any_type_come_as_python_has_them():
    frame = small_frame([1, 2, 3]).assign(
        words=column([["a", "b"], None, []], pa.list_(pa.string())),
        field=column([{"x": 1}, None, {"x": 3}], pa.struct([("x", pa.int8())])),
        data=column([b"\0", None, b""], pa.binary()),
        ragged=column([[[1], [2, 3]], [[4, 5]], []], pa.list_(pa.list_(pa.int16()))),
        score=column([0.5, None, 2.0], pa.float32()),
    )
    told = Recorded()
    inputs = ["words", "field", "data", "ragged", "score"]
    frame.images.map_batches(told, {"o": "int8"}, inputs=inputs)
    ((words, field, data, ragged, score),) = told.calls
    assert words == [["a", "b"], None, []]
    assert field == [{"x": 1}, None, {"x": 3}]
    assert data == [b"\0", None, b""]
    assert [[part.tolist() for part in row] for row in ragged] == [[[1], [2, 3]], [[4, 5]], []]
    np.testing.assert_array_equal(score, np.array([0.5, np.nan, 2], "f4"))


def test_a_function_may_change_all_that_it_gets():
    frame = small_frame([1, 2]).assign(v=column([[1.0], [2.0]], pa.list_(pa.float32())))

    def erase(images, vectors, keys):
        images[:] = 0
        keys[:] = 0
        for vector in vectors:
            vector[:] = 0
        return keys

    frame.images.map_batches(erase, {"o": "int64"}, inputs=["image", "v", "key"])
    assert frame["key"].tolist() == [1, 2]
    assert frame.images.vectors("v").tolist() == [[1], [2]]
    assert [int(array.max()) for array in frame.images.arrays()] == [1, 2]


@pytest.mark.parametrize(
    ("values", "type_"),
    [([1, None], pa.int64()), ([True, None], pa.bool_()), ([[1, None], [2]], pa.list_(pa.int8()))],
)
def test_whole_numbers_that_are_null_are_refused_by_name(values, type_):
    frame = small_frame([1, 2]).assign(n=column(values, type_))
    with pytest.raises(dii.ArgumentError, match=r"inputs= names 'n', which has nulls.*notnull"):
        frame.images.map_batches(Recorded(), {"o": "int64"}, inputs=["image", "n"])


def test_nulls_in_rows_that_the_function_does_not_get_are_no_error():
    frame = small_frame([1, 2], bad=[2]).assign(n=column([7, None], pa.int64()))
    made = frame.images.map_batches(lambda _, n: n, {"o": "int64"}, inputs=["image", "n"])
    assert made["o"].fillna(-1).tolist() == [7, -1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"inputs": "txt"}, "inputs='txt': pass a list"),
        ({"inputs": ["image", "text"]}, r"inputs= names 'text'; the frame has '__key__'"),
        ({"inputs": []}, r"inputs=\[\]: name at least one"),
        ({"skip_missing": 1}, "skip_missing=1: pass True or False"),
    ],
)
def test_wrong_inputs_are_refused_at_the_call(ddf, options, told):
    with pytest.raises(dii.ArgumentError, match=told):
        ddf.images.map_batches(Recorded(), {"o": "int64"}, **options)


def test_other_inputs_are_another_computation(ddf):
    def score(*arguments):
        return np.zeros(len(arguments[0]))

    def name(**options):
        return ddf.images.map_batches(score, {"o": "float32"}, **options).expr._name

    names = {
        name(),
        name(inputs=["image", "txt"]),
        name(inputs=["txt", "image"]),
        name(skip_missing=False),
    }
    assert len(names) == 4
    assert name() == name(inputs=["image"]) == name(inputs=("image",))


@pytest.mark.slow
def test_a_checkpoint_of_other_inputs_is_refused(ddf, tmp_path):
    def score(*arguments):
        return np.zeros(len(arguments[0]))

    for options, refused in (({}, False), ({"inputs": ["image", "txt"]}, True), ({}, False)):
        frame = ddf.images.map_batches(score, {"o": "float32"}, **options)[["__key__", "o"]]
        if refused:
            with pytest.raises(dii.ExportError, match=r"map_batches.*has changed"):
                dii.checkpoint(frame, tmp_path / "out")
        else:
            assert dii.checkpoint(frame, tmp_path / "out")["o"].sum().compute() == 0


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_boxes_that_are_exploded_give_a_row_for_each_crop(ddf, photos, kind):
    frame = ddf[ddf.error.isna()]
    frame = frame if kind == "lazy" else frame.compute()
    rows = frame.explode("json.boxes")
    rows = rows[rows["json.boxes"].notnull()]

    def crop(images, boxes):
        corners = [box.astype(int) for box in boxes]
        return [i[y0:y1, x0:x1] for i, (x0, y0, x1, y1) in zip(images, corners, strict=True)]

    crops = rows.images.map_batches(crop, {"crop": "image"}, inputs=["image", "json.boxes"])
    crops = crops.compute() if kind == "lazy" else crops
    wanted = [(row, box) for row in (0, 4) for box in BOXES[row]]
    assert crops["__key__"].tolist() == [str(row) for row, _ in wanted]
    for array, (row, (x0, y0, x1, y1)) in zip(crops.images.arrays(), wanted, strict=True):
        expected = photos[row].pixels[y0:y1, x0:x1]
        assert array.shape == expected.shape
        assert abs(array.astype(int) - expected).mean() < 4


def test_lists_of_a_shard_without_samples_are_no_error(boxed, tmp_path):
    empty = write_tar(tmp_path / "empty.tar", {})
    ddf = dii.read_webdataset_images(
        [boxed, empty], json_fields={"boxes": "list<list<float32>>"}, backend="pandas"
    )
    count = ddf.images.map_batches(
        lambda boxes: [0 if each is None else len(each) for each in boxes],
        {"count": "int64"},
        inputs=["json.boxes"],
    )["count"]
    assert count.compute().tolist() == [len(boxes or ()) for boxes in BOXES]


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_a_frame_without_images_has_functions_of_its_other_columns(ddf, kind):
    texts = ddf[["__key__", "txt"]] if kind == "lazy" else ddf[["__key__", "txt"]].compute()
    made = texts.images.map_batches(
        lambda captions: [len(text or "") for text in captions], {"n": "int64"}, inputs=["txt"]
    )
    made = made.compute() if kind == "lazy" else made
    assert list(made.columns) == ["__key__", "txt", "n"]
    assert made["n"].tolist() == ddf["txt"].compute().fillna("").str.len().tolist()
    with pytest.raises(dii.ArgumentError, match="no column of images"):
        texts.images.map_batches(len, {"n": "int64"})


def test_no_image_column_is_kept_that_was_not_asked_for(photos, tmp_path, work):  # noqa: F811
    files = {"a.jpg": photos[0].encoded, "a.two.jpg": photos[1].encoded}
    path = write_tar(tmp_path / "a.tar", files)
    ddf = dii.read_webdataset_images(
        path, image={"image": "jpg", "two": "two.jpg"}, columns=["__key__", "image", "two"], size=8
    )

    def brightness(images):
        return images.mean(axis=(1, 2, 3))

    made = ddf.images.map_batches(brightness, {"b": "float32"})
    assert list(made.columns) == ["__key__", "b"]
    work.clear()
    made.compute()
    assert work["decoded"] == 1
    both = ddf.images.map_batches(brightness, {"b": "float32"}, keep_image=True)
    assert list(both.columns) == ["__key__", "image", "two", "b"]
    work.clear()
    both[["two", "b"]].compute()
    assert work["decoded"] == 2
    both[["two"]].compute()
    assert work["decoded"] == 3
