"""The cuDF backend keeps the contract that every backend keeps."""

import dask
import numpy as np
import pyarrow as pa
import pytest
from contract import BackendContract, address, images, metadata, on_host
from held_types import HELD

from dask_image_ingest.decode import Pixels
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames import get_backend


class TestCudf(BackendContract):
    @pytest.fixture
    def backend(self):
        return get_backend("cudf")

    def read_parquet(self, path):
        import cudf

        return cudf.read_parquet(path)

    def test_views_are_of_cupy(self, frame):
        import cupy

        present = [array for array in frame.images.arrays() if array is not None]
        assert present
        assert {type(array) for array in present} == {cupy.ndarray}

    def test_the_index_of_a_partition_is_a_range(self, frame):
        import cudf

        assert isinstance(frame.index, cudf.RangeIndex)

    def test_the_limit_is_that_of_a_list_column(self, backend):
        assert backend.largest_partition == 2**31 - 1

    def test_more_pixels_than_estimated_and_than_a_column_holds_are_an_error(self, backend):
        buffer = backend.pixel_buffer(10)
        buffer.append([np.zeros((2, 3, 3), np.uint8)])
        with pytest.raises(PartitionTooLargeError, match="partition_size"):
            buffer._reserve(2**31)

    def test_frames_can_be_spilled_unless_views_keep_their_memory(self, backend):
        """Only where spilling was on when this process first made a cuDF object."""
        from cudf.core.buffer.spill_manager import get_global_manager

        manager = get_global_manager()
        if manager is None:
            pytest.skip("cuDF's spilling is off: run with CUDF_SPILL=1")
        frame = self.make(backend)
        pixels = sum(a.size for a in images() if a is not None)
        (view, *_) = frame.images.arrays()
        where = address(view)
        # It would free nothing, so cuDF must not count it.
        manager.spill_to_device_limit(0)
        (again, *_) = frame.images.arrays()
        assert address(again) == where
        del again
        np.testing.assert_array_equal(on_host(view), images()[0])
        del view
        assert manager.spill_to_device_limit(0) >= pixels
        self.assert_pixels(frame, self.by_key(images()), len(images()))
        assert manager.spill_to_device_limit(0) >= pixels  # arrays() has not pinned it

    @pytest.mark.parametrize("rows", [slice(2), slice(1, 3)])
    def test_a_slice_is_sent_without_the_rest_and_pins_no_memory(self, backend, rows):
        from cudf.core.buffer.spill_manager import get_global_manager
        from distributed.protocol import deserialize, serialize

        large = self.make(backend, images(((64, 64, 3),) * 50))
        for part in (large.iloc[rows], large["image"].iloc[rows]):
            header, frames = serialize(part, on_error="raise")
            sent = sum(getattr(frame, "nbytes", None) or len(frame) for frame in frames)
            assert 2 * 64 * 64 * 3 <= sent < 3 * 64 * 64 * 3
            received = deserialize(header, frames)
            for got, want in zip(
                received.images.arrays(), large.images.arrays()[rows], strict=True
            ):
                np.testing.assert_array_equal(on_host(got), on_host(want))
        del got, want, received
        manager = get_global_manager()
        if manager is not None:
            assert manager.spill_to_device_limit(0) >= 50 * 64 * 64 * 3

    def test_slices_of_frames_whose_views_were_asked_for_are_no_copies(self, backend):
        frame = self.make(backend)
        whole = frame.images.arrays()
        part = frame.iloc[3:].images.arrays()
        assert address(part[0]) == address(whole[3])

    def test_a_merge_and_a_concat_are_planned_with_the_types_that_they_give(self, frame):
        import dask.dataframe as dd
        import dask_cudf

        with dask.config.set({"dataframe.convert-string": False}):  # as in a read
            ddf = dask_cudf.from_cudf(frame, npartitions=2)
        for made in (ddf.merge(ddf[["__key__"]], on="__key__"), dd.concat([ddf, ddf])):
            assert made._meta.dtypes.to_dict() == made.compute().dtypes.to_dict()


def test_columns_are_converted_alike_alone_and_with_their_index():
    import cudf
    import dask.dataframe as dd
    import pandas as pd

    table = metadata()
    frame = get_backend("pandas").frame(table, np.arange(len(table)), None)
    frame["category"] = pd.Categorical([*"aabba"])
    frame["zone"] = pd.date_range("2026", periods=5, tz="UTC")
    frame = frame.set_index("__key__")
    ddf = dd.from_pandas(frame, npartitions=2, sort=False).to_backend("cudf")
    whole = ddf.compute()
    assert whole.index.to_arrow().to_pylist() == frame.index.tolist()
    assert whole.index.name == "__key__"
    assert whole["npy"].dtype == cudf.ListDtype("uint8")
    for name in frame.columns:
        alone = ddf[[name]].compute()
        assert str(alone[name].dtype) == str(whole[name].dtype)
        assert alone[name].to_arrow().equals(whole[name].to_arrow())
        assert str(ddf[name]._meta.dtype) == str(whole[name].dtype)
    back = ddf.partitions[0][ddf.partitions[0]["width"] < 0].to_backend("pandas").compute()
    assert (len(back), back.index.name, back.index.dtype) == (0, "__key__", frame.index.dtype)


