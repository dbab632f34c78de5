"""What a function of ``map_batches`` may give on a GPU, played by arrays as strict as CuPy's."""

import types

import numpy as np
import pyarrow as pa
import pytest
from cases import check_cases

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.ops.outputs import checked_values


class OnGpu:
    """A tensor in GPU memory: NumPy can't have it, CuPy can."""

    __cuda_array_interface__ = None

    def __init__(self, array):
        self.array = np.asarray(array)
        self.dtype = f"torch.{self.array.dtype}"

    def detach(self):
        return self

    def cpu(self):
        return self.array

    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class Cupy:
    """NumPy, as far as CuPy takes the same."""

    def __getattr__(self, name):
        return getattr(np, name)

    def asarray(self, values):
        if isinstance(values, OnGpu):
            return values.array
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"Unsupported dtype {array.dtype}")
        return array


GPU = types.SimpleNamespace(numpy=Cupy(), device="gpu")


def test_lists_of_tensors_and_of_none_are_numbers():
    def check(type_, values, expected):
        got = checked_values("s", values, type_, 2, GPU)
        number = type_.value_type if pa.types.is_list(type_) else type_
        assert got.dtype == number.to_pandas_dtype()
        np.testing.assert_array_equal(got, np.array(expected, got.dtype))

    check_cases(
        [
            (pa.float32(), [0.5, None], [0.5, np.nan]),
            (pa.float32(), np.array([0.5, None]), [0.5, np.nan]),
            (pa.float32(), [OnGpu(0.5), OnGpu(1.5)], [0.5, 1.5]),
            (pa.float32(), [OnGpu(0.5), None], [0.5, np.nan]),
            (pa.float32(), [np.float64(0.5), OnGpu(1.5)], [0.5, 1.5]),
            (pa.float32(), OnGpu([0.5, 1.5]), [0.5, 1.5]),
            (pa.list_(pa.float32()), [OnGpu([1.0, 2.0]), OnGpu([3.0, 4.0])], [[1, 2], [3, 4]]),
            (pa.int64(), [OnGpu(2**62 + 1), OnGpu(1)], [2**62 + 1, 1]),
            (pa.int64(), [OnGpu(2**52 + 1), 1.0], [2**52 + 1, 1]),
            (pa.int64(), (2**62 + 1, 1), [2**62 + 1, 1]),
            (pa.bool_(), [OnGpu(True), False], [True, False]),
        ],
        check,
    )


def test_lists_keep_their_nulls():
    got = checked_values("s", [[OnGpu(1.0), None], [3, 4]], pa.list_(pa.float32()), 2, GPU)
    assert got.to_pylist() == [[1, None], [3, 4]]


@pytest.mark.parametrize(
    "values", [["a", "b"], [object(), None], [OnGpu([1.0]), OnGpu([1.0, 2.0])]]
)
def test_what_is_no_number_is_an_error_that_names_it(values):
    with pytest.raises(ArgumentError, match="'s'"):
        checked_values("s", values, pa.float32(), 2, GPU)
