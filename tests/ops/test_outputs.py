"""What a function of ``map_batches`` gives comes out by value, or is an error that says where."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from cases import check_cases
from dask.utils import key_split
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii
from dask_image_ingest.ops.outputs import first_lossy


@pytest.fixture
def frame():
    return small_frame(range(4), (2, 3, 3)).rename(columns={"key": "__key__"})


def out(frame, values, type_):
    """What becomes of ``values`` that a function gives for the four images."""
    made = frame.images.map_batches(lambda images: values, {"o": type_})
    column = made["o"]
    return [None if value is None else value for value in column.astype(object)]


class TestNumbers:
    def test_a_number_that_its_type_cannot_hold_is_refused(self, frame):
        def check(type_, values, told):
            with pytest.raises(dii.ArgumentError, match=told):
                out(frame, values, type_)

        check_cases(
            [
                ("uint8", np.full(4, 300), "300 in 'o', which uint8 can't hold"),
                ("uint8", [1, 2, 3, -1], "-1 in 'o'"),
                ("int64", np.full(4, 0.9), r"0\.9 in 'o', which int64 can't hold"),
                ("int64", np.array([1, 2, np.nan, 3]), "nan in 'o'"),
                ("int32", np.array([1, 2, np.inf, 3], "f4"), "inf in 'o'"),
                ("int64", np.full(4, 2**63 + 5, "u8"), "9223372036854775813 in 'o'"),
                ("int64", np.full(4, 2.0**63), r"9\.223372036854776e\+18 in"),
                ("int64", [2**64] * 4, "18446744073709551616 in 'o'"),
                ("float64", [10**400, 1, 2, 3], "10+… in 'o'|no array of numbers"),
                ("uint64", [2**63, None, 2**64, 0], "18446744073709551616 in 'o'"),
                ("list<int64>", [[2**63, 1], [1, 1]] * 2, "9223372036854775808 in 'o'"),
                ("struct<a: uint64>", [{"a": -1}, {"a": 2**63}] * 2, "-1 in 'o'"),
                ("int64", [2**63, -1, 0, 0], r"9223372036854775808 in 'o'"),
                ("uint64", [np.int64(-1), np.uint64(2**63 + 1), 0, 0], "-1 in 'o'"),
                ("int8", np.array([300] * 4, object), "300 in 'o'"),
                ("int64", [Decimal("1.00000000000000000001"), 1, 1, 1], "Decimal.* in 'o'"),
                ("bool", np.full(4, 0.2), r"0\.2 in 'o', which bool can't hold"),
                ("bool", [0, 1, 2, 0], "2 in 'o'"),
                ("float16", np.full(4, 70_000.0), r"70000\.0 in 'o', which float16 can't hold"),
                ("float32", np.full(4, 1e300), r"1e\+300 in 'o'"),
                ("list<int8>", np.full((4, 2), 200), "200 in 'o', which int8"),
            ],
            check,
        )

    def test_a_number_of_another_type_keeps_its_value(self, frame):
        def check(type_, values):
            assert out(frame, values, type_) == np.asarray(values).tolist()

        check_cases(
            [
                ("uint8", np.array([0, 255, 1, 2])),
                ("int64", np.array([1.0, -3.0, 2.0**52, 0.0])),
                ("int64", np.array([0, 2**63 - 1, 1, 2], "u8")),
                ("uint64", np.full(4, 2**64 - 1, "u8")),
                ("int8", [True, False, True, True]),
                ("bool", [0, 1, 1, 0]),
                ("bool", np.array([0.0, 1, 1, 0])),
                ("float32", np.array([0.5, np.inf, -np.inf, 0.25])),
                ("float64", [1, 2.5, 3, 4]),
            ],
            check,
        )

    def test_integers_of_python_never_become_floats_on_the_way(self, frame):
        large, low, scalar = 2**63 + 5, [3, 1, 4, 1], np.uint64(2**64 - 1)
        for values in ([large, *low[1:]], [large, None, 2**64 - 1, 0], [scalar, 3, np.int8(1), 0]):
            nested = [None if value is None else [value, 1] for value in values]
            for given in (values, tuple(values), np.array(values, object)):
                assert isna_is_none(out(frame, given, "uint64")) == list(map(plain, values))
            for type_, rows in {
                "list<uint64>": nested,
                "uint64[2]": nested,
                "list<list<uint64>>": [[row, [1], []] if row else None for row in nested],
                "struct<h: uint64>": [{"h": value} for value in values],
                "list<struct<h: uint64>>": [[{"h": value}, None] for value in values],
            }.items():
                assert isna_is_none(out(frame, rows, type_)) == plain(rows), type_

    @pytest.mark.parametrize("missing", [None, float("nan")])
    def test_a_float_is_rounded_and_a_missing_one_is_null(self, frame, missing):
        given = [missing, 0.1, 1 / 3, 2]
        made = frame.images.map_batches(lambda images: given, {"o": "float32"})
        np.testing.assert_array_equal(
            made["o"].to_numpy("f4", na_value=np.nan), np.array([np.nan, 0.1, 1 / 3, 2], "f4")
        )
        assert made["o"].isna().tolist() == [True, False, False, False]
        lazy = dd.from_pandas(made, npartitions=2)["o"]
        assert lazy.mean().compute() == pytest.approx((0.1 + 1 / 3 + 2) / 3)

    def test_random_numbers_fit_where_python_says_so(self, rng):
        types = ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
        edges = [2**n + d for n in (7, 8, 15, 16, 31, 32, 53, 63, 64) for d in (-1, 0, 1)]
        edges += [-n for n in edges] + [0, 1, 2]
        for _ in range(3000):
            source, target = np.dtype(rng.choice(types)), np.dtype(rng.choice(types))
            array = np.empty(3, source)
            for place in range(3):
                value = rng.choice(edges) * (rng.choice([1, 1, 0.5]) if source.kind == "f" else 1)
                with np.errstate(over="ignore"):
                    if source.kind in "iu":
                        bounds = np.iinfo(source)
                        value = min(max(value, bounds.min), bounds.max)
                    array[place] = bool(value) if source.kind == "b" else value
            if source.kind == "f" and rng.random() < 0.1:
                array[1] = rng.choice([np.nan, np.inf, -np.inf])
            bad = [value for value in array.tolist() if not holds(target, value)]
            if source == np.float64 and target.kind in "iu":
                bad += [value for value in array.tolist() if abs(value) >= 2**53]
            found = first_lossy(array, target, np)
            told = (source, target, array, found)
            if bad:
                assert any(found == value or found != found for value in bad), told
            else:
                assert found is None, told
                if target.kind != "f":
                    assert array.astype(target).tolist() == array.tolist(), told


def holds(target, value):
    """Whether a NumPy type has this number of Python's, floats but for their digits."""
    if target.kind == "f":
        most = Fraction(float(np.finfo(target).max))
        # Half a unit behind the largest number is rounded to infinity.
        unit = Fraction(2) ** (np.finfo(target).maxexp - np.finfo(target).nmant - 1)
        return not math.isfinite(value) or abs(Fraction(value)) < most + unit / 2
    if target.kind == "b":
        return value in (0, 1)
    if not math.isfinite(value) or Fraction(value).denominator != 1:
        return False
    return np.iinfo(target).min <= int(value) <= np.iinfo(target).max


