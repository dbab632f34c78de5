"""What members hold becomes typed columns: null with a warning where it does not fit, always."""

import base64
import datetime
import json
import math
import random
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from loop_over import loop_over
from photo_shards import write_tar

import dask_image_ingest as dii
from dask_image_ingest.dataset.plan.scan_node import Scan

# JSON as it may come from anywhere: numbers at the edges of types, half characters, wrong kinds.
VALUES = (
    "null", "true", "false", "0", "1", "-1", "1.0", "1.5", "-0.0", "1e3", "1e300", "1e999", "NaN",
    "Infinity", "-Infinity", "127", "128", "255", "256", "-129", "16777217", "9007199254740993",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400,
    '""', '"a"', '"cat"', '"1"', '"true"', '"caf\\u00e9"', '"cut \\ud83d"', '"\\ud83d\\ude00"',
    '"nul \\u0000"', '"2020-01-02"', '"2020-01-02T03:04:05"', '"03:04:05"', "[]", "[1, 2]", "[1.5]",
    "[null]", '["a", "b"]', '["\\ud83d"]', '[1, "a"]', "[[1]]", "[true]", "{}", '{"x": 1}',
    '{"x": "a"}', '{"x": null, "y": 2}', '{"x": {"x": 1}}', '{"\\ud83d": 1}', "{", "", "[" * 5000,
    "\xef\xbb\xbf1", "1 2", "99999999999", "-99999999999",
)  # fmt: skip


def whole(low, high):
    """What an integer type takes: whole numbers within its limits."""

    def fit(value):
        if type(value) is float and value.is_integer():
            value = int(value)
        assert type(value) is int
        assert low <= value <= high
        return value

    return fit


def number(value):
    assert type(value) in (int, float)
    return float(value)


def small_number(value):
    with np.errstate(over="ignore"):
        return float(np.float32(number(value)))


def text(value):
    assert type(value) is str
    return value.encode().decode()


def flag(value):
    assert type(value) is bool
    return value


def utf8(content):
    try:
        return content.decode()
    except UnicodeDecodeError:
        return pd.NA


def items(fit):
    def fit_list(value):
        assert type(value) is list
        return [None if item is None else fit(item) for item in value]

    return fit_list


def record(value):
    assert type(value) is dict
    x = value.get("x")
    return {"x": None if x is None else int64(x)}


def day(value):
    days = datetime.date.fromisoformat(value) if type(value) is str else None
    return days or datetime.date(1970, 1, 1) + datetime.timedelta(days=int64(value))


def cents(value):
    assert type(value) in (int, float)
    exact = Decimal(str(value))
    assert exact == exact.quantize(Decimal("0.01"))
    assert abs(exact) < 1000
    return exact


int64 = whole(-(2**63), 2**63 - 1)
TYPES = {
    pa.int8(): whole(-128, 127),
    pa.uint8(): whole(0, 255),
    pa.int64(): int64,
    pa.uint64(): whole(0, 2**64 - 1),
    pa.float32(): small_number,
    pa.float64(): number,
    pa.bool_(): flag,
    pa.string(): text,
    pa.large_string(): text,
    pa.binary(): lambda value: base64.b64decode(text(value), validate=True),
    pa.list_(pa.string()): items(text),
    pa.list_(pa.float32()): items(small_number),
    pa.large_list(pa.int64()): items(int64),
    pa.list_(pa.list_(pa.int64())): items(items(int64)),
    pa.struct([("x", pa.int64())]): record,
    pa.date32(): day,
    pa.decimal128(5, 2): cents,
}
# Those whose values have no short description: that they never fail is what is asked of them.
OTHERS = (
    pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", tz="UTC"), pa.date64(),
    pa.time32("s"), pa.time64("ns"), pa.duration("s"), pa.duration("ns"), pa.large_binary(),
    pa.decimal256(40, 3), pa.list_(pa.date32()), pa.list_(pa.struct([("x", pa.timestamp("ms"))])),
    pa.struct([("x", pa.list_(pa.string())), ("y", pa.bool_())]), pa.uint32(), pa.int16(),
)  # fmt: skip


