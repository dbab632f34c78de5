"""What a reader would not give back is refused before the first byte, with its row."""

from __future__ import annotations

import importlib
import os

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError, ExportError, ShardError

# The module, not the function of this name.
run = importlib.import_module("dask_image_ingest.export.to_webdataset")


@pytest.fixture
def rows(tmp_path):
    members = {f"{key}.{e}": key.encode() for key in "abcd" for e in ("jpg", "txt")}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    return frame.drop(columns=["image", "error"]).compute()


def export(frame, tmp_path, name="{shard:03d}.tar", **options):
    return dii.to_webdataset(frame, tmp_path / "out" / name, **options)


HOSTILE = [
    *("../b", "x/../b", "/etc/passwd", "x\\b", "x\0b", "x\nb", "b.c", ".b", "x//b", "b/", ""),
    *("__b__", "__meta__/b", "x/__meta__/b"),
]


def test_hostile_keys_are_refused_with_their_row(rows, tmp_path):
    offset = rows["offset"].iloc[1]
    with pytest.raises(ArgumentError, match=r"1 of 4 rows .*bad-key: readers would") as error:
        export(rows.assign(__key__=["a", "b.c", "c", "d"]), tmp_path)
    assert f"in.tar, byte {offset}: bad-key" in str(error.value)
    assert not (tmp_path / "out").exists()
    many = pd.concat([rows] * len(HOSTILE), ignore_index=True).assign(__key__=HOSTILE * 4)
    told = export(pd.concat([many, rows]), tmp_path, row_errors="drop")
    assert [k for k, _ in by_webdataset(shards_in(tmp_path / "out"))] == ["a", "b", "c", "d"]
    assert told.attrs["left_out"]["bad-key"]["count"] == 4 * len(HOSTILE)
    left_out = pd.read_parquet(tmp_path / "out" / "_left_out.parquet")
    assert left_out["__key__"].tolist() == HOSTILE * 4


@pytest.mark.parametrize(
    "key", ["a b", "ü", "x.y/b", "./b", "__b", "b__", "x/__b", "y__/b", "a" * 300]
)
def test_odd_keys_that_are_read_as_they_are_written(key, rows, tmp_path):
    rows.loc[rows["__key__"] == "b", "__key__"] = key
    export(rows, tmp_path)
    assert [k for k, _ in by_webdataset(shards_in(tmp_path / "out"))] == ["a", key, "c", "d"]


def test_a_name_that_readers_skip_because_of_its_extension(tmp_path):
    (tmp_path / "in.tar").write_bytes(tar({"a.jpg": b"a", "a.txt__": b"a"}))
    lazy = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    frame = lazy.drop(columns="image").compute()
    export(frame, tmp_path)
    with pytest.raises(ArgumentError, match=r"readers skip __a.txt__"):
        export(frame.assign(__key__="__a"), tmp_path, overwrite=True)


def test_a_merge_that_multiplies_rows_is_refused(rows, tmp_path):
    twice = rows.merge(pd.DataFrame({"__key__": ["a", "a", "c"], "score": [1, 2, 3]}), on="__key__")
    with pytest.raises(ArgumentError, match=r"1 of 3 rows .* repeated-row: the frame has this"):
        export(twice, tmp_path)
    export(twice, tmp_path, row_errors="drop")
    assert pd.read_parquet(tmp_path / "out" / "000.parquet")["score"].tolist() == [1, 3]


def test_rows_twice_are_found_beside_rows_that_are_rejected_before(rows, tmp_path):
    rows = rows.assign(__key__=["a.a", "b", "c", "d"])
    told = export(pd.concat([rows, rows[1:2]]), tmp_path, row_errors="drop")
    assert [k for k, _ in by_webdataset(shards_in(tmp_path / "out"))] == ["b", "c", "d"]
    left_out = {code: entry["count"] for code, entry in told.attrs["left_out"].items()}
    assert left_out == {"bad-key": 1, "repeated-row": 1}


def test_rows_twice_without_an_image_are_refused_too(tmp_path):
    (tmp_path / "in.tar").write_bytes(tar({"a.jpg": b"a", "b.txt": b"b"}))
    lazy = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    rows = lazy.drop(columns="image").compute()
    with pytest.raises(ArgumentError, match=r"1 of 3 rows .* b of \S*in\.tar: repeated-row"):
        export(pd.concat([rows, rows[1:]]), tmp_path)


