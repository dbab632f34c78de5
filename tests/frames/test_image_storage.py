"""Images lie in Arrow memory as bytes; what had them as lists of bytes is still read."""

from __future__ import annotations

import json
import pickle

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask.sizeof import sizeof
from distributed.protocol import deserialize, serialize
from small_frames import small_frame

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames import IMAGE, get_backend, image_dtype
from dask_image_ingest.frames.image_dtype import ImageArray

UINT8 = pa.uint8()
NOT_NULL = pa.field("item", UINT8, nullable=False)
# As this package had them at first, as cuDF has them, and as a file of bytes may be read.
LAYOUTS = {
    "first": pa.large_list(NOT_NULL),
    "cudf": pa.list_(UINT8),
    "small": pa.binary(),
    "ours": pa.large_binary(),
}
SHAPES = [(2, 3, 3), None, (4, 1, 3), (1, 1, 1), (1, 2, 4), None, (3, 3, 3)]


def arrays():
    rng = np.random.default_rng(0)
    return [shape and rng.integers(0, 256, shape, np.uint8) for shape in SHAPES]


def laid_out(layout, images=None):
    """Images as an Arrow array of another layout, made of Python values."""
    edges = [pa.field(name, pa.int32()) for name in ("height", "width", "channels")]
    type_ = pa.struct([pa.field("data", LAYOUTS[layout]), *edges])
    rows = []
    for image in arrays() if images is None else images:
        if image is not None:
            listed = pa.types.is_list(type_[0].type) or pa.types.is_large_list(type_[0].type)
            data = image.ravel().tolist() if listed else image.tobytes()
            rows.append(dict(zip(IMAGE.names, (data, *image.shape), strict=True)))
        else:
            rows.append(None)
    return pa.array(rows, type_)


def assert_images(column, want):
    got = get_backend("pandas").arrays(column)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        if other is None:
            assert one is None
        else:
            assert one.dtype == np.uint8
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestOtherLayouts:
    def test_a_frame_has_them_as_its_own(self, layout):
        theirs = laid_out(layout)
        for array in (theirs, pa.chunked_array([theirs[:2], theirs[2:2], theirs[2:]])):
            column = pd.Series(ImageArray(array))
            assert column.dtype == "image"
            assert column.array._pa_array.type == IMAGE
            assert_images(column, arrays())

    @pytest.mark.parametrize("part", [slice(1, 5), slice(2, 2), slice(6, 7), slice(0, 3)])
    def test_so_it_has_slices_of_them(self, layout, part):
        assert_images(pd.Series(ImageArray(laid_out(layout)[part])), arrays()[part])
        plain = pd.Series(pd.arrays.ArrowExtensionArray(laid_out(layout)[part]))
        assert get_backend("pandas").is_images(plain.dtype)
        assert_images(plain, arrays()[part])
        assert_images(plain.astype("image"), arrays()[part])

    @pytest.mark.parametrize("rows", [slice(None), slice(0, 0), slice(1, 2)])
    def test_files_of_them_are_read(self, layout, rows, tmp_path):
        theirs = pd.arrays.ArrowExtensionArray(laid_out(layout)[rows])
        table = pa.Table.from_pandas(pd.DataFrame({"image": theirs, "n": range(len(theirs))}))
        # What pandas notes of a column of ours, whatever Arrow type it has.
        own = pa.Table.from_pandas(small_frame([1])[["image"]]).schema.pandas_metadata
        noted = table.schema.pandas_metadata
        noted["columns"][0] = own["columns"][0]
        noted = table.schema.metadata | {b"pandas": json.dumps(noted).encode()}
        pq.write_table(table.replace_schema_metadata(noted), tmp_path / "0.parquet")
        again = pd.read_parquet(tmp_path / "0.parquet")
        assert again.image.dtype == "image"
        assert_images(again.image, arrays()[rows])
        lazy = dd.read_parquet(tmp_path)
        assert lazy.image.dtype == "image"
        assert_images(lazy.compute().image, arrays()[rows])
        # By what knows nothing of pandas.
        pq.write_table(table.replace_schema_metadata(None), tmp_path / "0.parquet")
        plain = pd.read_parquet(tmp_path / "0.parquet", dtype_backend="pyarrow")
        assert_images(plain.image, arrays()[rows])

    def test_pixels_are_not_copied(self, layout):
        theirs = laid_out(layout)
        data = theirs.field("data")
        listed = pa.types.is_list(data.type) or pa.types.is_large_list(data.type)
        flat = np.asarray(data.values) if listed else np.frombuffer(data.buffers()[2], np.uint8)
        views = get_backend("pandas").arrays(pd.Series(ImageArray(theirs)))
        assert np.shares_memory(views[0], flat)

    def test_rows_are_compared_and_joined_with_ours(self, layout):
        ours, theirs = pd.Series(ImageArray(laid_out("ours"))), ImageArray(laid_out(layout))
        assert (ours == theirs).dropna().all()
        both = pd.concat([ours, pd.Series(theirs)])
        assert both.dtype == "image"
        assert both.nunique() == 5
        assert_images(both, arrays() * 2)
        plain = pd.Series(pd.arrays.ArrowExtensionArray(laid_out(layout)))
        assert_images(pd.concat([ours, plain]), arrays() * 2)


def test_frames_pickled_before_are_read():
    class AsBefore:
        def __reduce__(self):
            return ImageArray, (laid_out("first"),)

    assert_images(pd.Series(pickle.loads(pickle.dumps(AsBefore()))), arrays())


