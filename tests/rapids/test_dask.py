"""What dask is told of cuDF frames with images."""

import cudf
import host_memory as host
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from contract import TYPES, images, metadata
from cudf.core.column import ColumnBase
from dask.dataframe import methods
from dask.dataframe.utils import meta_nonempty
from distributed.shuffle._arrow import convert_shards
from processes import printed

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.cudf import convert
from dask_image_ingest.frames.image_dtype import IMAGE

SIZE = """
import dask_image_ingest.frames.cudf.backend
import host_memory as host, numpy as np
from dask.sizeof import sizeof
print(sizeof(host.frame({"a": host.column(np.zeros(10**6, np.uint8))})))
"""


def test_a_fresh_worker_knows_what_a_frame_weighs():
    assert printed(SIZE) >= 10**6


def test_more_pixels_than_a_column_holds_are_an_error_that_says_what_to_do(monkeypatch):
    def too_many(*_, **__):
        # As libcudf says it.
        raise OverflowError("CUDF failure: Total number of concatenated rows exceeds the limit")

    get_backend("cudf")
    monkeypatch.setattr(convert, "concat_cudf", too_many)
    arrays = [np.zeros((2, 2, 3), np.uint8)]
    frames = [host.frame({"image": host.images(arrays)}) for _ in range(2)]
    with pytest.raises(MemoryError, match=r"to_parquet.*partitions"):
        methods.concat(frames)
    others = [host.frame({"a": host.column(np.arange(3))}) for _ in range(2)]
    with pytest.raises(OverflowError, match="CUDF failure"):
        methods.concat(others)


SHUFFLED = {
    "image": IMAGE,
    "vector": pa.list_(pa.float32()),
    "words": pa.list_(pa.string()),
    "struct": pa.struct([("flags", pa.list_(pa.bool_())), ("name", pa.string())]),
    "text": pa.string(),
}


@pytest.mark.parametrize("shards", [[[0]], [[0], [1]], [[1], [0]], [[0, 1]]], ids=str)
def test_rows_without_a_value_come_out_of_a_shuffle_in_the_types_that_went_in(
    played, shards, monkeypatch
):
    """Row 0 has no picture, no list, and a struct of which no field is there; row 1 has all."""
    # distributed casts all columns, to their own types; cuDF makes copies for that.
    monkeypatch.setattr(ColumnBase, "copy", lambda self, deep=True: self)
    backend = get_backend("cudf")
    values = {
        "vector": [None, [1.0, 2.0]],
        "words": [None, ["a", None]],
        "struct": [{"flags": None, "name": None}, {"flags": [True], "name": "b"}],
        "text": [None, "c"],
    }
    pixels = [Pixels(np.empty(0, np.uint8), np.zeros((1, 3), np.int32), ["why"])]
    pixels += [Pixels(np.arange(3, dtype=np.uint8), np.array([[1, 1, 3]], np.int32), [None])]

    def sent(row):
        table = pa.table({n: pa.array([v[row]], SHUFFLED[n]) for n, v in values.items()})
        frame = backend.frame(table, np.array([row]), pixels[row])
        made = frame.to_arrow(preserve_index=False)
        return made.append_column("__input_partition_id__", pa.array([0], pa.uint32()))

    meta = backend.meta({name: SHUFFLED[name] for name in [*values, "image"]})
    tables = [pa.concat_tables(map(sent, shard), promote_options="permissive") for shard in shards]
    got = convert_shards(tables, meta, "none", False)
    assert got.dtypes.to_dict() == meta.dtypes.to_dict()
    rows = sorted(row for shard in shards for row in shard)
    for name, column in values.items():
        told = sorted(got[name].to_arrow().to_pylist(), key=str)
        assert told == sorted((column[row] for row in rows), key=str), name
    pictures = [a is None for a in got.images.arrays()]
    assert sorted(pictures) == sorted(row == 0 for row in rows)


def test_frames_of_images_are_filled_and_converted_by_this_package():
    get_backend("cudf")
    assert meta_nonempty.dispatch(cudf.DataFrame) is convert.nonempty
    assert convert.to_pandas_dispatch.dispatch(cudf.DataFrame) is convert.to_pandas
    assert convert.to_cudf_dispatch.dispatch(pd.DataFrame) is convert.to_cudf


NESTED = {
    "image": IMAGE,
    "bytes": pa.binary(),
    "vector": pa.list_(pa.float32()),
    "words": pa.list_(pa.string()),
    "matrix": pa.list_(pa.list_(pa.int16())),
    "boxes": pa.list_(pa.struct([("x", pa.float32()), ("at", pa.timestamp("us"))])),
    "price": pa.list_(pa.decimal32(9, 9)),
    "struct": pa.struct([("flags", pa.list_(pa.bool_())), ("name", pa.string())]),
}


