"""What dask is told of cuDF frames with images."""

import cudf
import host_memory as host
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from contract import TYPES, images, metadata
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


def test_a_converted_meta_is_that_of_the_other_backend():
    metas = {name: get_backend(name).meta(TYPES) for name in ("cudf", "pandas")}
    as_pandas = cudf_dask.to_pandas(metas["cudf"])
    assert as_pandas.dtypes.to_dict() == metas["pandas"].dtypes.to_dict()
    again = cudf_dask.to_cudf(as_pandas)
    assert again.dtypes.to_dict() == metas["cudf"].dtypes.to_dict()
    series = cudf_dask.to_pandas_dispatch(metas["cudf"]["image"])
    assert (series.dtype, series.name) == (metas["pandas"]["image"].dtype, "image")
    assert cudf_dask.to_cudf_dispatch(series).dtype == metas["cudf"]["image"].dtype


def test_converted_frames_are_those_of_the_pandas_backend(monkeypatch):
    """Whatever comes off the GPU, which is played here by what was to be put there."""
    pandas = get_backend("pandas")
    arrays, table = images(), metadata()
    buffer = pandas.pixel_buffer(1000)
    buffer.append([array for array in arrays if array is not None])
    shapes = np.array([(0, 0, 0) if a is None else a.shape for a in arrays], np.int32)
    errors = [None if a is not None else "why" for a in arrays]
    pixels = Pixels(buffer.finish(), shapes, errors)

    rows = len(arrays)
    stand_ins = [array if array is not None else np.zeros((1, 1, 3), np.uint8) for array in arrays]
    columns = {name: host.column(np.arange(rows)) for name in table.column_names}
    frame = host.frame(columns | {"image": host.images(stand_ins)}, cudf.RangeIndex(7, 7 + rows))
    monkeypatch.setattr(cudf_dask, "pixels_on_host", lambda series: pixels)
    monkeypatch.setattr(cudf_dask, "_to_arrow", lambda frame, types: table)
    expected = pandas.frame(table, np.arange(7, 7 + rows), pixels)
    pd.testing.assert_frame_equal(cudf_dask.to_pandas(frame), expected)


@pytest.mark.parametrize(
    ("dtype", "type_"),
    [
        (np.dtype("float32"), pa.float32()),
        (np.dtype("bool"), pa.bool_()),
        (pd.StringDtype(na_value=np.nan), pa.string()),
        (cudf.ListDtype("uint8"), pa.binary()),
        (cudf.ListDtype("float32"), pa.list_(pa.float32())),
        (cudf.CategoricalDtype(), None),
    ],
)
def test_types_of_columns_are_those_that_the_pandas_backend_has(dtype, type_):
    assert cudf_dask._arrow_type(dtype) == type_


def test_the_image_type_is_known_in_both():
    (dtype,) = get_backend("cudf").meta({"image": IMAGE}).dtypes
    assert cudf_dask._arrow_type(dtype) is IMAGE
