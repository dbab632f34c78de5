"""Lists and structs of any type keep type and values wherever pandas and Dask move them."""

from __future__ import annotations

import pickle
from decimal import Decimal

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pytest
from cases import check_cases
from photo_shards import write_tar
from random_types import random_nested_type, random_type, random_value

import dask_image_ingest as dii
from dask_image_ingest.frames import pandas_type, parse_type
from dask_image_ingest.frames.arrow_types import type_name

ROWS = 12


def random_columns(rng, count):
    """A frame of nested columns of random types, and the Arrow arrays that they were made of."""
    arrays = {}
    for number in range(count):
        type_ = random_nested_type(rng)
        arrays[f"c{number}"] = pa.array([random_value(type_, rng) for _ in range(ROWS)], type_)
    frame = pd.DataFrame({"key": range(ROWS)})
    for name, array in arrays.items():
        frame[name] = pandas_type(array.type).__from_arrow__(array)
    return frame, arrays


def assert_the_same(frame, arrays, rows=range(ROWS)):
    """Dtypes, types and values are those of the arrays."""
    for name, array in arrays.items():
        got = pa.array(frame[name], from_pandas=False)
        assert frame[name].dtype == pandas_type(array.type), name
        assert got.type == array.type, name
        assert got.to_pylist() == [array[row].as_py() for row in rows], (name, array.type)


class TestNames:
    def test_every_type_is_found_by_its_name(self, rng):
        for _ in range(1000):
            type_ = random_type(rng, depth=4)
            assert parse_type(type_name(type_)) == type_
            if pa.types.is_nested(type_):
                dtype = pandas_type(type_)
                assert dtype.pyarrow_dtype == type_
                assert pd.api.types.pandas_dtype(dtype.name) == dtype
                assert pd.api.types.pandas_dtype(str(dtype)).pyarrow_dtype == type_

    def test_names_of_arrow_are_names_too(self):
        for type_ in (
            pa.list_(pa.list_(pa.float32())),
            pa.large_list(pa.timestamp("us", "UTC")),
            pa.struct([("x", pa.decimal128(5, 2)), ("y", pa.list_(pa.string()))]),
        ):
            assert parse_type(str(type_)) == type_

    def test_names_of_lists_are_those_that_users_give(self):
        assert str(pandas_type(pa.list_(pa.float32()))) == "list<float32>"
        boxes = pa.struct([("box", pa.list_(pa.list_(pa.float64()))), ("a b", pa.string())])
        assert str(pandas_type(boxes)) == 'struct<box: list<list<float64>>, "a b": string>'

    def test_what_is_no_name_is_not_understood(self):
        def check(name):
            with pytest.raises(TypeError, match="not understood"):
                pd.api.types.pandas_dtype(name)

        check_cases(
            [
                "list<",
                "list<>",
                "list<int8",
                "list<int8>>",
                "list<nothing>",
                "list<struct>",
                "struct<>",
                "struct<x>",
                "struct<x: >",
                "struct<x: int8,>",
                "struct<x: int8, : int8>",
                'struct<"x: int8>',
                'struct<"x" int8>',
                "list<int8> x",
                "list<int8>[pyarrow]",
                "list<timestamp[s>",
                "list<decimal128(99, 2)>",
                "list<" * 3000 + "int8" + ">" * 3000,
            ],
            check,
        )

    def test_types_without_a_name_stay_those_of_arrow(self):
        for type_ in (pa.map_(pa.string(), pa.int8()), pa.list_(pa.dictionary(pa.int8(), "str"))):
            assert type(pandas_type(type_)) is pd.ArrowDtype

    def test_fields_that_are_never_null_are_fields(self):
        type_ = pa.struct([pa.field("x", pa.list_(pa.field("i", pa.int8(), False)), False)])
        array = pa.array([{"x": [1]}, {"x": []}], type_)
        series = pd.Series(pandas_type(type_).__from_arrow__(array))
        assert series.tolist() == [{"x": [1]}, {"x": []}]
        assert pd.concat([series, series]).dtype == "struct<x: list<int8>>"


