"""A frame that goes through a parquet file is the same frame: index, dtypes, pixels."""

from __future__ import annotations

import io
import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.image_dtype import ImageArray, image_structs

IMAGES = [np.full((2, 3 + n, 3), n, np.uint8) if n != 2 else None for n in range(6)]


@pytest.fixture
def frame():
    columns = {
        "image": ImageArray(image_structs(IMAGES)),
        "int": np.arange(6),
        "small": np.arange(6, dtype="int8"),
        "float": np.arange(6) / 3,
        "nullable": pd.array([1, None, 3, 4, 5, 6], "Int32"),
        "string": pd.array([*"abcde", None], pd.StringDtype("pyarrow")),
        "arrow": pd.array([1, 2, None, 4, 5, 6], pd.ArrowDtype(pa.int64())),
        "vector": pd.array([[1.0], None, [3, 4], [], [1, 1], [2, 3]], "list<float32>"),
        "category": pd.Categorical([*"xxyyzz"], categories=[*"wxyz"], ordered=True),
        "number.category": pd.Categorical([300, 300, 2, 1, 2, 1]),
        "zone": pd.date_range("2020", periods=6, tz="Europe/Vienna"),
        "time": pd.date_range("2020", periods=6),
        "bool": np.array([True, False] * 3),
        "object": ["q", None, "r", "s", "t", "u"],
        "struct": pd.array([{"x": 1}] * 6, pd.ArrowDtype(pa.struct([("x", pa.int32())]))),
        "named struct": pd.array([{"x y": 1}, None] * 3, 'struct<"x y": int32>'),
        "bytes": pd.array([b"1", None] * 3, pd.ArrowDtype(pa.binary())),
    }
    return pd.DataFrame(columns)


CHANGES = {
    "whole": lambda frame: frame,
    "slice": lambda frame: frame[1:5],
    "some": lambda frame: frame[[True, False, True, True, False, True]],
    "empty": lambda frame: frame[:0],
    "strings as index": lambda frame: frame.set_index("string"),
    "times as index": lambda frame: frame.set_index(frame["zone"].rename("int")),
    "labels": lambda frame: frame.set_axis(pd.Index([*"abcdef"], name="label")),
    "steps": lambda frame: frame.set_axis(pd.RangeIndex(10, 22, 2, name="n")),
}


def through_a_file(frame, columns=None):
    backend = get_backend("pandas")
    file = io.BytesIO()
    parquet.write_table(backend.to_storage(frame), file)
    table = parquet.read_table(pa.BufferReader(file.getvalue()))
    return backend.from_storage(table, frame[:0] if columns is None else frame[:0][columns])


@pytest.mark.parametrize("change", CHANGES)
def test_a_stored_frame_is_the_same_frame(frame, change):
    want = CHANGES[change](frame)
    got = through_a_file(want)
    assert str(got["image"].dtype) == "image"
    assert type(got.index) is type(want.index)
    for one, other in zip(got["image"].images.arrays(), want["image"].images.arrays(), strict=True):
        np.testing.assert_array_equal(one, other)
    pd.testing.assert_frame_equal(got.drop(columns="image"), want.drop(columns="image"))


def test_no_columns_are_rows_all_the_same(frame):
    got = through_a_file(frame.set_index("string"), [])
    assert got.shape == (6, 0)
    assert got.index.tolist() == frame.set_index("string").index.tolist()


def test_a_function_that_gives_other_types_than_it_said_has_them_back(frame):
    backend = get_backend("pandas")
    table = backend.to_storage(frame[["int", "string"]])
    said = pd.DataFrame({"int": pd.array([], "float64"), "string": pd.array([], "object")})
    got = backend.from_storage(table, said)
    pd.testing.assert_frame_equal(got, frame[["int", "string"]])


def test_what_cudf_wrote_has_the_dtypes_of_pandas(frame):
    backend = get_backend("pandas")
    frame = frame[["arrow", "string", "vector", "nullable"]]
    table = backend.to_storage(frame)
    told = json.loads(table.schema.metadata[b"pandas"])
    told["creator"] = {"library": "cudf", "version": "26.10"}
    for column, name in zip(told["columns"], ["int64", "object", "list", "int32"], strict=False):
        column["numpy_type"] = name
    table = table.replace_schema_metadata({"pandas": json.dumps(told)})
    pd.testing.assert_frame_equal(backend.from_storage(table, frame[:0]), frame)


def test_pixels_are_not_copied_on_their_way(frame):
    backend = get_backend("pandas")
    back = backend.from_storage(backend.to_storage(frame), frame[:0])
    assert np.shares_memory(back.images.arrays()[0], frame.images.arrays()[0])


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's own call of pandas 3.1
@pytest.mark.parametrize("dtypes", [None, "pyarrow", "numpy_nullable"])
@pytest.mark.parametrize("read", ["fsspec", "pandas", "types_mapper"])
def test_stored_images_are_images_however_they_are_read(read, dtypes, tmp_path):
    paths = write_shards(tmp_path, shards=2, per_shard=2, size=(20, 30))
    pixels = dii.read_webdataset_images(paths, backend="pandas")
    references = dii.read_webdataset_images(paths, backend="pandas", decode=False)
    expected = [image.mean() for image in pixels.compute().images.arrays()]
    options = {} if dtypes is None else {"dtype_backend": dtypes}
    for frame, name in ((pixels, "pixels"), (references, "references")):
        frame.to_parquet(tmp_path / name)
        if read == "pandas":
            stored = pd.read_parquet(tmp_path / name, **options)
        elif read == "types_mapper":
            stored = parquet.read_table(tmp_path / name).to_pandas(types_mapper=pd.ArrowDtype)
        else:
            stored = dd.read_parquet(tmp_path / name, filesystem=read, **options)
            assert stored.compute().dtypes["image"] == stored.dtypes["image"]
        decoded = stored if name == "pixels" else dii.decode_images(stored)
        means = decoded.images.map_batches(lambda a: [i.mean() for i in a], {"mean": "float64"})
        means = means.compute() if hasattr(means, "compute") else means
        assert sorted(means["mean"]) == pytest.approx(sorted(expected))
