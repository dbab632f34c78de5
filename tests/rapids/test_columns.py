"""Columns of cuDF frames: nothing is copied that need not be, and bytes stay bytes."""

import contextlib
import pickle
import re

import cloudpickle
import cudf
import host_memory as host
import numpy as np
import pyarrow as pa
import pytest
from contract import images, metadata
from cudf.comm.serialize import cuda_serialize_cudf_object
from distributed.protocol.cuda import cuda_serialize
from held_types import HELD, REFUSED

import dask_image_ingest as dii
from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.arrow_types import bytes_of
from dask_image_ingest.frames.cudf import backend as backend_module
from dask_image_ingest.frames.cudf import convert
from dask_image_ingest.frames.cudf.convert import compacted, is_head


@pytest.fixture
def backend():
    return get_backend("cudf")


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (20, 30, 3), np.uint8) for _ in range(50)]


def sent_bytes(frame, serialize):
    _, frames = serialize(frame)
    return sum(part.nbytes for part in frames)


@pytest.mark.parametrize("columns", [["a"], ["a", "image"], ["error", "a", "image"], ["image"]])
def test_a_late_decode_does_not_copy_the_pixels(backend, arrays, columns, monkeypatch):
    rows = len(arrays)
    old = {
        "a": host.column(np.arange(rows)),
        "error": host.column(np.zeros(rows, np.int8)),
        "image": host.images(arrays[::-1]),
    }
    frame = host.frame({name: old[name] for name in columns})
    decoded = host.frame(
        {"error": host.column(np.ones(rows, np.int8)), "image": host.images(arrays)}
    )
    # What is decoded goes to a GPU; how it comes into the frame is what is looked at.
    monkeypatch.setattr(backend_module, "make_frame", lambda *_: decoded)
    pixels = Pixels(np.empty(0, np.uint8), np.empty((rows, 3), np.int32), [None] * rows)
    result = backend.with_images(frame, pixels, "image", "error")
    assert host.addresses(result["image"]) == host.addresses(decoded["image"])
    assert host.addresses(result["error"]) == host.addresses(decoded["error"])
    # In the order that pandas' assign() gives.
    behind = [name for name in ("error", "image") if name not in columns]
    assert list(result.columns) == columns + behind
    assert result.index.equals(frame.index)


@pytest.mark.parametrize(("type_", "value", "held"), HELD, ids=[str(t) for t, _, _ in HELD])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(0, 0), slice(1, 2)])
def test_types_that_cudf_has_none_for_are_those_that_say_the_same(
    backend, played, type_, value, held, rows
):
    array = pa.array([value, None, value], type_)[rows]
    frame = backend.frame(pa.table({"x": array}), np.arange(len(array)), None)
    assert frame["x"].to_arrow().to_pylist() == [held, None, held][rows]
    assert frame.dtypes.to_dict() == backend.meta({"x": type_}).dtypes.to_dict()
    assert backend.holds(type_)


@pytest.mark.parametrize("type_", REFUSED)
def test_other_types_are_refused_by_the_name_of_their_column(backend, type_):
    assert not backend.holds(type_)
    named = str(type_).replace("list<item: ", "list<")
    with pytest.raises(dii.ArgumentError, match=rf"'when'.*{re.escape(named)}.*pandas"):
        backend.meta({"n": pa.int64(), "when": type_})
    with pytest.raises(dii.ArgumentError, match="'when'"):
        backend.frame(pa.table({"when": pa.nulls(2, type_)}), np.arange(2), None)


class Lists:
    """A cuDF series as far as it can be had without a GPU: its dtype, and what Arrow has of it."""

    dtype = cudf.ListDtype("uint8")

    def __init__(self, values, part=slice(None)):
        listed = [None if value is None else list(value) for value in values]
        self._array = pa.array(listed, pa.list_(pa.uint8()))[part]

    def __len__(self):
        return len(self._array)

    def to_arrow(self):
        return self._array


@pytest.mark.parametrize(
    "values",
    [
        [b"ab", b"", b"abc"],  # of several lengths
        [b"abc", b"xyz"],  # of one: not an array of numbers
        [b"abc", None, b"\0\xff"],
        [],
    ],
)
def test_bytes_come_as_bytes(backend, values):
    got = backend.values(Lists(values))
    assert got.dtype == object
    assert got.tolist() == values


def test_bytes_of_a_slice_are_its_own(backend):
    values = [b"a", b"bc", None, b"def"]
    assert backend.values(Lists(values, slice(1, 4))).tolist() == values[1:]
    sliced = pa.ListArray.from_arrays(
        pa.array([1, 3], pa.int32()), pa.array(b"abcd", pa.uint8())[1:]
    )
    assert bytes_of(sliced).to_pylist() == [bytes(value) for value in sliced.to_pylist()]


def test_bytes_that_are_all_null_are_null():
    # cuDF gives a column of lists without a value as one of nulls.
    assert bytes_of(pa.nulls(3)).to_pylist() == [None] * 3


