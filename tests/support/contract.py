"""What every backend's partitions must be: one contract, run for pandas and for cuDF.

A test module makes a subclass named ``Test...`` that says which backend it is and how that
backend's library reads parquet.
"""

import importlib
import io
import pickle

import numpy as np
import pyarrow as pa
import pytest
from dask.dataframe.utils import meta_nonempty
from dask.sizeof import sizeof
from distributed.protocol import deserialize, serialize
from PIL import Image

from dask_image_ingest.dataset.schema.columns import MemberColumn, Schema
from dask_image_ingest.decode import DecodeSpec, Pixels
from dask_image_ingest.decode.planner import decoders_for
from dask_image_ingest.frames.image_dtype import IMAGE

COMPONENTS = (
    MemberColumn("txt", "txt", pa.string()),
    MemberColumn("cls", "cls", pa.int64()),
    MemberColumn("npy", "npy", pa.binary()),
    MemberColumn("json.score", "json", pa.float32(), "score"),
    MemberColumn("json.safe", "json", pa.bool_(), "safe"),
    MemberColumn("json.box", "json", pa.list_(pa.float32()), "box"),
)
TYPES = Schema(COMPONENTS, ("jpg",)).types
METADATA = {name: type_ for name, type_ in TYPES.items() if name != "image"}

# Of every shape; the third row has none.
SHAPES = [(2, 3, 3), (4, 1, 3), None, (5, 5, 1), (1, 1, 3)]
ROWS = len(SHAPES)


def images(shapes=tuple(SHAPES), first=0):
    """Arrays that differ in every byte that matters, None where there is no image."""
    random = np.random.default_rng(first)
    return [s and random.integers(0, 256, s, np.uint8) for s in shapes]


def metadata(rows=ROWS, first=0):
    """A table of every metadata column, in which every nullable column has a null."""
    numbers = range(first, first + rows)
    values = {
        "__key__": [f"folder/ä{n}" for n in numbers],
        "__url__": ["shard-000.tar"] * rows,
        "offset": [n * 10**10 for n in numbers],
        "nbytes": [n + 7 for n in numbers],
        "format": ["jpeg" for _ in numbers],
        "height": list(numbers),
        "width": [n * 10 for n in numbers],
        "channels": [3 for _ in numbers],
        "error": [None for _ in numbers],
        "txt": [f"caption {n}" for n in numbers],
        "cls": [n % 3 for n in numbers],
        "npy": [bytes([n % 256, 0, 255]) * (n % 3) for n in numbers],
        "json.score": [n / 4 for n in numbers],
        "json.safe": [n % 2 == 0 for n in numbers],
        "json.box": [[n / 2] * (n % 4) for n in numbers],
    }
    for name in values.keys() - {"__key__", "__url__"}:
        if rows > 2:
            values[name][2] = None
    if rows > 2:
        values["error"][2] = "truncated: the last bytes are missing"
    return pa.table({name: pa.array(values[name], type_) for name, type_ in METADATA.items()})


def on_host(array):
    """A NumPy array of a NumPy or CuPy one."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def address(array):
    """Where an array's first byte lies."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


def to_arrow(frame):
    """A frame as Arrow, in the types that both backends have.

    cuDF holds bytes as lists of uint8, and gives nested columns without a single value as nulls.
    """
    if type(frame).__module__.startswith("cudf"):
        table = frame.to_arrow(preserve_index=False)
    else:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata(None)
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        type_ = _common(IMAGE if name == "image" else METADATA.get(name, column.type))
        if name == "image" or pa.types.is_null(column.type) or pa.types.is_binary(column.type):
            column = pa.chunked_array([pa.array(map(_listed, column.to_pylist()), type_)])
        columns[name] = column.cast(_common(column.type))
    return pa.table(columns)


def _listed(value):
    if isinstance(value, dict):
        return {name: _listed(part) for name, part in value.items()}
    return list(value) if isinstance(value, bytes) else value


