"""Members may be chosen, and made of columns."""

from __future__ import annotations

import datetime
import io
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError


@pytest.fixture
def frame(tmp_path):
    (tmp_path / "in.tar").write_bytes(
        tar(
            {
                "a.jpg": b"A",
                "a.txt": b"old a",
                "a.cls": b"1",
                "b.jpg": b"B",
                "b.cls": b"2",
                "b.txt": b"old b",
            }
        )
    )
    read = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    return read.drop(columns=["image", "error"]).compute()


def export(frame, tmp_path, members, **options):
    dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", members=members, **options)
    return by_webdataset(shards_in(tmp_path / "out"))


def with_column(frame, values, type_):
    return frame.assign(new=pd.Series(values, dtype=pd.ArrowDtype(type_), index=frame.index))


@pytest.mark.parametrize("members", [["jpg", "txt"], ["JPG", ".txt"], "jpg;txt"])
def test_only_the_members_that_are_named(members, frame, tmp_path):
    found = export(frame, tmp_path, members)
    assert found == [("a", {"jpg": b"A", "txt": b"old a"}), ("b", {"jpg": b"B", "txt": b"old b"})]


def test_a_column_replaces_a_member_where_that_was(frame, tmp_path):
    frame = frame.assign(caption=["new a", None])
    found = export(frame, tmp_path, {"txt": "caption"})
    assert [(key, list(members.items())) for key, members in found] == [
        ("a", [("jpg", b"A"), ("txt", b"new a"), ("cls", b"1")]),
        ("b", [("jpg", b"B"), ("cls", b"2")]),
    ]