class TestMoves:
    def test_pickled_joined_and_taken(self, rng):
        frame, arrays = random_columns(rng, 30)
        assert_the_same(pickle.loads(pickle.dumps(frame)), arrays)
        order = rng.sample(range(ROWS), ROWS)
        assert_the_same(frame.iloc[order], arrays, order)
        assert_the_same(frame.iloc[3:7], arrays, range(3, 7))
        assert_the_same(pd.concat([frame.iloc[:5], frame.iloc[:0], frame.iloc[5:]]), arrays)
        right = frame.iloc[order].reset_index(drop=True)
        assert_the_same(frame[["key"]].merge(right, on="key"), arrays)
        assert_the_same(pd.concat(frame.iloc[[row]] for row in range(ROWS)), arrays)

    def test_joined_with_the_same_type_of_arrow_and_with_nulls(self, rng):
        frame, arrays = random_columns(rng, 10)
        for name, array in arrays.items():
            plain = pd.Series(pd.arrays.ArrowExtensionArray(array))
            nulls = pd.Series(pd.arrays.ArrowExtensionArray(pa.nulls(2)))
            rows, gaps = array.to_pylist(), [None, None]
            for parts, want in (
                ([frame[name], plain, nulls], rows + rows + gaps),
                ([nulls, plain, frame[name]], gaps + rows + rows),
            ):
                joined = pd.concat(parts)
                assert joined.dtype == pandas_type(array.type)
                assert pa.array(joined, from_pandas=False).to_pylist() == want

    @pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
    def test_parquet_and_back_by_dask_and_by_pandas(self, rng, tmp_path):
        frame, arrays = random_columns(rng, 30)
        dd.from_pandas(frame, npartitions=3).to_parquet(tmp_path / "a")
        lazy = dd.read_parquet(tmp_path / "a")
        assert lazy._meta.dtypes.to_dict() == frame.dtypes.to_dict()
        assert_the_same(lazy.compute(scheduler="sync").sort_values("key"), arrays)
        frame.to_parquet(tmp_path / "b.parquet")
        assert_the_same(pd.read_parquet(tmp_path / "b.parquet"), arrays)

    def test_empty_and_unfilled_frames_have_the_types(self, rng):
        frame, arrays = random_columns(rng, 30)
        assert_the_same(frame.iloc[:0], arrays, [])
        lazy = dd.from_pandas(frame, npartitions=2)
        assert lazy._meta_nonempty.dtypes.to_dict() == frame.dtypes.to_dict()
        shifted = frame.shift(1)
        for name, array in arrays.items():
            got = pa.array(shifted[name], from_pandas=False)
            assert got.type == array.type
            assert got.to_pylist() == [None, *array.to_pylist()[:-1]]

    @pytest.mark.slow
    def test_between_workers(self, rng, client, tmp_path):
        frame, arrays = random_columns(rng, 60)
        price = pa.array([*map(Decimal, range(ROWS - 1)), None], pa.decimal128(9, 2))
        members = {"0.jpg": b""}
        for row in range(ROWS):
            members[f"{row}.json"] = f'{{"x": [[{row}, 0.5], [], null]}}'.encode()
        path = write_tar(tmp_path / "a.tar", members)
        moved = dd.from_pandas(frame, npartitions=4).shuffle("key", npartitions=3)
        assert_the_same(moved.compute().sort_values("key"), arrays)
        prices = frame[["key"]].assign(price=pandas_type(price.type).__from_arrow__(price))
        moved = dd.from_pandas(prices, npartitions=4).shuffle("key", npartitions=3)
        told = moved.compute().sort_values("key")
        as_said = moved.astype(moved.dtypes.to_dict()).compute().sort_values("key")
        ddf = dii.read_webdataset_images(
            path, json_fields={"x": "list<list<float32>>"}, members={}, backend="pandas"
        )[["__key__", "json.x"]]
        got = ddf.shuffle("__key__").compute().set_index("__key__")["json.x"]
        # Dask makes objects of decimals; the guide says how to have the type again.
        assert pa.array(told["price"]).to_pylist() == price.to_pylist()
        assert_the_same(as_said, {"price": price})
        assert got.dtype == ddf.dtypes["json.x"] == "list<list<float32>>"
        assert got.to_dict() == {str(n): [[n, 0.5], [], None] for n in range(ROWS)}


@pytest.mark.parametrize("kind", ["list", "large_list"])
def test_lists_of_lists_explode_to_lists(kind):
    rows = [[[1], [2, 3]], None, [], [None, [4]]]
    made = pd.Series(pd.array(rows, dtype=f"{kind}<{kind}<int8>>")).explode()
    assert made.dtype == f"{kind}<int8>"
    assert made.index.tolist() == [0, 0, 1, 2, 3, 3]
    assert pa.array(made, from_pandas=False).to_pylist() == [[1], [2, 3], None, None, None, [4]]
    assert made.explode().tolist() == [1, 2, 3, pd.NA, pd.NA, pd.NA, 4]


class TestStructs:
    @pytest.fixture
    def structs(self):
        rows = [{"x": 1, "y": "a"}, None, {"x": 1, "y": "a"}, {"x": None, "y": "b"}]
        return pd.Series(pd.array(rows, dtype="struct<x: int64, y: string>"))

    def test_rows_are_compared_counted_and_set(self, structs):
        assert (structs == structs).tolist() == [True, pd.NA, True, True]
        assert (structs == {"x": 1, "y": "a"}).tolist() == [True, pd.NA, True, False]
        assert structs.drop_duplicates().index.tolist() == [0, 1, 3]
        assert structs.value_counts().tolist() == [2, 1]
        assert structs.fillna({1: {"x": 5}}).tolist()[1] == {"x": 5, "y": None}
        assert structs.explode().tolist() == structs.tolist()
        column = structs.array.copy()
        column[1] = {"x": 9, "y": ""}
        assert column.to_numpy().tolist()[1] == {"x": 9, "y": ""}
        assert structs.struct.field("x").tolist() == [1, pd.NA, 1, pd.NA]
        assert structs.astype("string")[0] == "{'x': 1, 'y': 'a'}"

    def test_hashes_are_of_the_whole_value(self):
        rows = [{"x": number} for number in range(100)]
        column = pd.array([*rows, *rows, None, None], dtype="struct<x: int64>")
        hashes = pd.util.hash_array(column)
        assert (hashes[:100] == hashes[100:200]).all()
        assert len(set(hashes)) == 101

    @pytest.mark.parametrize(
        "operation",
        [
            lambda s: s + 1,
            lambda s: s.mean(),
            lambda s: s.sort_values(),
            lambda s: s.astype(float),
            lambda s: pd.Series(["text"], dtype=s.dtype),
        ],
    )
    def test_what_structs_do_not_have_is_an_error_of_ours(self, structs, operation):
        with pytest.raises(dii.ArgumentError, match="structs"):
            operation(structs)