@pytest.mark.parametrize(
    "type_",
    [
        pa.struct([pa.field("data", pa.large_binary())]),
        pa.struct([pa.field("data", pa.string()), *list(IMAGE)[1:]]),
        pa.struct([pa.field("data", pa.list_(pa.int8())), *list(IMAGE)[1:]]),
        pa.struct([IMAGE[0], *(pa.field(n, pa.int64()) for n in ("height", "width", "channels"))]),
        pa.large_binary(),
    ],
)
def test_what_holds_no_images_is_not_taken_for_them(type_):
    assert not get_backend("pandas").is_images(pd.ArrowDtype(type_))
    with pytest.raises(OperandError, match="can't be one of"):
        pd.array(pa.array([None, None], pa.list_(type_)), dtype="image")


def test_an_image_with_a_null_among_its_bytes_is_refused():
    rows = [{"data": [1, None, 3], "height": 1, "width": 1, "channels": 3}]
    type_ = pa.struct([pa.field("data", pa.list_(UINT8)), *list(IMAGE)[1:]])
    with pytest.raises(pa.ArrowInvalid, match="nulls among its bytes"):
        ImageArray(pa.array(rows, type_))


class TestMoves:
    """Rows of images move as rows of Python objects would."""

    @pytest.mark.rounds(5, nightly=400)
    def test_random_moves_have_the_answer_of_objects(self, rng, tmp_path):
        keys = [rng.randrange(50) for _ in range(rng.choice([0, 1, 5, 12]))]
        frame = small_frame(keys, (2, 1, 3), bad={key for key in keys if rng.random() < 0.2})
        frame["n"] = range(len(frame))
        frame["object"] = _objects(frame)
        for _ in range(rng.randint(1, 6)):
            frame = rng.choice(_MOVES)(rng, frame, tmp_path)
            assert frame.image.dtype == "image"
            assert _objects(frame) == frame["object"].tolist()

    def test_sent_frames_are_the_buffers_that_they_had(self):
        frame = small_frame(range(200), (30, 40, 3))
        first, nbytes = frame.images.arrays()[0], 200 * 30 * 40 * 3
        both = pd.concat([frame, small_frame(range(3), (30, 40, 3))])
        for whole in (frame, both):
            header, frames = serialize(whole, on_error="raise")
            shared = [np.frombuffer(part, np.uint8) for part in frames if len(part) >= nbytes]
            assert any(np.shares_memory(part, first) for part in shared)
            assert sum(map(len, map(memoryview, frames))) < sizeof(whole) * 1.01 + 10_000
            pd.testing.assert_frame_equal(deserialize(header, frames), whole)

    def test_parts_of_a_frame_are_sent_alone(self):
        frame = small_frame(range(200), (30, 40, 3))
        pieces = pd.concat([frame.iloc[3:5], frame.iloc[100:101], frame.iloc[7:9]])
        assert len(pickle.dumps(pieces)) < 6 * 30 * 40 * 3
        pd.testing.assert_frame_equal(pickle.loads(pickle.dumps(pieces)), pieces)

    def test_arrow_gets_pieces_of_bounded_size(self, monkeypatch):
        monkeypatch.setattr(image_dtype, "_CHUNK_BYTES", 30)
        frame = pd.concat([small_frame(range(9), (2, 2, 3), bad={4}), small_frame([7], (9, 9, 3))])
        frame = frame.iloc[1:]
        pieces = pa.chunked_array(pa.array(frame.image))
        sizes = [piece.field("data").nbytes - 8 * len(piece) for piece in pieces.chunks]
        assert len(sizes) > 3
        assert sorted(sizes)[-2] < 30 + 12 + 8
        assert_images(pd.Series(ImageArray(pieces)), frame.images.arrays())
        whole = frame.iloc[:3]
        assert np.shares_memory(whole.images.stack(), whole.images.arrays()[2])


def _objects(frame):
    return [None if image is pd.NA else np.asarray(image).tobytes() for image in frame.image]


def _take(rng, frame, folder):
    rows = [rng.randrange(len(frame)) for _ in range(rng.randint(0, 6))] if len(frame) else []
    return frame.take(rows)


def _filter(rng, frame, folder):
    return frame[np.array([rng.random() < 0.6 for _ in range(len(frame))], bool)]


def _slice(rng, frame, folder):
    start, end = sorted(rng.randint(0, len(frame)) for _ in range(2))
    return frame.iloc[start:end]


def _concat(rng, frame, folder):
    return pd.concat([frame, frame.iloc[:0], frame.iloc[1:]])


def _sort(rng, frame, folder):
    return frame.sort_values(rng.choice(["key", "n"]), ascending=rng.random() < 0.5)


def _merge(rng, frame, folder):
    right = pd.DataFrame({"key": range(0, 50, 2)}, dtype="int64[pyarrow]")
    return frame.merge(right, on="key", how=rng.choice(["left", "inner"]))


def _parquet(rng, frame, folder):
    objects = frame.pop("object")
    frame.to_parquet(folder / "f.parquet")
    return pd.read_parquet(folder / "f.parquet").assign(object=objects.to_numpy())


def _table(rng, frame, folder):
    objects = frame.pop("object")
    table = pa.Table.from_pandas(frame)
    table = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    types = {IMAGE: frame.image.dtype}.get
    return table.to_pandas(types_mapper=types).assign(object=objects.to_numpy())


def _pickle(rng, frame, folder):
    return pickle.loads(pickle.dumps(frame))


def _send(rng, frame, folder):
    return deserialize(*serialize(frame, on_error="raise"))


_MOVES = [_take, _filter, _slice, _concat, _sort, _merge, _parquet, _table, _pickle, _send]
