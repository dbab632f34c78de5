"""Lists and structs in batches, and from map_batches, on the cuDF backend."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import dask_image_ingest as dii
from dask_image_ingest.frames import get_backend


@pytest.fixture
def frame():
    columns = {
        "key": pa.array([0, 1, 2]),
        "list": pa.array([[1.0], [], [2, 3]], pa.list_(pa.float32())),
        "boxes": pa.array([[[1, 2]], [], None], pa.list_(pa.list_(pa.float32()))),
        "struct": pa.array([{"a": 1}, None, {"a": 2}], pa.struct([("a", pa.int64())])),
    }
    return get_backend("cudf").frame(pa.table(columns), np.arange(3), None)


def test_ragged_columns_are_lists(frame):
    (batch,) = frame.images.iter_batches(3)
    assert [row.tolist() for row in batch["list"]] == [[1], [], [2, 3]]
    assert [None if row is None else row.shape for row in batch["boxes"]] == [(1, 2), (0, 0), None]
    assert batch["struct"] == [{"a": 1}, None, {"a": 2}]


def test_a_function_gives_lists_that_differ_in_length(frame):
    rows = [[1, 2], None, [3]]
    made = frame.images.map_batches(lambda key: rows, {"o": "list<int32>"}, inputs=["key"])
    (batch,) = made.images.iter_batches(3, columns=["o"])
    assert [None if row is None else row.tolist() for row in batch["o"]] == rows


def test_arrays_of_one_shape_are_refused(frame):
    with pytest.raises(dii.ArgumentError, match=r"float32\[2\], for which cuDF has none"):
        frame.images.map_batches(lambda key: np.zeros((3, 2)), {"o": "float32[2]"}, inputs=["key"])