def plain(value):
    """A value as Python's own lists and numbers."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def isna_is_none(values):
    return [None if value is pd.NA else plain(value) for value in values]


class TestNulls:
    def test_what_a_mask_hides_is_null(self, frame):
        def masked(values, **options):
            values = np.array(values, **options)
            return np.ma.array(values, mask=np.arange(values.size).reshape(values.shape) % 2)

        large = 2**63 + 5
        for type_, given, expected in [
            ("int64", masked([1, 2, 3, 4]), [1, None, 3, None]),
            ("uint64", masked([large, 2, 3, 4], dtype="u8"), [large, None, 3, None]),
            ("bool", masked([True, True, False, False]), [True, None, False, None]),
            ("float32", masked([0.5, 1, 2, 3]), [0.5, None, 2.0, None]),
            ("string", masked(["a", "b", "c", "d"]), ["a", None, "c", None]),
            ("binary", masked([b"a", b"b", b"c", b"d"]), [b"a", None, b"c", None]),
            ("list<float32>", masked([[0.5, 1]] * 4), [[0.5, None]] * 4),
            ("list<int64>", [masked([1, 2, 3]), np.ma.masked, [1, np.ma.masked], masked([1])],
             [[1, None, 3], None, [1, None], [1]]),
            ("list<list<int64>>", [[masked([1, 2]), np.ma.masked]] * 4, [[[1, None], None]] * 4),
            ("struct<a: int64, b: list<int64>>", [{"a": np.ma.masked, "b": masked([1, 2])}] * 4,
             [{"a": None, "b": [1, None]}] * 4),
            ("int64[2]", np.ma.array([[1, 2]] * 4, mask=False), [[1, 2]] * 4),
            ("int64", [1, pd.NA, np.ma.masked, None], [1, None, None, None]),
            ("uint64", pd.Series([large, None, 3, 4], dtype="UInt64"), [large, None, 3, 4]),
            ("uint64", pa.array([large, None, 3, 4], pa.uint64()), [large, None, 3, 4]),
            ("uint64", list(pa.array([large, None, 3, 4], pa.uint64())), [large, None, 3, 4]),
        ]:  # fmt: skip
            assert isna_is_none(out(frame, given, type_)) == expected, (type_, given)


class TestOtherAnswers:
    def test_what_is_no_value_of_the_type_is_refused(self, frame):
        def check(type_, values, told):
            with pytest.raises(dii.ArgumentError, match=told):
                out(frame, values, type_)

        check_cases(
            [
                ("string", [1, 2, 3, 4], "gave 1 in 'o', and outputs= says string"),
                ("string", ["a", "b", 3.5, "d"], "gave 3.5 in 'o'"),
                ("string", "abcd", "gave 'abcd' as 'o': give an array or a list"),
                ("string", {"a", "b", "c", "d"}, "give an array or a list"),
                ("binary", b"abcd", "gave b'abcd' as 'o': give an array or a list"),
                ("binary", [1, 2, 3, 4], "gave 1 in 'o', and outputs= says binary"),
                ("string", None, "gave None as 'o'"),
                ("float32", None, "gave None as 'o'"),
                ("float32", "abcd", "gave 'abcd' as 'o'"),
                ("float32", ["a", "b", "c", "d"], "no array of numbers"),
                ("float32", np.array([1j] * 4), "no array of numbers"),
                ("int64", np.array(["2020-01-01"] * 4, "M8[s]"), "no array of numbers"),
                ("list<float32>", [[1], ["a", "b"], [1], [1]], "no array of numbers"),
                (
                    "list<float32>",
                    [[1], [[1]], [1, 2], [1]],
                    "gave .* in 'o'.*list<float32>|no array",
                ),
                ("list<float32>", [[1], 2, [1, 2], [1]], "gave 2 in 'o'.*list<float32>"),
                ("list<int8>", [[1], [1, 200], [1], None], "200 in 'o', which int8 can't hold"),
                ("list<string>", ["a", ["b"], [], None], "gave 'a' in 'o'.*list<string>"),
                ("list<string>", [["a"], ["b", 1], [], None], r"gave 1 in 'o'"),
                ("list<list<float32>>", [[[1]], [1], [], None], "gave 1 in 'o'"),
                ("struct<a: int64>", [{"a": 1}, {"b": 1}, None, {}], "give dicts of a"),
                ("struct<a: int64>", [{"a": 1}, {"a": 1.5}, None, {}], r"1\.5 in 'o', which int64"),
                ("struct<a: int64>", 3, "gave 3 as 'o'"),
                ("float32[2]", np.zeros((4, 3)), r"shape \(4, 3\), and outputs= says float32\[2\]"),
                (
                    "float32[2]",
                    [np.zeros(2), None, np.zeros(3), None],
                    r"in 'o', and outputs= says float32\[2\]",
                ),
                ("float32[2, 2]", np.zeros((4, 4)), r"says float32\[2, 2\] for each image"),
            ],
            check,
        )

    @pytest.mark.parametrize(
        ("type_", "values"),
        [
            ("string", ["a", None, "", "ä"]),
            ("string", np.array(["a", "b", "c", "d"])),
            ("string", ("a", "b", "c", "d")),
            ("binary", [b"a", b"\xff", None, b""]),
        ],
    )
    def test_texts_and_bytes_come_out_as_they_were(self, frame, type_, values):
        got = frame.images.map_batches(lambda images: values, {"o": type_})["o"]
        assert got.astype(object).where(got.notna(), None).tolist() == list(values)

    @pytest.mark.parametrize(
        ("type_", "values"),
        [
            ("int64", [1, None, 2**62 + 1, 3]),
            ("bool", [True, None, False, None]),
            ("list<float32>", [[1.5], [], None, [2.0, 3.0]]),
            ("list<int64>", [[1, None], [], None, [2**62 + 1]]),
            ("list<list<float32>>", [[[0.0, 1.0, 2.0, 3.0]] * 2, [], None, [[1.0]]]),
            ("list<float32[2]>", [[[0.0, 1.0]] * 2, [], None, [[1.0, 2.0]]]),
            ("list<string>", [["a", None], [], None, ["ä"]]),
            ("list<struct<name: string, n: int8>>", [[{"name": "a", "n": 1}], [], None, []]),
            (
                "struct<a: int64, b: list<bool>>",
                [{"a": 1, "b": [True]}, None, {"a": None, "b": None}, {"a": 3, "b": []}],
            ),
            ("float16[2, 1]", [[[1.0], [0.5]], None, [[0.0], [2.0]], None]),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("batch_size", [4, 1])
    def test_rows_that_differ_in_length_or_are_none_come_out_as_they_were(
        self, frame, type_, values, batch_size
    ):
        given = iter([values[at : at + batch_size] for at in range(0, 4, batch_size)])
        made = frame.images.map_batches(
            lambda images: next(given), {"o": type_}, batch_size=batch_size
        )["o"]
        assert made.dtype == type_ or type_ in ("int64", "bool")
        got = made.astype(object).where(made.notna(), None).tolist()
        assert [v.tolist() if hasattr(v, "tolist") else v for v in got] == values

    def test_rows_may_be_arrays(self, frame):
        boxes = [np.arange(4.0 * n).reshape(n, 4) for n in (1, 0, 2, 1)]
        made = frame.images.map_batches(lambda images: boxes, {"o": "list<float32[4]>"})
        (batch,) = made.images.iter_batches(4, columns=["o"])
        for one, other in zip(batch["o"], boxes, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_an_image_that_is_none_is_missing(self, frame):
        image = np.zeros((4, 4, 3), "uint8")
        made = frame.images.map_batches(lambda x: [image, None, image, image], {"image": "image"})
        assert [array is None for array in made.images.arrays()] == [False, True, False, False]

    def test_the_error_names_function_shard_and_sample(self):
        parts = [small_frame(keys).rename(columns={"key": "__key__"}) for keys in ([0, 1], [7, 8])]
        ddf = lazy_frame([part.assign(__url__=f"{n}.tar") for n, part in enumerate(parts)])

        def brightest(images):
            return np.full(len(images), 0.5 if images.max() > 5 else 1)

        mapped = ddf.images.map_batches(brightest, {"o": "int64"}, batch_size=2)
        with pytest.raises(dii.ArgumentError) as told:
            mapped.compute()
        where = "brightest, called with 2 images, from sample 7 of 1.tar to sample 8 of 1.tar)"
        assert where in str(told.value)

    @pytest.mark.parametrize(
        ("type_", "good", "bad"),
        [
            ("uint8", 1, 300),
            ("float32", 1.5, 1e300),
            ("list<int8>", [1, 2], [1, 200]),
            ("string", "a", b"\xff"),
            ("image", np.zeros((4, 4, 3), "uint8"), np.zeros((4, 4), "uint8")),
        ],
    )
    @pytest.mark.parametrize("named", [True, False])
    def test_a_wrong_output_is_told_with_the_batch(self, type_, good, bad, named):
        frame = small_frame([0, 1, 2, 3]).rename(columns={"key": "__key__"})

        def third(images):
            values = [good, good, bad, good]
            return {"o": values} if named else values

        with pytest.raises(
            dii.ArgumentError, match=r"third, called with 4 images, from sample 0 to sample 3\)$"
        ):
            frame.images.map_batches(third, {"o": type_})

    def test_gray_images_are_told_to_have_a_channel(self, frame):
        for values in ([np.zeros((4, 4), "uint8")] * 4, np.zeros((4, 9, 9), "uint8")):
            with pytest.raises(dii.ArgumentError, match=r"image\[\.\.\., None\]") as told:
                frame.images.map_batches(lambda images, v=values: v, {"o": "image"})
            assert "clip" not in str(told.value)

    def test_the_error_of_a_frame_without_keys_names_the_row(self, frame):
        def none(images):
            return np.zeros(0)

        with pytest.raises(dii.ArgumentError) as told:
            frame[["image"]].images.map_batches(none, {"o": "float32"}, batch_size=2)
        where = "called with 2 images, from row 0 of a partition to row 1 of a partition)"
        assert str(told.value).endswith(where)

    def test_an_answer_that_fails_when_it_is_looked_at_is_a_function_error(self, frame):
        class Odd:
            dtype = np.dtype("f4")

            def __array__(self, dtype=None, copy=None):
                raise MemoryError("not enough")

        with pytest.raises(
            dii.FunctionError, match=r"<lambda> fails for one of 4 images.*not enough"
        ):
            out(frame, Odd(), "float32")


class TestTensors:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch", reason="pip install torch==2.13.0")

    @pytest.mark.torch
    def test_a_model_in_training_need_not_detach(self, frame, torch):
        values = torch.arange(4.0, requires_grad=True) * 2
        assert out(frame, values, "float32") == [0, 2, 4, 6]
        assert out(frame, list(values), "float32") == [0, 2, 4, 6]

    @pytest.mark.torch
    @pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float16"])
    def test_floats_of_few_bits_keep_their_values(self, frame, torch, kind):
        values = torch.tensor([0.5, 1, -2, 4], requires_grad=True).to(getattr(torch, kind))
        assert out(frame, values, "float32") == [0.5, 1, -2, 4]
        made = frame.images.map_batches(lambda x: values[:, None], {"v": "list<float32>"})
        assert made.images.vectors("v").ravel().tolist() == [0.5, 1, -2, 4]

    @pytest.mark.torch
    def test_images_may_be_tensors(self, frame, torch):
        def doubled(images):
            return torch.from_numpy(images).mul_(2)

        made = frame.images.map_batches(doubled, {"image": "image"})
        for one, other in zip(made.images.arrays(), frame.images.arrays(), strict=True):
            np.testing.assert_array_equal(one, other * 2)


@pytest.mark.slow
def test_the_dashboard_tells_reads_decodes_moves_and_functions_apart(shards, client):
    def names(collection):
        before = client.run_on_scheduler(states)
        client.compute(collection).result()
        return {
            name
            for name, count in client.run_on_scheduler(states).items()
            if count > before.get(name, 0)
        }

    def states(dask_scheduler):
        return {
            name: sum(prefix.state_counts.values())
            for name, prefix in dask_scheduler.task_prefixes.items()
        }

    class Embed:
        def __call__(self, images):
            return images.mean(axis=(1, 2))

    ddf = dii.read_webdataset_images(shards, size=16)
    merged = {"repartitiontofewer"}  # by dask, for the client
    assert names(ddf) - merged == {"readDecode"}
    assert names(ddf[["cls"]]) - merged == {"readMetadata"}
    assert names(ddf[ddf.cls.map(bool, meta=("cls", bool))]) - merged == {"readDecode"}
    made = ddf.images.map_batches(Embed, {"embedding": "list<float32>"})
    assert names(made) - merged == {"readDecode", "mapEmbed"}
    assert {key_split(key) for key in made.optimize().dask} == {"readDecode-mapEmbed"}
    references = dii.read_webdataset_images(shards, decode=False)
    assert names(references) - merged == {"readMetadata"}
    assert names(dii.decode_images(references.persist())) >= {"decode"}
    assert names(ddf.shuffle("__key__")) >= {"readMetadata", "inOrder", "decode"}


@pytest.mark.parametrize("verb", ["map_rows", "map_batches"])
def test_outputs_too_large_for_one_chunk_are_in_several(monkeypatch, verb):
    monkeypatch.setattr("dask_image_ingest.ops.outputs._MOST_BYTES", 40)  # Arrow has 2 GiB
    texts = [[f"{row} " + "x" * 9] * (row % 3) for row in range(12)]

    def of_row(key):
        if key in (0, 5, 6):
            raise ValueError
        return texts[key]

    function = of_row if verb == "map_rows" else lambda keys: [of_row(key) for key in keys]
    size = {} if verb == "map_rows" else {"batch_size": 2}
    frame = small_frame(range(12))[["key"]]
    made = getattr(frame.images, verb)(
        function, {"o": "list<string>"}, inputs=["key"], errors="null", **size
    )
    column = pa.array(made["o"])
    assert column.num_chunks > 3
    want = [None if key in (0, 5, 6) else texts[key] for key in range(12)]
    assert column.to_pylist() == want
    again = made.images.map_batches(
        lambda rows: [row and list(row) for row in rows], {"o": "list<string>"}, inputs=["o"]
    )
    assert pa.array(again["o"]).to_pylist() == want


@pytest.mark.nightly
def test_a_partition_of_rows_may_have_more_than_2_gib_of_strings():
    text = "x" * 450_000_000
    made = small_frame(range(6))[["key"]].images.map_rows(
        lambda key: text if key != 2 else 1 / 0, {"o": "string"}, inputs=["key"], errors="null",
        concurrency=1,
    )  # fmt: skip
    assert made["o"].str.len().fillna(0).tolist() == [len(text)] * 2 + [0] + [len(text)] * 3