@pytest.mark.parametrize("key", ["a", "./a"])
def test_keys_are_unique_within_a_shard(key, rows, tmp_path):
    rows.loc[rows["__key__"] == "c", "__key__"] = key
    with pytest.raises(ArgumentError, match=r"repeated-key: its shard has another sample"):
        export(rows, tmp_path)
    told = export(rows, tmp_path, row_errors="drop")
    assert told["samples"].tolist() == [3]
    # And may be used again in another one, as in collections that number each shard anew.
    told = export(rows, tmp_path, samples_per_shard=2, overwrite=True)
    assert told["samples"].tolist() == [2, 2]


@pytest.mark.parametrize("extension", ["txt", "TXT"])
def test_a_member_twice_is_refused_unless_another_takes_its_place(extension, tmp_path):
    (tmp_path / "in.tar").write_bytes(
        tar([("a.jpg", b"a"), ("a.txt", b"1"), (f"a.{extension}", b"2"), ("b.jpg", b"b")])
    )
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    frame = frame.drop(columns=["image", "error"]).assign(caption="new")
    with pytest.raises(
        ArgumentError, match=r"a of .*in.tar.*duplicate-member: .* more than one txt"
    ):
        export(frame, tmp_path)
    export(frame, tmp_path, members={"txt": "caption"})
    found = by_webdataset(shards_in(tmp_path / "out"))
    assert found == [("a", {"jpg": b"a", "txt": b"new"}), ("b", {"jpg": b"b", "txt": b"new"})]
    export(frame, tmp_path, members=["jpg"], overwrite=True)
    assert by_webdataset(shards_in(tmp_path / "out")) == [
        ("a", {"jpg": b"a"}),
        ("b", {"jpg": b"b"}),
    ]


def test_rows_without_any_wanted_member_are_refused(rows, tmp_path):
    with pytest.raises(ArgumentError, match=r"4 of 4 rows .*no-members"):
        export(rows, tmp_path, members=["png"])


def test_rows_that_point_nowhere_are_refused(rows, tmp_path):
    frame = pd.concat([rows, pd.DataFrame({"__key__": ["new"]})], ignore_index=True)
    with pytest.raises(ArgumentError, match=r"no-pointer: its __url__ is null"):
        export(frame, tmp_path)


def test_a_shard_that_is_gone_is_named(rows, tmp_path):
    os.rename(tmp_path / "in.tar", tmp_path / "elsewhere")
    with pytest.raises(ArgumentError, match=r"4 of 4 rows .*unreadable-shard: .*in.tar"):
        export(rows, tmp_path)
    (tmp_path / "more.tar").write_bytes(tar({"e.jpg": b"e"}))
    more = dii.read_webdataset_images(tmp_path / "more.tar", backend="pandas")
    both = pd.concat([rows, more.drop(columns=["image", "error"]).compute()])
    told = export(both, tmp_path, row_errors="drop")
    assert told["samples"].tolist() == [1]
    assert told.attrs["left_out"]["unreadable-shard"]["count"] == 4


@pytest.mark.parametrize("row_errors", ["raise", "drop"])
def test_an_export_of_nothing_but_unreadable_shards_is_refused(row_errors, rows, tmp_path):
    os.rename(tmp_path / "in.tar", tmp_path / "elsewhere")
    with pytest.raises(ArgumentError, match=r"4 of 4 rows .* No shard of the frame can be read$"):
        export(rows, tmp_path, row_errors=row_errors)
    assert not (tmp_path / "out").exists()


def test_a_shard_that_was_replaced_is_named(rows, tmp_path):
    (tmp_path / "in.tar").write_bytes(tar({"x/a.jpg": bytes(5000), "b.jpg": b"b", "b.txt": b"b"}))
    with pytest.raises(ArgumentError, match=r"lost-sample: .* has it changed since it was read"):
        export(rows, tmp_path)


def test_a_source_that_changes_while_it_is_copied_is_an_error(rows, tmp_path, monkeypatch):
    def planned(*args, **kwargs):
        plan = make_plan(*args, **kwargs)
        os.utime(tmp_path / "in.tar", (1, 1))
        return plan

    make_plan = run.make_plan
    monkeypatch.setattr(run, "make_plan", planned)
    with pytest.raises(ShardError, match=r"in.tar has changed since its samples were read"):
        export(rows, tmp_path)
    assert not shards_in(tmp_path / "out")