def read_quietly(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dii.read_webdataset_images(path, backend="pandas", **options)


def expected(fit, source):
    """What a field of this JSON text should be, by plain Python."""
    try:
        value = json.loads(source.encode("latin-1"))["f"]
        return None if value is None else fit(value)
    except (ValueError, AssertionError, OverflowError, RecursionError, ArithmeticError, TypeError):
        return None


def same(one, other):
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.slow
@loop_over("type_", [*TYPES, *OTHERS])
def test_any_json_becomes_any_type_or_null(type_, tmp_path):
    records = [f'{{"f": {value}}}' for value in VALUES] + ["[]", "7", '"f"', "", "\xff"]
    members = {f"{n:03d}.json": r.encode("latin-1") for n, r in enumerate(records)}
    path = write_tar(tmp_path / "a.tar", members)
    ddf = read_quietly(path, json_fields={"f": type_})[["__key__", "json.f"]]
    with pytest.warns(UserWarning, match=r"values of 'json\.f' are not"):
        frame = ddf.compute()
    column = pa.array(frame["json.f"], from_pandas=False)
    assert len(column) == len(records)
    texts = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    # pandas keeps every string as a large one.
    assert column.type == (pa.large_string() if texts else type_)
    assert not texts or frame["json.f"].dtype == "string[pyarrow]" == ddf["json.f"].dtype
    column.to_pylist()  # each can be shown
    repr(frame)
    if type_ in TYPES:
        want = [expected(TYPES[type_], record) for record in records]
        got = column.to_pylist()
        assert [
            (r, g, w) for r, g, w in zip(records, got, want, strict=True) if not same(g, w)
        ] == []
        assert sum(w is not None for w in want) >= 1


@pytest.mark.slow
@loop_over("type_", [*TYPES, *OTHERS])
def test_any_member_becomes_any_type_or_null(type_, tmp_path):
    source = random.Random(11)
    contents = [value.encode("latin-1") for value in VALUES]
    contents += [source.randbytes(source.randrange(9)) for _ in range(40)]
    contents += [b"1_000", b" 7 ", b"\xd9\xa1", b"nan", b"0x1", b"7" * 5000, b"{" * 200_000]
    members = {f"{n:03d}.m": content for n, content in enumerate(contents)}
    ddf = read_quietly(write_tar(tmp_path / "a.tar", members), members={"m": type_})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = ddf[["__key__", "m"]].compute()
    assert len(frame) == len(contents)
    raw = pa.types.is_binary(type_) or pa.types.is_large_binary(type_)
    if raw:
        assert frame["m"].tolist() == contents
    texts = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    if texts:
        assert frame["m"].tolist() == [utf8(content) for content in contents]
    assert bool(caught) is not raw


def test_the_warning_counts_what_became_null_and_names_the_first(tmp_path):
    members = {"a.json": b'{"f": 1}', "b.json": b'{"f": "\\ud83d"}', "c.json": b'{"f": "fine"}'}
    ddf = read_quietly(write_tar(tmp_path / "a.tar", members), json_fields={"f": "string"})
    with pytest.warns(UserWarning, match=r"2 of 3 values of 'json\.f' .*first that of 'a'"):
        assert ddf["json.f"].compute().tolist() == [pd.NA, pd.NA, "fine"]


@pytest.mark.parametrize("type_", [None, "string", pa.large_string()], ids=str)
def test_text_that_is_not_utf8_is_null_and_counted(type_, tmp_path):
    members = {
        "a.txt": "Zürich".encode(),
        "b.txt": "Zürich".encode("latin-1"),
        "c.txt": "Zürich".encode("utf-16"),
        "d.txt": b"",
        "e.txt": "\ud800".encode("utf-8", "surrogatepass"),
        "f.txt": "\ufffd".encode(),
        "g.cls": b"1",
    }
    path = write_tar(tmp_path / "a.tar", members)
    ddf = read_quietly(path, members="infer" if type_ is None else {"txt": type_})
    told = r"3 of 7 values of 'txt' are not UTF-8 and became null, first that of 'b'"
    with pytest.warns(UserWarning, match=told):
        frame = ddf[["__key__", "txt"]].compute()
    assert frame["txt"].tolist() == ["Zürich", pd.NA, pd.NA, "", pd.NA, "\ufffd", pd.NA]
    with pytest.warns(UserWarning, match=told):
        assert ddf[ddf["txt"].isna()]["__key__"].compute().tolist() == ["b", "c", "e", "g"]


@loop_over(
    "asked, type_",
    [
        (str, "string"), (int, "int64"), (float, "double"), (bool, "bool"), (bytes, "binary"),
        (np.float32, "float"), (np.dtype("uint8"), "uint8"), (np.dtype("M8[s]"), "timestamp[s]"),
        ("list<float32>", "list<element: float>"), (pa.large_string(), "string"),
        ("list<list<float32>>", "list<element: list<element: float>>"),
        ("struct<x: list<timestamp[s]>>", "struct<x: list<element: timestamp[s]>>"),
        ("decimal128(5, 2)", "decimal128(5, 2)"), ("timestamp[s, tz=UTC]", "timestamp[s, tz=UTC]"),
    ],
)  # fmt: skip
def test_types_of_python_numpy_and_arrow_are_types_of_columns(asked, type_, tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.json": b'{"f": null}', "a.txt": b""})
    ddf = read_quietly(path, json_fields={"f": asked}, members={"txt": asked})
    types = next(ddf.expr.find_operations(Scan)).dataset.schema.types
    assert types["json.f"] == types["txt"]
    assert str(types["txt"]).replace("item", "element") == type_


@loop_over(
    "type_",
    [
        "strnig", 7, None, object, dict, [str], np.dtype("O"), np.dtype("c16"), "float16", "null",
        pa.map_(pa.string(), pa.int64()), pa.dictionary(pa.int8(), pa.string()), pa.struct([]),
        pa.list_(pa.null()), pa.struct([("x", pa.int8())] * 2), "map<string, int8>",
        pa.month_day_nano_interval(), pa.timestamp("s", tz="Nowhere/None"),
        "list<image>", "list<" * 2000 + "int8" + ">" * 2000,
    ],
)  # fmt: skip
def test_what_is_no_type_of_a_column_is_refused_by_name(type_, tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.json": b"{}", "a.txt": b""})
    for argument in ("json_fields", "members"):
        with pytest.raises(dii.ArgumentError, match=rf"{argument}\['txt'\]: .* no type of a col"):
            read_quietly(path, **{argument: {"txt": type_}})


def test_members_named_like_columns_and_like_each_other_all_have_a_column(tmp_path):
    members = {
        "a.width": b"1",
        "a.member.width": b"2",
        "a.member.member.width": b"3",
        "a.image": b"4",
        "a.json": b'{"f": 5}',
        "a.json.f": b"6",
    }
    path = write_tar(tmp_path / "a.tar", members)
    columns = {
        "member.member.member.width": b"1",
        "member.width": b"2",
        "member.member.width": b"3",
        "member.image": b"4",
        "json.f": 5,
        "member.json.f": b"6",
    }
    frame = read_quietly(path, json_fields={"f": int})[[*columns]].compute()
    assert frame.iloc[0].to_dict() == columns
    named = read_quietly(path, members={".width": int, "member.width": int}).compute()
    assert named[["member.member.width", "member.width"]].iloc[0].tolist() == [1, 2]


def test_labels_beyond_64_bits_are_strings(tmp_path):
    members = {"a.cls": b"1", "b.cls": str(2**70).encode()}
    frame = read_quietly(write_tar(tmp_path / "a.tar", members))[["cls"]].compute()
    assert frame["cls"].tolist() == ["1", str(2**70)]


@pytest.mark.parametrize("extension", ["cls", "id", "index"])
def test_labels_with_underscores_are_names_and_no_numbers(extension, tmp_path):
    labels = ["1_23", "12_3", "123"]
    members = {f"{n}.{extension}": label.encode() for n, label in enumerate(labels)}
    path = write_tar(tmp_path / "a.tar", members)
    assert read_quietly(path)[extension].compute().tolist() == labels
    for type_, number in (("int64", 123), ("float64", 123.0)):
        asked = read_quietly(path, members={extension: type_})
        with pytest.warns(UserWarning, match=f"2 of 3 values of '{extension}' .*first that of '0'"):
            column = asked[extension].compute()
        assert pa.array(column, from_pandas=True).to_pylist() == [None, None, number]


def test_labels_with_underscores_after_those_looked_at_are_null(tmp_path):
    members = {f"{n:03d}.cls": b"7" if n < 100 else b"7_7" for n in range(101)}
    ddf = read_quietly(write_tar(tmp_path / "a.tar", members))
    with pytest.warns(UserWarning, match="1 of 101 values of 'cls'"):
        assert ddf["cls"].compute().tolist() == [7] * 100 + [pd.NA]