def test_columns_add_members_and_none_takes_them_away(frame, tmp_path):
    frame = frame.assign(score=[0.5, float("nan")])
    made = {"json": ["__key__", "score"], "cls": None}
    found = export(frame, tmp_path, ["jpg", made])
    assert [(key, list(members)) for key, members in found] == [
        ("a", ["jpg", "json"]),
        ("b", ["jpg", "json"]),
    ]
    assert json.loads(found[0][1]["json"]) == {"__key__": "a", "score": 0.5}
    assert json.loads(found[1][1]["json"]) == {"__key__": "b", "score": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        (pa.string(), "Grüße\n", "Grüße\n".encode()),
        (pa.binary(), b"\0\xff", b"\0\xff"),
        (pa.int64(), -(2**60), b"-1152921504606846976"),
        (pa.uint8(), 7, b"7"),
        (pa.bool_(), True, b"true"),
        (pa.float64(), 0.1, b"0.1"),
        (pa.float32(), 0.1, b"0.1"),
        (pa.date32(), datetime.date(2026, 1, 2), b"2026-01-02"),
        (pa.timestamp("us"), datetime.datetime(2026, 1, 2, 3), b"2026-01-02T03:00:00"),
        (pa.list_(pa.int64()), [1, 2], b"[1, 2]"),
        (
            pa.struct({"a": pa.int64(), "b": pa.string()}),
            {"a": 1, "b": "ü"},
            '{"a": 1, "b": "ü"}'.encode(),
        ),
        (pa.list_(pa.float64()), [1.5, float("inf")], b"[1.5, null]"),
        (pa.list_(pa.float32()), [0.1, 0.2], b"[0.1, 0.2]"),
        (pa.list_(pa.float32(), 2), [0.1, float("nan")], b"[0.1, null]"),
        (pa.duration("us"), datetime.timedelta(seconds=1.5), b"P0DT0H0M1.5S"),
    ],
    ids=str,
)
def test_values_are_written_as_their_type_says(type_, value, expected, frame, tmp_path):
    frame = with_column(frame, [value, None], type_)
    found = export(frame, tmp_path, {"new": "new"})
    assert found[0][1]["new"] == expected
    assert "new" not in found[1][1]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.list_(pa.float32()), np.array([0.1, np.nan, np.inf], "f4")),
        (pa.list_(pa.float32(), 2), np.array([0.5, 1], "f4")),
        (pa.large_list(pa.list_(pa.uint8())), np.array([[1, 2], [3, 255]], "u1")),
        (pa.list_(pa.list_(pa.int64())), np.empty((0, 0), "i8")),
        (pa.list_(pa.bool_()), np.array([True, False])),
    ],
    ids=str,
)
def test_lists_of_numbers_are_numpy_files_where_the_extension_says_so(
    type_, value, frame, tmp_path
):
    frame = with_column(frame, [value.tolist(), None], type_)
    (_, first), (_, second) = export(frame, tmp_path, {"emb.npy": "new"})
    saved = np.load(io.BytesIO(first["emb.npy"]))
    assert (saved.dtype, saved.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(saved, value)
    assert "emb.npy" not in second
    if pa.types.is_fixed_size_list(type_):
        type_ = pa.list_(type_.value_type)
    again = dii.read_webdataset_images(
        tmp_path / "out" / "*.tar", members={"emb.npy": type_}, backend="pandas"
    )["emb.npy"]
    np.testing.assert_array_equal(np.array(again.compute().iloc[0], value.dtype), value.tolist())


@pytest.mark.parametrize("value", [[[1.0], [1.0, 2.0]], [[1.0, None]], [[1.0], None]], ids=str)
def test_lists_that_are_no_array_are_no_numpy_file(value, frame, tmp_path):
    frame = with_column(frame, [value, None], pa.list_(pa.list_(pa.float32())))
    with pytest.raises(ArgumentError, match=r"'npy' of 'new', which has lists that are no array"):
        export(frame, tmp_path, {"npy": "new"})


def test_categories_are_written_as_their_values(frame, tmp_path):
    frame = frame.assign(new=pd.Categorical(["x", "y"]))
    assert [m["new"] for _, m in export(frame, tmp_path, {"new": "new"})] == [b"x", b"y"]
    assert pd.read_parquet(tmp_path / "out" / "0.parquet")["new"].astype(str).tolist() == ["x", "y"]


@pytest.mark.slow
@pytest.mark.parametrize("sidecar", ["parquet", None])
@pytest.mark.parametrize("shuffle", [None, 2])
def test_large_values_are_the_right_ones_for_their_rows(sidecar, shuffle, shards, tmp_path):
    read = dii.read_webdataset_images(shards, backend="pandas")
    table = read.drop(columns=["image", "error"])
    frame = table.assign(caption=(table["__key__"] + " ") * 3000)
    options = {"sidecar": sidecar, "shuffle": shuffle, "bytes_per_shard": 400_000}
    dii.to_webdataset(
        frame,
        tmp_path / "{shard}.tar",
        members=["jpg", "png", "webp", {"txt": "caption"}],
        **options,
    )
    found = by_webdataset(shards_in(tmp_path))
    assert len(found) == 24
    assert all(members["txt"].decode() == f"{key} " * 3000 for key, members in found)
    assert all(path.stat().st_size <= 400_000 for path in shards_in(tmp_path))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"txt": "nothing"}, "'nothing'"),
        ({"txt": "image"}, "'image'"),
        ({"txt": 3}, "'txt' of 3"),
        ({"a/b": "txt"}, "'a/b'"),
        ([], "members="),
        ([3], "members="),
        ("", "extension"),
        ("jpg,txt", r"'jpg,txt', which is no extension of a member; of several, pass a list"),
        (["jpg;txt"], "'jpg;txt', which is no ext"),
        (["jpg", "txt,cls"], "'txt,cls', which is no ext"),
        ({"txt,cls": None}, "'txt,cls', which is no ext"),
    ],
)
def test_what_cannot_be_a_member_is_refused(members, said, frame, tmp_path):
    with pytest.raises(ArgumentError, match=said):
        export(frame.assign(image=1), tmp_path, members) if members != {"txt": "image"} else export(
            frame, tmp_path, members
        )
    assert not (tmp_path / "out").exists()