def test_a_filled_meta_has_the_types_of_the_empty_one(played):
    """A merge or a concat is planned with it, and its types stay for good."""
    meta = get_backend("cudf").meta(NESTED)
    meta.index = cudf.RangeIndex(0)
    filled = meta_nonempty(meta)
    assert len(filled) == 2
    assert filled.dtypes.to_dict() == meta.dtypes.to_dict()
    assert [array.shape for array in filled.images.arrays()] == [(1, 1, 3)] * 2
    assert filled["boxes"].to_arrow().to_pylist()[0][0]["x"] == 1
    for name in NESTED:
        series = meta_nonempty(meta[name])
        assert (series.name, series.dtype) == (name, meta[name].dtype)


def test_a_converted_meta_has_images_of_the_other_backend():
    metas = {name: get_backend(name).meta(TYPES) for name in ("cudf", "pandas")}
    as_pandas = convert.to_pandas(metas["cudf"])
    assert list(as_pandas.columns) == list(TYPES)
    assert as_pandas["image"].dtype == metas["pandas"]["image"].dtype
    assert {n: str(as_pandas[n].dtype) for n in ("txt", "width", "json.box")} == {
        "txt": "str",
        "width": "int32",
        "json.box": "list<float32>",
    }
    # Whatever columns are left of it, each is the same.
    part = convert.to_pandas(metas["cudf"][["txt", "width"]])
    assert part.dtypes.to_dict() == as_pandas[["txt", "width"]].dtypes.to_dict()
    series = convert.to_pandas_dispatch(metas["cudf"]["image"])
    assert (series.dtype, series.name) == (metas["pandas"]["image"].dtype, "image")


def test_a_meta_is_converted_column_by_column_with_its_index():
    """Dask converts the columns that a query asks for, some time one and then another."""
    meta = get_backend("cudf").meta(TYPES)
    whole = convert.to_pandas(meta)
    assert str(whole.index.dtype) == "int64"
    for name in TYPES:
        alone = convert.to_pandas(meta[[name]])
        series = convert.series_to_pandas(meta[name])
        assert alone[name].dtype == whole[name].dtype == series.dtype
        assert series.name == name
        assert alone.index.dtype == whole.index.dtype


def test_a_column_of_arrows_dtypes_becomes_the_same_with_and_without_images(played):
    pandas = get_backend("pandas")
    table = pa.table({n: metadata()[n] for n in ("width", "npy", "json.box", "json.safe")})
    frame = pandas.frame(table, np.arange(7, 12), None)
    read = get_backend("cudf").frame(table, np.arange(7, 12), None)
    made = convert.to_cudf(frame)
    assert made.dtypes.to_dict() == read.dtypes.to_dict()
    assert made.to_arrow(preserve_index=False).equals(read.to_arrow(preserve_index=False))
    assert (made.index.start, made.index.stop) == (7, 12)
    for name in frame.columns:
        for series in (
            convert.to_cudf(frame[[name]])[name],
            convert.series_to_cudf(frame[name]),
        ):
            assert (series.name, series.dtype) == (name, read[name].dtype)
            assert series.to_arrow().equals(read[name].to_arrow())


def test_converted_images_are_those_of_the_pandas_backend(monkeypatch):
    """Whatever comes off the GPU, which is played here by what was to be put there."""
    pandas = get_backend("pandas")
    arrays = images()
    buffer = pandas.pixel_buffer(1000)
    buffer.append([array for array in arrays if array is not None])
    shapes = np.array([(0, 0, 0) if a is None else a.shape for a in arrays], np.int32)
    errors = [None if a is not None else "why" for a in arrays]
    pixels = Pixels(buffer.finish(), shapes, errors)

    rows = len(arrays)
    stand_ins = [array if array is not None else np.zeros((1, 1, 3), np.uint8) for array in arrays]
    columns = {"image": host.images(stand_ins), "a": host.column(np.arange(rows))}
    frame = host.frame(columns, cudf.RangeIndex(7, 7 + rows))
    others = pd.DataFrame({"a": np.arange(rows)}, index=pd.RangeIndex(7, 7 + rows))
    monkeypatch.setattr(convert, "pixels_on_host", lambda series: pixels)
    monkeypatch.setattr(convert, "to_pandas_dispatch_from_cudf", lambda frame: others.copy())
    expected = pandas.frame(pa.table({}), np.arange(7, 7 + rows), pixels).assign(a=others["a"])
    pd.testing.assert_frame_equal(convert.to_pandas(frame), expected)