@pytest.mark.parametrize(("type_", "value", "held"), HELD, ids=[str(t) for t, _, _ in HELD])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(0, 0), slice(1, 2)])
def test_types_that_cudf_has_none_for_are_those_that_say_the_same(type_, value, held, rows):
    backend = get_backend("cudf")
    array = pa.array([value, None, value], type_)[rows]
    frame = backend.frame(pa.table({"x": array}), np.arange(len(array)), None)
    assert frame["x"].to_arrow().to_pylist() == [held, None, held][rows]
    assert frame.dtypes.to_dict() == backend.meta({"x": type_}).dtypes.to_dict()


@pytest.mark.parametrize("rows", [slice(None), slice(1, 4), slice(0, 0)])
def test_files_of_one_backend_are_read_by_the_other(tmp_path, rows):
    import cudf
    import pandas as pd

    arrays = images()
    shapes = np.array([(0, 0, 0) if a is None else a.shape for a in arrays], np.int32)
    errors = ["no image" if a is None else None for a in arrays]
    flat = np.concatenate([a.ravel() for a in arrays if a is not None])
    table = pa.table({"n": range(len(arrays))})
    numbers = np.arange(len(arrays))
    theirs = get_backend("pandas").frame(table, numbers, Pixels(flat, shapes, errors)).iloc[rows]
    theirs.to_parquet(tmp_path / "pandas.parquet")
    made = cudf.read_parquet(tmp_path / "pandas.parquet")
    assert get_backend("cudf").is_images(made["image"].dtype)
    pixels = Pixels(cupy_of(flat), shapes, errors)
    ours = get_backend("cudf").frame(table, numbers, pixels).iloc[rows]
    ours.to_parquet(tmp_path / "cudf.parquet")
    again = pd.read_parquet(tmp_path / "cudf.parquet", dtype_backend="pyarrow")
    for frame in (made, again):
        got = frame.images.arrays()
        assert len(got) == len(arrays[rows])
        for one, other in zip(got, arrays[rows], strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                np.testing.assert_array_equal(on_host(one), other)


def tensors(images):
    import torch

    return [torch.from_dlpack(image).float().mean().requires_grad_() for image in images]


@pytest.mark.parametrize(
    "function",
    [
        lambda images: [float(image.mean()) if n else None for n, image in enumerate(images)],
        lambda images: [image.mean() for image in images],
        tensors,
    ],
)
def test_functions_may_give_lists_of_none_arrays_and_tensors(function):
    if function is tensors:
        pytest.importorskip("torch")
    arrays = images(((4, 5, 3),) * 3)
    contract = TestCudf()
    frame = contract.make(get_backend("cudf"), arrays)
    made = frame.images.map_batches(function, {"mean": "float64"})
    got = made["mean"].to_arrow().to_pylist()
    expected = [array.mean() for array in arrays]
    assert got[1:] == pytest.approx(expected[1:], rel=1e-5)
    assert got[0] is None or got[0] == pytest.approx(expected[0], rel=1e-5)  # NaN is null


@pytest.mark.parametrize("errors", ["raise", "null"])
def test_rows_are_given_in_host_memory_and_come_back_to_the_device(errors):
    arrays = images([(4, 5, 3), (6, 2, 3), (4, 5, 3)])
    frame = TestCudf().make(get_backend("cudf"), arrays)
    keys = frame["__key__"].to_arrow().to_pylist()

    async def tell(image, key):
        assert isinstance(image, np.ndarray)
        assert isinstance(key, str)
        if key == keys[1] and errors == "null":
            raise ValueError("not this one")
        return {"s": key, "i": image.size, "l": [1.5] * image.shape[1], "p": image[::-1]}

    outputs = {"s": "string", "i": "int64", "l": "list<float32>", "p": "image"}
    made = frame.images.map_rows(
        tell, outputs, inputs=["image", "__key__"], errors=errors, concurrency=2
    )
    got = made[["s", "i", "l"]].to_arrow().to_pylist()
    pictures = made.images["p"].arrays()
    for row, array in enumerate(arrays):
        if row == 1 and errors == "null":
            assert got[row] == {"s": None, "i": None, "l": None}
            assert pictures[row] is None
            assert made["error"].to_arrow().to_pylist()[row].endswith("ValueError: not this one")
            continue
        assert got[row] == {"s": keys[row], "i": array.size, "l": [1.5] * array.shape[1]}
        np.testing.assert_array_equal(on_host(pictures[row]), array[::-1])

    def batches(pictures, names):
        if keys[1] in names and errors == "null":
            raise ValueError("not this one")
        return [float(picture.mean()) for picture in pictures]

    made = frame.images.map_batches(
        batches, {"m": "float64"}, inputs=["image", "__key__"], errors=errors
    )
    means = made["m"].to_arrow().to_pylist()
    expected = [array.mean() for array in arrays]
    assert means[0] == pytest.approx(expected[0])
    assert means[2] == pytest.approx(expected[2])
    assert (means[1] is None) == (errors == "null")


def cupy_of(array):
    import cupy

    return cupy.asarray(array)


def test_the_accessor_is_registered_without_a_warning_and_once():
    import importlib
    import warnings

    import cudf

    from dask_image_ingest.accessor.frames import FrameImages
    from dask_image_ingest.frames.cudf import backend as module

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(module)
    assert cudf.DataFrame.images is FrameImages