@pytest.mark.parametrize("column", ["__key__", "__url__", "offset"])
def test_a_frame_without_locations_is_refused(column, rows, tmp_path):
    with pytest.raises(ArgumentError, match=f"no column '{column}'"):
        export(rows.drop(columns=column), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("out.tar", "{shard}.zip", "{shard}.tar.gz", "{x}.tar", "{x}/{shard}.tar"),
        *("{shard}/a.tar", "_{shard}.tar", ".{shard}.tar", "{shard.tar", "{}.tar"),
        *("{shard:q}.tar", "{shard!r:>9}.tar", "{shard:c}.tar", "\0{shard}.tar", "\0/{shard}.tar"),
        *("{shard:0300d}.tar", "\ud800{shard}.tar"),
    ],
)
def test_names_that_are_none_for_shards_are_refused(name, rows, tmp_path):
    with pytest.raises(ArgumentError, match="is no name for shards"):
        dii.to_webdataset(rows, str(tmp_path / "out" / name))
    assert not (tmp_path / "out").exists()


def test_shards_of_one_name_are_refused_before_anything_is_written(rows, tmp_path):
    members = {f"{number}.jpg": b"text" for number in range(12)}
    (tmp_path / "many.tar").write_bytes(tar(members))
    many = dii.read_webdataset_images(tmp_path / "many.tar", backend="pandas")
    with pytest.raises(ArgumentError, match=r"gives 12 shards the same names, .1e\+01"):
        export(many, tmp_path, name="{shard:.0e}.tar", samples_per_shard=1, row_errors="drop")
    assert not list((tmp_path / "out").glob("*"))


def test_a_folder_that_is_a_link_to_itself_is_told(rows, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "out")
    with pytest.raises(ExportError, match="out cannot be written"):
        export(rows, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"samples_per_shard": 0},
        {"samples_per_shard": 1.5},
        {"samples_per_shard": True},
        {"bytes_per_shard": "much"},
        {"bytes_per_shard": 0},
        {"bytes_per_shard": "1e400 GB"},
        {"shuffle": True},
        {"shuffle": "x"},
        {"sidecar": "csv"},
        {"errors": "skip"},
        {"errors": "drop"},  # without a column error
        {"row_errors": "null"},
        {"resume": True, "overwrite": True},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(options, rows, tmp_path):
    with pytest.raises(ArgumentError):
        export(rows, tmp_path, **options)
    assert not (tmp_path / "out").exists()


def test_extensions_that_an_index_cannot_hold(tmp_path):
    (tmp_path / "in.tar").write_bytes(tar({"a.jpg": b"a", "b.jpg": b"b", "b.my txt": b"b"}))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    with pytest.raises(ArgumentError, match=r"bad-extension: 'my txt' cannot stand in an index"):
        export(frame, tmp_path, index=True)
    export(frame, tmp_path)
    assert by_webdataset(shards_in(tmp_path / "out"))[1] == ("b", {"jpg": b"b", "my txt": b"b"})


@pytest.mark.parametrize(
    "values",
    [[1, "a", None, 2.0], [1j] * 4, [np.zeros((2, 2))] * 4, [{}] * 4],
    ids=["mixed", "complex", "two dimensions", "empty structs"],
)
def test_a_column_that_no_parquet_file_can_have_is_named(values, rows, tmp_path):
    rows["odd"] = values
    with pytest.raises(ArgumentError, match=r"(?s)a column holds .*odd.*leave out the column"):
        export(rows, tmp_path)
    assert not (tmp_path / "out" / "_plan.json").exists()
    assert len(export(rows, tmp_path, sidecar=None)) == 1


@pytest.mark.parametrize("lazy", [True, False])
def test_an_index_that_is_a_column_too_is_no_matter(lazy, rows, tmp_path):
    frame = rows.set_index("__key__", drop=False)
    export(dd.from_pandas(frame, npartitions=2) if lazy else frame, tmp_path)
    assert [key for key, _ in by_webdataset(shards_in(tmp_path / "out"))] == list("abcd")


def test_numbers_of_numpy_are_numbers(rows, tmp_path):
    export(rows, tmp_path, samples_per_shard=np.int64(3), shuffle=np.int64(1))
    assert [len(list(by_webdataset([path]))) for path in shards_in(tmp_path / "out")] == [3, 1]


@pytest.mark.parametrize("column", ["offset", "nbytes"])
@pytest.mark.parametrize("value", ["x", 1.5])
def test_a_location_that_is_no_number_is_told_with_its_column(column, value, rows, tmp_path):
    with pytest.raises(ArgumentError, match=rf"the column '{column}' is of type .*fit type int64"):
        export(rows.assign(**{column: value}), tmp_path)


def test_a_column_of_sizes_without_a_value_gets_those_of_the_new_shard(rows, tmp_path):
    export(rows.assign(nbytes=None), tmp_path)
    assert pd.read_parquet(tmp_path / "out" / "000.parquet")["nbytes"].tolist() == [1] * 4
