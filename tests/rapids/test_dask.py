"""What dask is told of cuDF frames with images."""

import cudf
import host_memory as host
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from contract import TYPES, images
from dask.dataframe import methods
from dask.dataframe.utils import meta_nonempty
from processes import printed

import dask_image_ingest as dii
from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import cudf_dask, get_backend
from dask_image_ingest.frames.image_type import IMAGE

SIZE = """
import dask_image_ingest.frames.cudf
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

    monkeypatch.setattr(cudf_dask, "concat_cudf", too_many)
    arrays = [np.zeros((2, 2, 3), np.uint8)]
    frames = [host.frame({"image": host.images(arrays)}) for _ in range(2)]
    with pytest.raises(dii.PartitionTooLargeError, match=r"to_parquet.*partitions"):
        methods.concat(frames)
    others = [host.frame({"a": host.column(np.arange(3))}) for _ in range(2)]
    with pytest.raises(OverflowError, match="CUDF failure"):
        methods.concat(others)


def test_frames_of_images_are_filled_and_converted_by_this_package():
    get_backend("cudf")
    assert meta_nonempty.dispatch(cudf.DataFrame) is cudf_dask.nonempty
    assert cudf_dask.to_pandas_dispatch.dispatch(cudf.DataFrame) is cudf_dask.to_pandas
    assert cudf_dask.to_cudf_dispatch.dispatch(pd.DataFrame) is cudf_dask.to_cudf


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
    as_pandas = cudf_dask.to_pandas(metas["cudf"])
    assert list(as_pandas.columns) == list(TYPES)
    assert as_pandas["image"].dtype == metas["pandas"]["image"].dtype
    assert {n: str(as_pandas[n].dtype) for n in ("txt", "width", "json.box")} == {
        "txt": "str",
        "width": "int32",
        "json.box": "object",
    }
    # Whatever columns are left of it, each is the same.
    part = cudf_dask.to_pandas(metas["cudf"][["txt", "width"]])
    assert part.dtypes.to_dict() == as_pandas[["txt", "width"]].dtypes.to_dict()
    again = cudf_dask.to_cudf(metas["pandas"])
    assert again.dtypes.to_dict() == metas["cudf"].dtypes.to_dict()
    series = cudf_dask.to_pandas_dispatch(metas["cudf"]["image"])
    assert (series.dtype, series.name) == (metas["pandas"]["image"].dtype, "image")
    assert cudf_dask.to_cudf_dispatch(series).dtype == metas["cudf"]["image"].dtype


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
    monkeypatch.setattr(cudf_dask, "pixels_on_host", lambda series: pixels)
    monkeypatch.setattr(cudf_dask, "to_pandas_dispatch_from_cudf", lambda frame: others.copy())
    expected = pandas.frame(pa.table({}), np.arange(7, 7 + rows), pixels).assign(a=others["a"])
    pd.testing.assert_frame_equal(cudf_dask.to_pandas(frame), expected)
