"""Checkpoints of cuDF frames: files that either backend reads, whatever a partition holds."""

import json

import cudf
import host_memory as host
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from contract import images
from cudf.core.column.column import ColumnBase
from held_types import HELD

from dask_image_ingest.decode import Pixels, pixels_of
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.image_dtype import IMAGE

pytestmark = pytest.mark.usefixtures("played")

TYPES = {
    "name": pa.string(),
    "vector": pa.list_(pa.float32()),
    "words": pa.list_(pa.string()),
    "file": pa.binary(),
    "files": pa.list_(pa.binary()),
    "box": pa.struct([("at", pa.list_(pa.list_(pa.int16()))), ("file", pa.binary())]),
}
ROWS = {
    "name": ["a", None, "ä"],
    "vector": [[1, 2], None, []],
    "words": [["a", None], None, []],
    "file": [b"\0a", None, b""],
    "files": [[b"a", b"", None], None, []],
    "box": [{"at": [[1], []], "file": b"b"}, None, {"at": None, "file": None}],
}


def pixels(arrays):
    shapes = np.array([(0, 0, 0) if a is None else a.shape for a in arrays], np.int32)
    errors = [None if a is not None else "why" for a in arrays]
    flat = [a.reshape(-1) for a in arrays if a is not None] or [np.empty(0, np.uint8)]
    return Pixels(np.concatenate(flat), shapes.reshape(-1, 3), errors)


def through_a_file(frame, path, backend="pandas", meta=None):
    pq.write_table(get_backend("cudf").to_storage(frame), path)
    backend = get_backend(backend)
    return backend.from_storage(pq.read_table(path), backend.meta(meta or TYPES))


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [1, 1], [2, 1], []])
def test_a_partition_without_a_value_or_a_row_has_the_types_of_the_others(tmp_path, rows):
    values = {name: [ROWS[name][row] for row in rows] for name in TYPES}
    table = pa.table({name: pa.array(values[name], type_) for name, type_ in TYPES.items()})
    frame = get_backend("cudf").frame(table, np.arange(len(rows)), None)
    file = get_backend("cudf").to_storage(frame)
    types = {name: file.schema.field(name).type for name in TYPES}
    assert types == TYPES | {"name": pa.large_string()}  # as cuDF has all text
    read = through_a_file(frame, tmp_path / "part.parquet")
    assert pa.Table.from_pandas(read, preserve_index=False).to_pydict() == values
    again = through_a_file(frame, tmp_path / "part.parquet", "cudf")
    assert again.dtypes.to_dict() == frame.dtypes.to_dict()
    assert (
        again.to_arrow(preserve_index=False).to_pydict()
        == frame.to_arrow(preserve_index=False).to_pydict()
    )


# Arrow's own dtype of string views is none that pandas can compare.
KNOWN = [(type_, value) for type_, value, _ in HELD if type_ != pa.string_view()]


@pytest.mark.parametrize(("type_", "value"), KNOWN, ids=[str(type_) for type_, _ in KNOWN])
def test_every_type_comes_back_to_the_pandas_backend_as_it_was(tmp_path, type_, value):
    table = pa.table({"x": pa.array([value, None], type_)})
    frame = get_backend("cudf").frame(table, np.arange(2), None)
    read = through_a_file(frame, tmp_path / "part.parquet", meta={"x": type_})
    want = get_backend("pandas").frame(table, np.arange(2), None)
    pd.testing.assert_series_equal(read["x"], want["x"])


@pytest.mark.parametrize(
    "index",
    [
        cudf.RangeIndex(3, 8),
        cudf.RangeIndex(0, 10, 2, name="n"),
        [4, 7, 9, 10, 12],
        ("label", [4, 7, 9, 10, 12]),
        ("image", [4, 7, 9, 10, 12]),
    ],
    ids=["range", "steps", "numbers", "named", "named as a column"],
)
@pytest.mark.parametrize("others", [[], ["index"], ["index", "__index_level_0__"]])
def test_images_alone_and_any_name_of_a_column_or_an_index_are_stored(tmp_path, index, others):
    arrays = images()
    numbers = np.arange(len(arrays))
    table = pa.table({name: pa.array(numbers) for name in others})
    backend = get_backend("cudf")
    frame = backend.frame(table, numbers, pixels(arrays))
    if not isinstance(index, cudf.RangeIndex):
        name, labels = index if isinstance(index, tuple) else (None, index)
        index = cudf.Index.from_pylibcudf(host.column(np.array(labels)))
        index.name = name
    frame.index = index
    types = dict.fromkeys(others, pa.int64()) | {"image": IMAGE}
    for read in (
        through_a_file(frame, tmp_path / "part.parquet", meta=types),
        through_a_file(frame, tmp_path / "part.parquet", "cudf", types),
    ):
        assert list(read.columns) == [*others, "image"]
        for one, other in zip(read["image"].images.arrays(), arrays, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (np.asarray(one) == other).all()
    told = json.loads(pq.read_schema(tmp_path / "part.parquet").metadata[b"pandas"])
    (kept,) = told["index_columns"]
    if isinstance(index, cudf.RangeIndex):
        assert (kept["start"], kept["stop"], kept["step"]) == (index.start, index.stop, index.step)
    else:
        assert pq.read_table(tmp_path / "part.parquet")[kept].to_pylist() == [4, 7, 9, 10, 12]


def test_values_of_every_type_come_back_through_a_file(tmp_path):
    arrays = [
        np.arange(6, dtype=np.uint16).reshape(1, 2, 3) * 9000,
        None,
        np.array([[[np.nan], [-1.5]]], np.float32),
        np.array([[[7]]], np.uint8),
    ]
    pixels = pixels_of(arrays, [None if a is not None else "why" for a in arrays], np)
    frame = get_backend("cudf").frame(pa.table({"n": range(4)}), np.arange(4), pixels)
    types = {"n": pa.int64(), "image": IMAGE}
    for backend in ("pandas", "cudf"):
        again = through_a_file(frame, tmp_path / "part.parquet", backend, types)
        for one, other in zip(get_backend(backend).arrays(again["image"]), arrays, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


def test_pixels_are_neither_copied_on_the_gpu_nor_pinned_there(tmp_path, monkeypatch):
    frame = get_backend("cudf").frame(pa.table({"n": [1, 2]}), np.arange(2), pixels(images()[:2]))
    copied = []
    monkeypatch.setattr(ColumnBase, "copy", lambda self, deep=True: copied.append(deep) or self)
    through_a_file(frame, tmp_path / "part.parquet", "cudf", {"n": pa.int64(), "image": IMAGE})
    assert True not in copied
