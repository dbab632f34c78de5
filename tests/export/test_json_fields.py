"""Fields set in a sample's own JSON: everything else of it keeps its order and its digits."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from arrow_values import OTHERS, PLAIN, UNREAD, nested
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.export.members import with_fields

OWN = {
    "a": b'{"id": 1.50, "caption" :  "old",\t"user": {"name": "x", "age": 3e2}, "z": [1, 2 ]}\n',
    "b": b'{\n  "id": 12345678901234567890123,\n  "who": "Gr\\u00fc\xc3\x9fe"\n}',
    "c": b"{}",
    "d": None,
    "e": b'{"caption": "first", "caption": "last", "x": NaN}',
}
NEW = {
    "a": b'{"id": 1.50, "caption": "new a", "user": {"name": "n", "age": 3e2}, "z": [1, 2], '
    b'"score": 0.1}',
    "b": b'{"id": 12345678901234567890123, "who": "Gr\xc3\xbc\xc3\x9fe", "caption": "new b", '
    b'"user": {"name": "n"}, "score": 0.1}',
    "c": b'{"caption": "new c", "user": {"name": "n"}, "score": 0.1}',
    "d": b'{"caption": "new d", "user": {"name": "n"}, "score": 0.1}',
    "e": b'{"caption": "new e", "x": NaN, "user": {"name": "n"}, "score": 0.1}',
}
MEMBERS = {"json": ["json.caption", "json.user.name", "score"]}


def shard(folder, name="in.tar"):
    members = {}
    for key, content in OWN.items():
        members[f"{key}.jpg"] = key.encode()
        if content is not None:
            members[f"{key}.json"] = content
        members[f"{key}.txt"] = b"t"
    content = tar(members)
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    return folder / name


def with_columns(frame):
    return frame.assign(
        **{
            "json.caption": "new " + frame["__key__"],
            "json.user.name": "n",
            "score": np.float32(0.1),
        }
    )


@pytest.mark.parametrize("name", ["in.tar", "in.tar.gz"])
@pytest.mark.parametrize("lazy", [True, False])
def test_fields_are_set_and_all_else_stays(name, lazy, tmp_path):
    path = shard(tmp_path, name)
    ddf = dii.read_webdataset_images(path, backend="pandas").drop(columns=["image", "error"])
    table = with_columns(ddf if lazy else ddf.compute())
    table["score"] = table["score"].astype(pd.ArrowDtype(pa.float32()))
    written = dii.to_webdataset(table, tmp_path / "out" / "{shard}.tar", members=MEMBERS)
    assert written["samples"].sum() == 5
    found = dict(by_webdataset(shards_in(tmp_path / "out")))
    assert {key: members["json"] for key, members in found.items()} == NEW
    for key, members in found.items():
        assert members["jpg"] == key.encode()
        assert [name for name in members if name != "json"] == ["jpg", "txt"]
    # The fields are read as they were written.
    names = {"caption": "string", "user.name": "string", "score": "float32"}
    back = dii.read_webdataset_images(
        tmp_path / "out" / "*.tar", json_fields=names, backend="pandas", sidecar=None
    )
    back = back[["__key__", *(f"json.{name}" for name in names)]].compute()
    assert back["json.caption"].tolist() == [f"new {key}" for key in "abcde"]
    assert back["json.user.name"].tolist() == ["n"] * 5
    assert back["json.score"].tolist() == [np.float32(0.1)] * 5


def test_a_member_that_is_no_object_is_rejected(tmp_path):
    bad = {"a": b"[1]", "b": b'{"x": 1', "c": b'{"x": "\xff"}', "d": b"{} {}", "e": b'{"x": 1}'}
    bad |= {"f": b"[" * 100_000, "g": b""}
    members = {}
    for key, content in bad.items():
        members |= {f"{key}.jpg": b"j", f"{key}.json": content}
    (tmp_path / "in.tar").write_bytes(tar(members))
    ddf = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    table = ddf[["__key__", "__url__", "offset", "nbytes"]].assign(s=1)
    out = tmp_path / "out" / "{shard}.tar"
    with pytest.raises(dii.ArgumentError, match="bad-json: no field can be set in its json"):
        dii.to_webdataset(table, out, members={"json": ["s"]})
    written = dii.to_webdataset(table, out, members={"json": ["s"]}, row_errors="drop")
    assert written.attrs["left_out"]["bad-json"]["count"] == 6
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == {
        "e": {"jpg": b"j", "json": b'{"x": 1, "s": 1}'}
    }


def test_a_field_that_is_named_twice_is_refused(tmp_path):
    ddf = dii.read_webdataset_images(shard(tmp_path), backend="pandas")
    table = ddf.drop(columns=["image", "error"]).assign(x=1, **{"json.x": 2})
    with pytest.raises(dii.ArgumentError, match="two are the same field"):
        dii.to_webdataset(table, tmp_path / "out/{shard}.tar", members={"json": ["x", "json.x"]})


def value_of(rng, depth=0):
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [value_of(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {name_of(rng): value_of(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [None, rng.random() < 0.5, rng.randrange(-5, 10**20), rng.random(), name_of(rng)][kind]


def name_of(rng):
    return "".join(rng.choice('ab."\\{}[]:, \né\U0001f600') for _ in range(rng.randrange(4)))


def set_in(value, path, new):
    """The witness, on parsed JSON."""
    whole = ".".join(path)
    if len(path) == 1 or whole in value:
        return {**value, whole: new}
    inner = value.get(path[0], {})
    if not isinstance(inner, dict):
        return {**value, whole: new}
    return {**value, path[0]: set_in(inner, path[1:], new)}


@pytest.mark.rounds(3, nightly=100)
def test_random_objects_have_the_field_and_keep_the_rest(rng):
    for _ in range(200):
        own = {name_of(rng): value_of(rng) for _ in range(rng.randrange(5))}
        indent = rng.choice([None, 0, 2, "\t"])
        text = json.dumps(own, indent=indent, ensure_ascii=rng.random() < 0.5)
        text = rng.choice(["", " ", "\n"]) + text + rng.choice(["", " \n"])
        names = list(own) or [""]
        path = (rng.choice([*names, name_of(rng)]),)
        if rng.random() < 0.5:
            path = tuple((*path, name_of(rng))[0:2])
        new = value_of(rng)
        made = set_in({}, path, new)
        changed = json.loads(with_fields(text.encode(), json.dumps(made).encode(), [path]))
        assert changed == set_in(own, path, new)
        assert list(changed) == list(set_in(own, path, new))


def test_values_of_every_arrow_type_are_json_that_is_read_as_they_were(tmp_path):
    members = {f"{key}.jpg": b"j" for key in "abc"}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    frame = frame[["__key__", "__url__", "offset", "nbytes"]].compute()
    read, unread = (
        {
            f"{origin}{number}": each
            for number, each in enumerate(each for a in arrays for each in (a, *nested(a)))
        }
        for origin, arrays in (("r", [*PLAIN, *OTHERS]), ("u", UNREAD[:-2]))
    )
    columns = {
        name: pd.arrays.ArrowExtensionArray(pa.chunked_array([array]))
        for name, array in (read | unread).items()
    }
    frame = frame.assign(**columns)
    dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", members={"json": [*columns]})
    objects = [
        json.loads(members["json"], parse_float=Decimal, parse_constant=pytest.fail)
        for _, members in by_webdataset(shards_in(tmp_path / "out"))
    ]
    for name, array in (read | unread).items():
        values = array.to_pylist()
        if pa.types.is_dictionary(array.type) or is_number(array.type):
            got = [row[name] for row in objects]
            as_decimals = [v if isinstance(v, (str, type(None))) else Decimal(v) for v in got]
            wanted = [v if isinstance(v, (str, type(None))) else shortest(v, array) for v in values]
            assert as_decimals == wanted, array.type
    fields = {
        name: array.type for name, array in read.items() if "halffloat" not in str(array.type)
    }
    back = dii.read_webdataset_images(
        tmp_path / "out" / "*.tar", json_fields=fields, backend="pandas", sidecar=None
    )[[f"json.{name}" for name in fields]].compute()
    for name, type_ in fields.items():
        column = pa.array(back[f"json.{name}"])
        assert column.cast(type_).equals(read[name]), type_


def is_number(type_):
    return pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_)


def shortest(value, array):
    """The number with the fewest digits that tell it apart, by NumPy."""
    if pa.types.is_float16(array.type):
        return Decimal(str(value))
    if pa.types.is_floating(array.type):
        return Decimal(str(array.type.to_pandas_dtype()(value)))
    return Decimal(value)


def test_a_decimal_of_json_is_exact_or_null(tmp_path):
    numbers = ["1.10", "1.1000", "11e-1", "12345678901234567.89", "1.105", "1e400", "1e999999999"]
    numbers += ['"1.10"', "NaN", "true", "[1.5]", "9007199254740993", "-0.00", "1e-999999999"]
    numbers += [f"1.{'0' * 998}", "-39e-71", f"1e{'9' * 30}"]
    members = {}
    for number, text in enumerate(numbers):
        members |= {
            f"{number:02}.jpg": b"j",
            f"{number:02}.json": f'{{"d": {text}, "e": 1e{"9" * 30}}}'.encode(),
        }
    (tmp_path / "in.tar").write_bytes(tar(members))
    types = {"d": "decimal128(20, 2)"}
    ddf = dii.read_webdataset_images(tmp_path / "in.tar", json_fields=types, backend="pandas")
    with pytest.warns(UserWarning, match="10 of 17 values of 'json.d' are not decimal128"):
        got = pa.array(ddf["json.d"].compute()).to_pylist()
    exact = {0: "1.10", 1: "1.10", 2: "1.10", 3: "12345678901234567.89", 11: "9007199254740993"}
    exact |= {12: "0", 14: "1"}
    assert got == [Decimal(exact[n]) if n in exact else None for n in range(len(numbers))]