LISTS = [
    (pa.list_(pa.float32()), [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]),
    (pa.list_(pa.float32()), [[[1, 2], []], [[3], [4]]]),  # as many numbers as lists
    (pa.list_(pa.float32()), [[[1, 2]], [[3], [4]]]),
    (pa.string(), [["a", "b"], ["c", None]]),
    (pa.string(), [[], []]),
    (pa.string(), [["a"], None]),
    (pa.binary(), [[b"a", b""], [b"\0", None]]),
    (pa.binary(), [[None], [None]]),
    (pa.timestamp("s"), [[0], [1]]),
    (pa.struct([("x", pa.int8())]), [[{"x": 1}], [{"x": 2}]]),
]


@pytest.mark.parametrize(("item", "rows"), LISTS)
def test_lists_of_what_is_no_number_come_as_they_do_from_pandas(backend, played, item, rows):
    table = pa.table({"x": pa.array(rows, pa.list_(item))})
    got, want = (
        each.values(each.frame(table, np.arange(len(rows)), None)["x"])
        for each in (backend, get_backend("pandas"))
    )
    assert (got is None) == (want is None)
    if want is not None:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert repr(got.tolist()) == repr(want.tolist())


def test_first_rows_are_known_as_a_part(arrays):
    images = host.images(arrays)
    assert is_head(host.first_rows(images, 10))
    assert is_head(host.first_rows(images, 0))
    assert is_head(host.first_rows(host.lists([a.reshape(-1) for a in arrays]), 10))
    assert not is_head(images)
    assert not is_head(host.column(np.arange(3)))


def test_first_rows_are_sent_without_the_others(arrays, monkeypatch):
    whole = host.images(arrays)
    head = host.frame({"a": host.column(np.arange(5)), "image": host.first_rows(whole, 5)})
    everything = sum(array.size for array in arrays)
    assert sent_bytes(head, cuda_serialize_cudf_object) > everything, "cuDF does it by itself now"

    # A copy of a column's rows needs a kernel: made here of the arrays that these rows are.
    few = host.frame({"image": host.images(arrays[:5])})["image"]._column
    monkeypatch.setattr(type(few), "copy", lambda self, deep=True: few if deep else self)
    sent = sent_bytes(head, cuda_serialize.dispatch(cudf.DataFrame))
    assert sum(array.size for array in arrays[:5]) <= sent < everything / 5
    assert host.addresses(head["image"]) == host.addresses(whole), "the frame itself was changed"


@pytest.mark.parametrize("rows", [host.first_rows, host.last_rows])
@pytest.mark.parametrize("kind", ["frame", "series"])
def test_rows_are_copied_to_be_sent_where_that_pins_no_memory(arrays, rows, kind, monkeypatch):
    """cuDF takes a pointer for its own copy, and never spills what it has given a pointer of."""
    part = host.frame({"image": rows(host.images(arrays), 5)}, cudf.RangeIndex(7, 12))
    if kind == "series":
        part = part["image"]
        part.name = "pixels"
    few = host.frame({"image": host.images(arrays[:5])})["image"]._column
    within, copied = [], []

    @contextlib.contextmanager
    def access(self, **how):
        within.append(how)
        yield self
        within.pop()

    def copy(self, deep=True):
        copied.append(list(within))
        return few

    monkeypatch.setattr(type(few), "access", access)
    monkeypatch.setattr(type(few), "copy", copy)
    made = compacted(part)
    assert copied == [[{"mode": "read", "scope": "internal"}]]
    assert made.index.equals(part.index)
    if kind == "series":
        assert made.name == "pixels"
    copied.clear()
    sent = sent_bytes(part, cuda_serialize.dispatch(type(part)))
    assert copied == [[{"mode": "read", "scope": "internal"}]]
    assert sum(array.size for array in arrays[:5]) <= sent < sum(a.size for a in arrays) / 5


def test_first_rows_are_pickled_without_the_others(arrays, monkeypatch):
    """As a shuffle over files does; what is pickled has to come off a GPU, which is left out."""
    head = host.frame({"image": host.first_rows(host.images(arrays), 5)})
    few = host.frame({"image": host.images(arrays[:5])})
    monkeypatch.setattr(cudf.DataFrame, "__reduce_ex__", lambda self, protocol: (len, ("abc",)))
    seen = []
    monkeypatch.setattr(convert, "compacted", lambda frame: seen.append(frame) or few)
    assert pickle.loads(pickle.dumps(head)) == 3
    assert pickle.loads(cloudpickle.dumps(head)) == 3
    assert [frame is head for frame in seen] == [True, True]


def test_whole_frames_are_sent_as_they_are(arrays):
    frame = host.frame({"a": host.column(np.arange(50)), "image": host.images(arrays)})
    assert compacted(frame) is frame


def test_what_is_played_here_gives_back_what_it_is_given(backend, played):
    """Else the tests that use it would show nothing."""
    table = metadata()
    arrays = images()
    shapes = np.array([(0, 0, 0) if a is None else a.shape for a in arrays], np.int32)
    errors = [None if a is not None else "why" for a in arrays]
    flat = np.concatenate([a.reshape(-1) for a in arrays if a is not None])
    frame = backend.frame(table, np.arange(3, 8), Pixels(flat, shapes, errors))
    got = frame[table.column_names].to_arrow(preserve_index=False).to_pydict()
    bytes_ = [None if value is None else list(value) for value in table["npy"].to_pylist()]
    assert got == table.to_pydict() | {"npy": bytes_}
    for one, other in zip(backend.arrays(frame["image"]), arrays, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            np.testing.assert_array_equal(one, other)
