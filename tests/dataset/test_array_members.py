"""Members that NumPy has saved become lists of their very values; nothing else becomes one."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from loop_over import loop_over
from synthetic import write_shard

import dask_image_ingest as dii

TYPES = {
    "list<float32>": ["f2", "f4", ">f4", "i2", "u1"],
    "list<float64>": ["f8", "f4", "i4"],
    "list<int64>": ["i8", ">i4", "u4", "u1"],
    "list<bool>": ["?"],
    "list<list<float32>>": ["f4", "f2"],
    "large_list<large_list<large_list<int16>>>": ["i2", "i1"],
}


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def column_of(folder, members, type_):
    named = {f"{number:03d}.npy": data for number, data in enumerate(members) if data is not None}
    texts = {f"{number:03d}.txt": b"-" for number in range(len(members))}
    path = write_shard(folder / "0.tar", {k: (named | texts)[k] for k in sorted(named | texts)})
    with pytest.warns(UserWarning, match="no image"):
        ddf = dii.read_webdataset_images(
            path, ["npy"], members={"npy": type_, "txt": "string"}, backend="pandas"
        )
    return ddf["npy"].compute(scheduler="synchronous")


def parsed(type_):
    if "list" not in type_:
        return pa.type_for_alias(type_)
    inner = parsed(type_.partition("<")[2][:-1])
    return pa.large_list(inner) if type_.startswith("large") else pa.list_(inner)


@pytest.mark.parametrize(
    ("shape", "type_"),
    [
        ((10**12, 0), "list<list<float32>>"),
        ((2**31, 0), "list<list<float32>>"),
        ((10**12, 0, 3), "list<list<list<float32>>>"),
        ((1000, 10**9, 0), "list<list<list<float32>>>"),
        ((0, 10**30), "list<list<float32>>"),
        ((0, 2**62, 2**62), "list<list<list<float32>>>"),
    ],
)
def test_empty_lists_beyond_the_bytes_of_a_file_are_null_and_take_no_memory(tmp_path, shape, type_):
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    few = np.empty((5, 0, 3) if type_.count("list<") == 3 else (5, 0), "f4")
    tracemalloc.start()
    with pytest.warns(UserWarning, match="1 of 2 values of 'npy' are not list"):
        found = column_of(tmp_path, [file.getvalue(), saved(few)], parsed(type_))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.isna().tolist() == [True, False]
    assert pa.array(found)[1].as_py() == few.tolist()
    assert peak < 50e6


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': True, 'shape': (2}",
        b"{'descr': '<02', 'fortran_order': False, 'shape': (2, 03)}",
        b"{'descr': '<f4', 'shape': " + b"-" * 900 + b"1}",
        b"(" * 900,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + b" " * 9000,
        b"\n\x00'",
    ],
)
def test_a_header_that_numpy_cannot_parse_is_null(tmp_path, header):
    content = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + b"1234"
    with pytest.warns(UserWarning, match="1 of 2 values of 'npy' are not list"):
        found = column_of(tmp_path, [content, saved(np.ones(3, "f4"))], parsed("list<float32>"))
    assert found.isna().tolist() == [True, False]


@pytest.mark.rounds(10, nightly=300)
@loop_over("type_", TYPES)
def test_each_value_is_the_one_that_was_saved(tmp_path, type_, rng):
    random = np.random.default_rng(rng.randrange(2**32))
    depth, arrays = type_.count("list<"), []
    for _ in range(rng.randint(1, 12)):
        shape = tuple(random.integers(0, 5, depth))
        array = random.integers(0, 100, shape).astype(rng.choice(TYPES[type_]))
        array = np.asfortranarray(array) if rng.random() < 0.3 else array
        arrays.append(None if rng.random() < 0.2 else array)
    members = [None if array is None else saved(array) for array in arrays]
    found = column_of(tmp_path, members, parsed(type_))
    assert pa.array(found).type == parsed(type_)
    told = pa.array(found).to_pylist()
    assert told == [None if array is None else array.tolist() for array in arrays]


GOOD = saved(np.arange(4, dtype="f4"))


@pytest.mark.parametrize(
    "bad",
    [
        saved(np.arange(4.0)),  # float64 would lose digits
        saved(np.arange(4, dtype="f4").reshape(2, 2)),
        saved(np.array(1, "f4")),
        saved(np.array([{}], object), allow_pickle=True),
        saved(np.array(["1"])),
        GOOD[:-1],
        GOOD + b"\\0",
        GOOD[:20],
        GOOD.replace(b"(4,)", b"(9,)"),
        GOOD.replace(b"(4,), ", b"(-4,),"),
        b"[1, 2]",
        b"",
    ],
    ids=range(12),
)
def test_what_is_no_array_of_the_type_is_null_with_a_warning(tmp_path, bad):
    with pytest.warns(
        UserWarning, match=r"1 of 3 values of 'npy' are not list<float32> and .*first that of '001'"
    ):
        found = column_of(tmp_path, [GOOD, bad, GOOD], "list<float32>")
    assert pa.array(found).to_pylist() == [[0, 1, 2, 3], None, [0, 1, 2, 3]]


def zipped(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("member", "advice"),
    [
        (
            saved(np.zeros((2, 3), "f2")),
            r"float16 of shape \(2, 3\): ask for 'list<list<float32>>'",
        ),
        (saved(np.zeros(2)), r"float64 of shape \(2,\): ask for 'list<float64>'"),
        (saved(np.zeros((1, 1, 1), "u1")), "ask for 'list<list<list<uint8>>>'"),
        (zipped(a=np.zeros(2), b=np.zeros(3)), "ask for 'binary', and np.load each value"),
        (saved(np.array(1, "f4")), "ask for another type"),
    ],
    ids=["half", "double", "cube", "npz", "scalar"],
)
def test_the_warning_says_which_type_fits(tmp_path, member, advice):
    with pytest.warns(UserWarning, match=advice) as caught:
        column_of(tmp_path, [member], "list<int32>")
    told = next(str(each.message) for each in caught if "ask for" in str(each.message))
    if "'list<" in told:
        type_ = told.rpartition("ask for '")[2].rstrip("'")
        values = pa.array(column_of(tmp_path, [member], type_)).to_pylist()
        assert values == [np.load(io.BytesIO(member)).tolist()]


def test_a_header_that_promises_more_than_there_is_allocates_nothing(tmp_path):
    promises = GOOD.replace(b"(4,), }         ", b"(9999999999,), }")
    assert len(promises) == len(GOOD)
    with pytest.warns(UserWarning, match="became null"):
        found = column_of(tmp_path, [GOOD, promises], "list<float32>")
    assert found.isna().tolist() == [False, True]


def test_vectors_come_as_one_array(tmp_path, rng):
    vectors = np.random.default_rng(0).normal(size=(6, 16)).astype("f4")
    column_of(tmp_path, [saved(vector) for vector in vectors], "list<float32>")
    with pytest.warns(UserWarning, match="no image"):
        ddf = dii.read_webdataset_images(
            tmp_path / "0.tar", members={"npy": "list<float32>"}, backend="pandas"
        )
    np.testing.assert_array_equal(ddf.images.vectors("npy").compute(), vectors)


@pytest.mark.parametrize("bad", [b"", GOOD[:3], b"[1, 2]"], ids=range(3))
def test_a_first_member_that_is_no_array_costs_its_row_alone(tmp_path, bad):
    with pytest.warns(UserWarning, match="1 of 3 values"):
        found = column_of(tmp_path, [bad, GOOD, GOOD], "list<float32>")
    assert pa.array(found).to_pylist() == [None, [0, 1, 2, 3], [0, 1, 2, 3]]