def _common(type_):
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _common(field.type)) for field in type_])
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(pa.field("item", _common(type_.value_type)))
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return pa.list_(pa.uint8())
    return pa.string() if pa.types.is_large_string(type_) else type_


class BackendContract:
    """The tests; a subclass has the fixture ``backend`` and the method ``read_parquet``."""

    @pytest.fixture
    def backend(self):
        raise NotImplementedError

    def read_parquet(self, path):
        raise NotImplementedError

    def pixels(self, backend, arrays, predicted=None):
        """``arrays`` as a decoder would hand them over."""
        present = [array for array in arrays if array is not None]
        nbytes = sum(array.size for array in present) if predicted is None else predicted
        buffer = backend.pixel_buffer(nbytes)
        for array in present:
            buffer.append([array])
        shapes = [(0, 0, 0) if array is None else array.shape for array in arrays]
        errors = ["why there is none" if array is None else None for array in arrays]
        return Pixels(buffer.finish(), np.array(shapes, np.int32).reshape(-1, 3), errors)

    def make(self, backend, arrays=None, first=0):
        """A partition, whose row ``first + n`` has the n-th array."""
        arrays = images(first=first) if arrays is None else arrays
        table = metadata(len(arrays), first)
        numbers = np.arange(first, first + len(arrays))
        return backend.frame(table, numbers, self.pixels(backend, arrays))

    @pytest.fixture
    def frame(self, backend):
        return self.make(backend)

    @pytest.fixture
    def expected(self):
        return self.by_key(images())

    def by_key(self, arrays, first=0):
        return {f"folder/ä{first + n}": array for n, array in enumerate(arrays)}

    def assert_pixels(self, frame, expected, rows):
        """Each row has its own key's image, whatever happened to the frame before."""
        keys = frame["__key__"]
        keys = (keys.to_arrow() if hasattr(keys, "to_arrow") else pa.array(keys)).to_pylist()
        arrays = frame.images.arrays()
        assert len(frame) == len(keys) == len(arrays) == rows
        for key, got in zip(keys, arrays, strict=True):
            want = expected[key]
            if want is None:
                assert got is None
            else:
                assert got.dtype == np.uint8
                assert got.shape == want.shape
                np.testing.assert_array_equal(on_host(got), want)

    # What a partition is.

    def test_columns_and_types_are_the_documented_ones(self, backend, frame):
        assert list(frame.columns) == list(TYPES)
        assert to_arrow(frame).schema.types == [_common(type_) for type_ in TYPES.values()]
        assert "object" not in {str(dtype) for dtype in frame.dtypes}

    def test_metadata_is_what_was_put_in_with_its_nulls(self, frame):
        want = metadata().to_pydict()
        want["npy"] = [_listed(value) for value in want["npy"]]
        assert to_arrow(frame).drop_columns("image").to_pydict() == want

    def test_pixels_are_what_was_put_in(self, frame, expected):
        self.assert_pixels(frame, expected, ROWS)

    def test_images_describe_themselves(self, frame):
        got = to_arrow(frame)["image"].to_pylist()
        assert got[2] is None
        for row, array in zip(got, images(), strict=True):
            if array is not None:
                assert (row["height"], row["width"], row["channels"]) == array.shape
                assert row["data"] == array.reshape(-1).tolist()

    def test_bytes_are_kept(self, frame):
        npy = to_arrow(frame)["npy"].to_pylist()
        assert npy[1] == [1, 0, 255]
        assert npy[2] is None
        assert npy[3] == []

    def test_index_numbers_the_samples(self, backend):
        assert self.make(backend, first=7).index.to_numpy().tolist() == [7, 8, 9, 10, 11]
        gaps = np.array([0, 4, 5])
        frame = backend.frame(metadata(3), gaps, self.pixels(backend, images()[:3]))
        assert frame.index.to_numpy().tolist() == [0, 4, 5]

    def test_only_the_image_column_is_of_images(self, backend, frame):
        renamed = frame.rename(columns={"image": "picture"})
        found = [name for name, dtype in renamed.dtypes.items() if backend.is_images(dtype)]
        assert found == ["picture"]
        assert len(renamed.images.arrays()) == ROWS

    def test_a_partition_may_have_the_image_alone(self, backend):
        frame = backend.frame(
            metadata().select([]), np.arange(ROWS), self.pixels(backend, images())
        )
        assert list(frame.columns) == ["image"]
        assert [array is None for array in frame.images.arrays()] == [s is None for s in SHAPES]

    def test_a_partition_may_have_no_image_column(self, backend):
        frame = backend.frame(metadata().select(["txt"]), np.arange(ROWS), None)
        assert list(frame.columns) == ["txt"]
        assert len(frame) == ROWS

    def test_a_partition_without_columns_still_counts_its_rows(self, backend):
        frame = backend.frame(metadata().select([]), np.arange(ROWS), None)
        assert len(frame) == ROWS
        assert list(frame.columns) == []

    # Empty ones.

    def test_meta_is_an_empty_partition(self, backend, frame):
        meta = backend.meta(TYPES)
        assert len(meta) == 0
        assert list(meta.columns) == list(TYPES)
        assert meta.dtypes.to_dict() == frame.dtypes.to_dict()
        assert meta.images.arrays() == []
        assert list(backend.meta({"image": IMAGE, "txt": pa.string()}).columns) == ["image", "txt"]
        assert len(backend.meta({}).columns) == 0

    def test_an_empty_partition_has_the_same_types(self, backend, frame, expected):
        empty = self.make(backend, arrays=[])
        assert len(empty) == 0
        assert empty.dtypes.to_dict() == frame.dtypes.to_dict()
        assert empty.images.arrays() == []
        self.assert_pixels(self.concat(backend, [empty, frame, empty]), expected, ROWS)

    def test_a_partition_where_no_image_could_be_decoded(self, backend, frame, expected):
        nothing = self.make(backend, arrays=[None] * 3, first=100)
        assert nothing.dtypes.to_dict() == frame.dtypes.to_dict()
        assert nothing.images.arrays() == [None] * 3
        both = self.concat(backend, [nothing, frame])
        assert both.dtypes.to_dict() == frame.dtypes.to_dict()
        self.assert_pixels(both, expected | self.by_key([None] * 3, 100), ROWS + 3)

    def test_a_filter_may_leave_nothing(self, frame):
        nothing = frame[frame["cls"] == 99]
        assert nothing.dtypes.to_dict() == frame.dtypes.to_dict()
        assert nothing.images.arrays() == []

    def test_dask_can_make_a_filled_meta(self, backend):
        meta = backend.meta(TYPES)
        filled = meta_nonempty(meta)
        assert len(filled) == 2
        assert filled.dtypes.to_dict() == meta.dtypes.to_dict()
        # A function that dask tries on it finds images.
        assert [array.shape for array in filled.images.arrays()] == [(1, 1, 3)] * 2
        assert meta_nonempty(meta["image"]).dtype == meta["image"].dtype

    # What a dataframe does.

    def concat(self, backend, frames):
        return importlib.import_module(backend.name).concat(frames)

    def test_filter(self, frame, expected):
        self.assert_pixels(frame[frame["cls"] != 1], expected, 2)
        self.assert_pixels(frame[frame["error"].isna()], expected, ROWS - 1)

    def test_concat(self, backend, frame, expected):
        other = self.make(backend, first=10)
        both = self.concat(backend, [frame, other, frame])
        self.assert_pixels(both, expected | self.by_key(images(first=10), 10), 3 * ROWS)
        parts = [frame.iloc[3:], other.iloc[:2]]
        self.assert_pixels(
            self.concat(backend, parts), expected | self.by_key(images(first=10), 10), 4
        )

    def test_take(self, frame, expected):
        self.assert_pixels(frame.take([4, 2, 0, 0]), expected, 4)

    def test_slices(self, frame, expected):
        self.assert_pixels(frame.head(2), expected, 2)
        self.assert_pixels(frame.tail(2), expected, 2)
        self.assert_pixels(frame.iloc[1:4], expected, 3)
        self.assert_pixels(frame.iloc[1:4].iloc[1:], expected, 2)
        self.assert_pixels(frame.iloc[3:3], expected, 0)

    def test_slices_of_filtered_frames(self, frame, expected):
        self.assert_pixels(frame[frame["error"].isna()].iloc[1:3], expected, 2)

    def test_sort_values(self, frame, expected):
        self.assert_pixels(frame.sort_values("__key__", ascending=False), expected, ROWS)

    def test_merge(self, backend, frame, expected):
        keys = pa.table({"__key__": ["folder/ä4", "folder/ä2"], "extra": [1, 2]})
        right = backend.frame(keys, np.arange(2), None)
        self.assert_pixels(frame.merge(right, on="__key__"), expected, 2)

    def test_assign_and_drop(self, frame, expected):
        changed = frame.assign(area=frame["height"] * frame["width"]).drop(columns=["txt"])
        self.assert_pixels(changed, expected, ROWS)

    def test_copy(self, frame, expected):
        self.assert_pixels(frame.copy(), expected, ROWS)

    @pytest.mark.parametrize("rows", [slice(None), slice(1, 4), slice(2, 3), slice(0, 0)])
    def test_parquet_and_back(self, backend, frame, expected, tmp_path, rows):
        part = frame.iloc[rows]
        part.to_parquet(tmp_path / "part.parquet")
        again = self.read_parquet(tmp_path / "part.parquet")
        self.assert_pixels(again, expected, len(part))
        before, after = to_arrow(part), to_arrow(again)
        assert after.to_pydict() == before.to_pydict()
        assert after.schema.types == before.schema.types

    @pytest.mark.parametrize("rows", [slice(None), slice(1, 4), slice(0, 0)])
    def test_transfer_between_workers(self, frame, expected, rows):
        part = frame.iloc[rows]
        received = deserialize(*serialize(part, on_error="raise"))
        self.assert_pixels(received, expected, len(part))
        assert received.dtypes.to_dict() == frame.dtypes.to_dict()
        self.assert_pixels(pickle.loads(pickle.dumps(part)), expected, len(part))

    def test_first_rows_are_sent_without_the_pixels_of_the_others(self, backend):
        large = self.make(backend, arrays=images(((64, 64, 3),) * 50))
        for part in (large.head(5), large.iloc[10:15]):
            _, frames = serialize(part, on_error="raise")
            sent = sum(getattr(f, "nbytes", None) or len(f) for f in frames)
            assert 5 * 64 * 64 * 3 <= sent < 6 * 64 * 64 * 3
            assert 5 * 64 * 64 * 3 <= len(pickle.dumps(part)) < 6 * 64 * 64 * 3

    def test_dask_sees_how_much_memory_the_pixels_take(self, backend):
        large = self.make(backend, arrays=images(((512, 512, 3),) * 4))
        assert sizeof(large) >= 4 * 512 * 512 * 3

    # Memory.

    def test_views_lie_in_the_buffer_that_was_decoded_into(self, backend):
        pixels = self.pixels(backend, images())
        first = address(pixels.flat)
        frame = backend.frame(metadata(), np.arange(ROWS), pixels)
        addresses = [address(array) for array in frame.images.arrays() if array is not None]
        sizes = [array.size for array in images() if array is not None]
        assert addresses == (first + np.cumsum([0, *sizes[:-1]])).tolist()

    def test_views_of_slices_lie_in_the_same_buffer(self, frame):
        whole = frame.images.arrays()
        part = frame.iloc[3:].images.arrays()
        assert [address(array) for array in part] == [address(array) for array in whole[3:]]

    def test_views_outlive_their_frame(self, backend, expected):
        views = self.make(backend).images.arrays()
        self.make(backend, first=50)  # would take the memory, if it were free
        np.testing.assert_array_equal(on_host(views[0]), expected["folder/ä0"])

    def test_asking_for_views_changes_nothing(self, frame, expected):
        before = [address(array) for array in frame.images.arrays() if array is not None]
        sliced = frame[["__key__", "image"]].copy(deep=False)
        after = [address(array) for array in sliced.images.arrays() if array is not None]
        assert before == after
        self.assert_pixels(frame, expected, ROWS)

    @pytest.mark.parametrize("predicted", [0, 1, 20, 10_000])
    def test_the_pixel_buffer_does_not_depend_on_the_prediction(self, backend, predicted):
        arrays = [array for array in images() if array is not None]
        pixels = self.pixels(backend, arrays, predicted=predicted)
        assert len(pixels.flat) == sum(array.size for array in arrays)
        frame = backend.frame(metadata(4), np.arange(4), pixels)
        self.assert_pixels(frame, self.by_key(arrays), 4)

    def test_the_pixel_buffer_takes_batches_from_the_decoder(self, backend):
        arrays = images(((30, 20, 3), (7, 50, 3), (1, 1, 3)))
        encoded = []
        for array in arrays:
            file = io.BytesIO()
            Image.fromarray(array).save(file, "PNG")
            encoded.append(np.frombuffer(file.getvalue(), np.uint8))
        buffer = backend.pixel_buffer(0)
        (batch,) = decoders_for(DecodeSpec(device=backend.device)).encoded.run([encoded])
        buffer.append(batch)
        buffer.append([arrays[0], batch[1]])
        buffer.append([])
        want = np.concatenate([array.reshape(-1) for array in (*arrays, arrays[0], arrays[1])])
        np.testing.assert_array_equal(on_host(buffer.finish()), want)

    def test_rows_can_be_taken_before_the_frame_is_made(self, backend):
        rows = np.array([0, 2, 3])
        pixels = self.pixels(backend, images()).take(rows)
        frame = backend.frame(metadata().take(rows), rows, pixels)
        self.assert_pixels(frame, self.by_key(images()), 3)

    # New columns, and columns as arrays.

    def test_new_columns_belong_to_their_rows_and_are_null_elsewhere(self, backend, frame):
        xp = backend.numpy
        new = {
            "number": (xp.arange(3, dtype="int64"), pa.int64()),
            "flag": (xp.asarray([True, False, True]), pa.bool_()),
            "vector": (xp.arange(6, dtype="float32").reshape(3, 2), pa.list_(pa.float32())),
            "text": (["a", "ä", ""], pa.string()),
        }
        got = to_arrow(backend.with_columns(frame.iloc[::-1], new, [0, 1, 4]))
        assert got["number"].to_pylist() == [0, 1, None, None, 2]
        assert got["flag"].to_pylist() == [True, False, None, None, True]
        assert got["vector"].to_pylist() == [[0, 1], [2, 3], None, None, [4, 5]]
        assert got["text"].to_pylist() == ["a", "ä", None, None, ""]
        assert got["__key__"].to_pylist() == [f"folder/ä{n}" for n in (4, 3, 2, 1, 0)]

    def test_new_columns_of_no_rows_have_the_same_types(self, backend, frame):
        types = {"vector": pa.list_(pa.float32()), "number": pa.float32(), "text": pa.string()}
        full = {
            "vector": (backend.numpy.zeros((ROWS, 2), "float32"), types["vector"]),
            "number": (backend.numpy.zeros(ROWS, "float32"), types["number"]),
            "text": ([""] * ROWS, types["text"]),
        }
        nothing = {
            "vector": (np.empty((0, 0), "float32"), types["vector"]),
            "number": (np.empty(0, "float32"), types["number"]),
            "text": ([], types["text"]),
        }
        want = backend.with_columns(frame, full, range(ROWS)).dtypes.to_dict()
        assert backend.with_columns(frame, nothing, []).dtypes.to_dict() == want
        assert backend.with_columns(frame.iloc[:0], nothing, []).dtypes.to_dict() == want

    def test_bytes_are_bytes_in_batches(self, backend, frame):
        whole = frame.take([0, 1, 3, 4])
        assert backend.values(whole["npy"]).tolist() == [b"", b"\1\0\xff", b"", b"\4\0\xff"]
        same = frame.take([1, 4])  # of one length: still no array of numbers
        assert backend.values(same["npy"]).tolist() == [b"\1\0\xff", b"\4\0\xff"]
        assert backend.values(frame["npy"]).tolist()[2] is None
        batch = next(same.images.iter_batches(2, columns=["npy"]))
        assert batch["npy"].tolist() == [b"\1\0\xff", b"\4\0\xff"]

    def test_columns_are_arrays_where_they_can_be(self, backend, frame):
        whole = frame.take([0, 1, 3, 4])
        assert type(backend.values(whole["cls"])) is backend.numpy.ndarray
        assert on_host(backend.values(whole["cls"])).tolist() == [0, 1, 0, 1]
        assert on_host(backend.values(whole["json.score"])).tolist() == [0, 0.25, 0.75, 1]
        assert backend.values(whole["txt"]).tolist()[1] == "caption 1"
        assert backend.values(frame["cls"]) is None  # a null
        assert backend.values(whole["json.box"]) is None  # of several lengths
        vectors = backend.numpy.arange(8, dtype="float32").reshape(4, 2)
        new = backend.with_columns(whole, {"v": (vectors, pa.list_(pa.float32()))}, range(4))
        np.testing.assert_array_equal(on_host(backend.values(new["v"])), on_host(vectors))
        np.testing.assert_array_equal(
            on_host(backend.values(new["v"].iloc[1:3])), on_host(vectors)[1:3]
        )

    @pytest.mark.parametrize(
        ("item", "rows", "expected"),
        [
            (pa.float32(), [[1, None], [3, 4]], [[1, np.nan], [3, 4]]),
            (pa.int16(), [[1, None], [3, 4]], [[1, np.nan], [3, 4]]),
            (pa.bool_(), [[True], [False]], [[True], [False]]),
            (pa.float32(), [], []),
        ],
    )
    def test_vectors_are_arrays_of_numbers_with_nan_for_null(self, backend, item, rows, expected):
        table = pa.table({"x": pa.array(rows, pa.list_(item))})
        got = backend.values(backend.frame(table, np.arange(len(rows)), None)["x"])
        assert type(got) is backend.numpy.ndarray
        np.testing.assert_array_equal(on_host(got), np.array(expected).reshape(on_host(got).shape))

    @pytest.mark.parametrize(
        ("item", "rows"),
        [
            (pa.list_(pa.float32()), [[[1, 2], []], [[3], [4]]]),
            (pa.string(), [["a", "b"], ["c", None]]),
            (pa.binary(), [[b"a", b""], [b"\0", None]]),
        ],
    )
    def test_lists_of_what_is_no_number_are_objects(self, backend, item, rows):
        table = pa.table({"x": pa.array(rows, pa.list_(item))})
        got = backend.values(backend.frame(table, np.arange(len(rows)), None)["x"])
        assert (got.shape, got.dtype) == ((2, 2), object)
        listed = [[list(v) if isinstance(v, np.ndarray) else v for v in row] for row in got]
        assert listed == rows

    # What .images does with one frame.

    def test_images_of_one_shape_are_stacked_without_a_copy(self, backend):
        frame = self.make(backend, images(((4, 5, 3),) * 6))
        stacked = frame.iloc[1:5].images.stack()
        assert type(stacked) is backend.numpy.ndarray
        assert stacked.shape == (4, 4, 5, 3)
        assert address(stacked) == address(frame.images.arrays()[1])
        np.testing.assert_array_equal(on_host(stacked), images(((4, 5, 3),) * 6)[1:5])

    def test_batches_are_mapped_and_iterated(self, backend):
        arrays = images(((4, 5, 3), (4, 5, 3), None, (4, 5, 3)))
        frame = self.make(backend, arrays)
        mapped = frame.images.map_batches(
            lambda batch: {"mean": batch.mean(axis=(1, 2, 3)), "v": batch[:, 0, 0]},
            {"mean": "float64", "v": "list<float32>"},
            batch_size=2,
        )
        means = to_arrow(mapped)["mean"].to_pylist()
        np.testing.assert_allclose(
            [mean for mean in means if mean is not None],
            [array.mean() for array in arrays if array is not None],
        )
        assert means[2] is None
        told = []

        def keep(batch, vectors, keys):
            told.append((batch, vectors, keys))
            return {"n": batch.mean(axis=(1, 2, 3))}

        beside = mapped.assign(image=frame["image"])
        beside.images.map_batches(keep, {"n": "float64"}, inputs=["image", "v", "__key__"])
        ((batch, vectors, keys),) = told
        assert type(batch) is backend.numpy.ndarray
        there = [array for array in arrays if array is not None]
        np.testing.assert_array_equal(on_host(batch), there)
        for vector, array in zip(vectors, there, strict=True):
            assert type(vector) is backend.numpy.ndarray
            np.testing.assert_array_equal(on_host(vector), array[0, 0])
        assert keys == to_arrow(frame[["__key__"]].take([0, 1, 3]))["__key__"].to_pylist()
        for format, library in (("numpy", np), (backend.numpy.__name__, backend.numpy)):
            first, second = frame.images.iter_batches(2, format=format, columns=["__key__"])
            assert type(first["image"]) is library.ndarray
            np.testing.assert_array_equal(on_host(first["image"]), arrays[:2])
            assert [*second["__key__"]] == ["folder/ä3"]

    def test_statistics_files_and_pictures(self, backend):
        arrays = images(((40, 50, 3), None, (30, 20, 3)))
        frame = self.make(backend, arrays)
        pixels = np.concatenate([a.reshape(-1, 3) for a in arrays if a is not None])
        statistics = frame.images.channel_stats()
        np.testing.assert_allclose(statistics["mean"], pixels.mean(axis=0))
        np.testing.assert_allclose(statistics["std"], pixels.std(axis=0))
        small = frame.images.thumbnails(10).images.arrays()
        assert [a if a is None else a.shape for a in small] == [(8, 10, 3), None, (10, 6, 3)]
        encoded = to_arrow(frame.assign(file=frame.images.encode("png")))["file"].to_pylist()
        with Image.open(io.BytesIO(bytes(encoded[0]))) as image:
            np.testing.assert_array_equal(np.asarray(image), arrays[0])
        without_location = frame[["__key__", "image"]]
        assert without_location.images.show()._repr_html_().count("<img") == 2

    def test_a_late_decode_replaces_columns_in_their_places(self, backend, frame, expected):
        pixels = self.pixels(backend, images())
        for columns in (["txt"], ["image", "txt", "error"]):
            decoded = backend.with_images(frame[columns], pixels, "image", "error")
            behind = [name for name in ("error", "image") if name not in columns]
            assert list(decoded.columns) == columns + behind
            assert [a is None for a in decoded.images.arrays()] == [s is None for s in SHAPES]
            assert decoded.index.to_numpy().tolist() == frame.index.to_numpy().tolist()

    def test_limits_are_told(self, backend):
        assert backend.largest_partition >= 2**31 - 1
        assert 2**20 < backend.partition_memory() < 2**42
