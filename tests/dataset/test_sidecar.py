"""Columns of the parquet files beside shards, as img2dataset and to_webdataset write them.

The witness is pandas: each file merged with the keys of its shard.
"""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import parquet_rows, samples
from dask_image_ingest.storage import parquet_file

# As img2dataset 1.47 writes them; columns of its input come first.
WRITTEN = pa.schema(
    [
        ("uid", pa.string()),
        ("score", pa.float32()),
        ("boxes", pa.list_(pa.list_(pa.float64()))),
        ("url", pa.string()),
        ("key", pa.string()),
        ("status", pa.string()),
        ("error_message", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
    ]
)


def read(folder, sidecar="parquet", **options):
    return dii.read_webdataset_images(
        f"{folder}/*.tar", sidecar=sidecar, backend="pandas", **options
    )


def downloaded(shard: int, samples: int, failed: set[int] = frozenset()) -> list[dict]:
    """The rows of a shard; those of downloads that failed have no sample."""
    return [
        {
            "uid": f"{shard:02d}{n:03d}",
            "score": None if n in failed else np.float32(n / samples).item(),
            "boxes": [[0.1 * n, 0.2]] * (n % 3),
            "url": f"http://host/{n}.jpg",
            "key": f"{shard:05d}{n:04d}",
            "status": "failed_to_download" if n in failed else "success",
            "error_message": "HTTP Error 404" if n in failed else None,
            "width": None if n in failed else 100 + n,
            "height": None if n in failed else 100,
        }
        for n in range(samples)
    ]


def write(folder, shard: int, rows: list[dict], schema=WRITTEN, group=4) -> None:
    kept = [row["key"] for row in rows if row["status"] == "success"]
    members = {f"{key}.{e}": key.encode() for key in kept for e in ("jpg", "txt")}
    (folder / f"{shard:05d}.tar").write_bytes(tar(members))
    table = pa.Table.from_pylist(rows, schema)
    parquet.write_table(table, folder / f"{shard:05d}.parquet", row_group_size=group)
    (folder / f"{shard:05d}_stats.json").write_text("{}")


@pytest.fixture
def collection(tmp_path):
    """Three shards of 20 downloads, of which some failed."""
    for shard in range(3):
        write(tmp_path, shard, downloaded(shard, 20, failed={2, 3, 19}))
    return tmp_path


@pytest.fixture
def work(monkeypatch):
    """Counts tars and sidecars that tasks open, and row groups that they read of each column."""
    counts: Counter = Counter()
    original = {
        "tars": samples.open_shard,
        "sidecars": parquet_rows.open_parquet,
        "groups": parquet_file.ParquetSource.read_rows,
    }

    def open_tar(*args):
        counts["tars"] += 1
        return original["tars"](*args)

    def open_parquet(*args):
        counts["sidecars"] += 1
        return original["sidecars"](*args)

    def read_rows(self, column, spans, *args):
        counts[column] += len(spans)
        return original["groups"](self, column, spans, *args)

    monkeypatch.setattr(samples, "open_shard", open_tar)
    monkeypatch.setattr(parquet_rows, "open_parquet", open_parquet)
    monkeypatch.setattr(parquet_file.ParquetSource, "read_rows", read_rows)
    return counts


# --- columns and rows -----------------------------------------------------------------------------


def test_columns_come_in_the_types_of_the_file(collection):
    ddf = read(collection)
    assert list(ddf.columns)[9:] == [
        *("txt", "uid", "score", "boxes", "url", "status", "error_message"),
        *("sidecar.width", "sidecar.height", "image"),
    ]
    frame = ddf.drop(columns=["image", "error"]).compute()
    told = frame.dtypes.astype(str)
    assert told["score"] == "float[pyarrow]"
    assert told["sidecar.width"] == "int32[pyarrow]"
    assert told["boxes"] == "list<list<float64>>"
    assert frame.dtypes.equals(ddf.drop(columns=["image", "error"]).dtypes)


def test_downloads_that_failed_are_no_rows(collection):
    frame = read(collection)[["__key__", "status", "uid"]].compute()
    assert len(frame) == 3 * 17
    assert set(frame["status"]) == {"success"}
    assert (frame["__key__"].str[3:5] + frame["__key__"].str[6:] == frame["uid"]).all()


@pytest.mark.slow
@pytest.mark.rounds(4, nightly=60)
def test_rows_are_those_of_a_merge_by_key(rng, tmp_path):
    """Random shards and files: their orders, keys, row groups, nulls and NaN differ."""
    expected = []
    for shard in range(rng.randint(1, 4)):
        rows, keys = random_rows(rng, shard), [f"{shard}-{n}" for n in range(rng.randint(1, 30))]
        keys = rng.sample(keys, rng.randint(1, len(keys)))
        (tmp_path / f"{shard}.tar").write_bytes(tar({f"{k}.txt": k.encode() for k in keys}))
        table = pa.Table.from_pylist(rows, RANDOM)
        group = rng.choice([1, 2, 5, 100])
        parquet.write_table(
            table,
            tmp_path / f"{shard}.parquet",
            row_group_size=group,
            write_statistics=rng.random() < 0.8,
            use_dictionary=rng.random() < 0.5,
        )
        theirs = table.to_pandas(types_mapper=pd.ArrowDtype)
        mine = pd.DataFrame({"key": pd.array(keys, pd.ArrowDtype(pa.string()))})
        expected.append(mine.merge(theirs, on="key", how="left"))
    expected = pd.concat(expected, ignore_index=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(has no row for|no image)")
        ddf = read(tmp_path, partition_size=None)[["__key__", *RANDOM.names[1:]]]
        check(ddf, expected)
        for _ in range(6):
            column = rng.choice(["number", "real", "word"])
            mask = random_mask(rng, column)
            check(ddf[mask(ddf)], expected[mask(expected).fillna(False)])
            check(ddf[mask(ddf)][["real"]], expected[mask(expected).fillna(False)])


RANDOM = pa.schema(
    [("key", pa.string()), ("number", pa.int64()), ("real", pa.float64()), ("word", pa.string())]
)


def random_rows(rng, shard):
    rows = []
    for n in rng.sample(range(40), rng.randint(0, 40)):
        number = rng.choice([None, n // 4, rng.randrange(-5, 5), 2**62])
        real = rng.choice([None, float("nan"), n / 8, -0.0, float("inf")])
        word = rng.choice([None, "", "é" * rng.randrange(3), rng.choice("abc") * rng.randrange(4)])
        rows.append({"key": f"{shard}-{n}", "number": number, "real": real, "word": word})
    if rng.random() < 0.5:
        rows.sort(key=lambda row: row["number"] or 0)  # then row groups differ by their statistics
    return rows


def random_mask(rng, column):
    values = {
        "number": [0, 3, -5, 2**62, 7],
        "real": [0.0, 1.0, 2.5, float("inf")],
        "word": ["", "a", "bb", "éé"],
    }[column]
    value, kind = rng.choice(values), rng.randrange(8)
    listed = rng.sample(values, 2)
    return [
        lambda f: f[column] == value,
        lambda f: f[column] != value,
        lambda f: f[column] < value,
        lambda f: f[column] >= value,
        lambda f: f[column].isin(listed) if column != "real" else f[column] <= value,
        lambda f: f[column].isna(),
        lambda f: ~(f[column] > value),
        lambda f: (f[column] > value) | f["number"].isin([1, 2]),
    ][kind]


def check(found, expected):
    found = found.compute().rename(columns={"__key__": "key"}).reset_index(drop=True)
    expected = expected[found.columns].reset_index(drop=True)
    for name in found.columns:
        type_ = RANDOM.field(name).type
        left, right = (pa.array(f[name].array, type_) for f in (found, expected))
        left, right = (pa.chunked_array(a).combine_chunks() for a in (left, right))
        assert left.is_null().equals(right.is_null()), name
        same = pc.equal(left.drop_null(), right.drop_null()).to_pylist()
        if name == "real":
            nan = pc.is_nan(left.drop_null()).to_pylist(), pc.is_nan(right.drop_null()).to_pylist()
            assert nan[0] == nan[1]
            same = [a or b for a, b in zip(same, nan[0], strict=True)]
        assert all(same), name


@pytest.fixture
def photo_shards(shards, photos, tmp_path):
    """The photographs, with files beside them that tell their numbers."""
    for shard in shards:
        (tmp_path / shard.name).symlink_to(shard)
        keys = dii.read_webdataset_images(shard, backend="pandas")["__key__"].compute()
        numbers = [photo.key for photo in photos]
        table = pa.table({"key": list(keys), "number": [numbers.index(key) for key in keys]})
        parquet.write_table(table, tmp_path / f"{shard.stem}.parquet", row_group_size=3)
    return tmp_path


def test_parts_of_a_shard_have_their_own_rows(photo_shards, photos):
    ddf = read(photo_shards, partition_size="1 MiB")
    assert ddf.npartitions > 3
    frame = ddf[["__key__", "number", "image"]].compute()
    assert [photos[n].key for n in frame["number"]] == frame["__key__"].tolist()
    odd = ddf[ddf.number.isin([1, 3, 5, 20])].compute()
    assert odd["number"].tolist() == [1, 3, 5, 20]
    for number, array in zip(odd["number"], odd.images.arrays(), strict=True):
        assert array.shape == photos[number].pixels.shape


# --- what is read ---------------------------------------------------------------------------------


def test_no_file_is_opened_if_none_of_its_columns_is_asked_for(collection, work):
    ddf = read(collection)
    assert len(ddf) == 51
    ddf[["__key__", "txt", "nbytes"]].compute()
    ddf[ddf["nbytes"] > 3][["__key__"]].compute()
    assert work["tars"] == 9
    assert work["sidecars"] == 0


def test_only_the_columns_asked_for_are_read(collection, work):
    read(collection)[["uid"]].compute()
    assert work == {"tars": 3, "sidecars": 3, "key": 15, "uid": 15}


def test_a_shard_without_a_row_that_is_wanted_is_not_opened(collection, work):
    ddf = read(collection, filters=[("uid", "==", "01007")])
    assert ddf[["__key__"]].compute()["__key__"].tolist() == ["000010007"]
    assert work["tars"] == 1
    assert len(read(collection, filters=[("score", ">", 5)])) == 0
    assert work["tars"] == 1


def test_filters_of_other_columns_come_first(collection, work):
    ddf = read(collection)
    ddf[ddf["__key__"] == "000010007"][["boxes"]].compute()
    assert work["boxes"] == 1


def test_filters_on_both_kinds_of_columns(collection):
    ddf = read(collection)
    frame = ddf[["__key__", "score", "txt"]].compute()
    either = ddf[(ddf.score > 0.7) | (ddf.txt == "000000001")]
    expected = frame[(frame.score > 0.7) | (frame.txt == "000000001")]
    pd.testing.assert_frame_equal(either[["__key__", "score", "txt"]].compute(), expected)
    computed = ddf[ddf.uid.str.endswith("7") & (ddf["nbytes"] + ddf.score > 9)]
    expected = [f"{shard:02d}{n:03d}" for shard in range(3) for n in (7, 17)]
    assert computed[["uid"]].compute()["uid"].tolist() == expected


# --- what does not fit ----------------------------------------------------------------------------


def test_a_name_that_is_taken_gets_another(collection):
    for shard in range(3):
        path = collection / f"{shard:05d}.parquet"
        table = parquet.read_table(path)
        table = table.append_column("txt", table.column("uid"))
        table = table.append_column("sidecar.txt", table.column("url"))
        parquet.write_table(table, path)
    frame = read(collection)[["txt", "sidecar.txt", "sidecar.sidecar.txt", "__key__"]].compute()
    assert (frame["txt"] == frame["__key__"]).all()
    assert frame["sidecar.sidecar.txt"].iloc[0] == "00000"
    assert frame["sidecar.txt"].iloc[0] == "http://host/0.jpg"
    # Without the member the file's column has the name.
    other = read(collection, members={})[["txt"]].compute()
    assert other["txt"].iloc[0] == "00000"


def test_a_shard_without_a_file_is_an_error_or_null(collection):
    (collection / "00001.parquet").unlink()
    with pytest.raises(dii.ArgumentError, match=r"1 of 3 shards .* first .*00001\.tar"):
        read(collection)
    with pytest.warns(UserWarning, match="1 of 3 shards have no parquet file"):
        ddf = read(collection, "auto")
    frame = ddf[["uid", "score"]].compute()
    assert frame["uid"].notna().tolist() == [True] * 17 + [False] * 17 + [True] * 17
    assert len(ddf[ddf.uid.isna()]) == 17


def test_the_first_file_there_is_tells_the_columns(collection):
    (collection / "00000.parquet").unlink()
    with pytest.warns(UserWarning, match="no parquet file"):
        ddf = read(collection, "auto")
    assert ddf[["score"]].compute()["score"].notna().sum() == 34


def test_files_beside_the_shards_are_read_unless_that_is_refused(collection, work):
    default = dii.read_webdataset_images(f"{collection}/*.tar", backend="pandas")
    assert default._name == read(collection, "auto")._name
    named = read(collection)
    assert list(default.columns) == list(named.columns)
    pd.testing.assert_frame_equal(default.compute(), named.compute())
    for none in (None, False):
        assert "uid" not in read(collection, none).columns


@pytest.mark.parametrize("keys", ["none", "numbers"])
def test_files_that_are_no_sidecars_fail_no_read_by_default(keys, collection):
    plain = read(collection, None).compute()
    foreign = replaced("key", lambda t: range(len(t)), pa.int64())
    change = foreign if keys == "numbers" else lambda t: t.drop_columns(["key"])
    rewrite(collection / "00001.parquet", change)
    ddf = read(collection, "auto")
    with pytest.warns(UserWarning, match=r"00001\.parquet are null for its shard: .*no column of"):
        frame = ddf.compute()
    assert frame["uid"].isna().tolist() == [False] * 17 + [True] * 17 + [False] * 17
    rewrite(collection / "00000.parquet", change)
    with pytest.warns(UserWarning, match=r"sidecars are left out: .*00000\.parquet") as caught:
        ddf = read(collection, "auto")
    pd.testing.assert_frame_equal(ddf.compute(), plain)
    assert len([each for each in caught if "sidecar" in str(each.message)]) == 1


STRANGERS = {
    "empty": lambda data: b"",
    "text": lambda data: b"Reading list\n" * 9,
    "cut off": lambda data: data[: len(data) // 2],
    "no more than a mark": lambda data: b"PAR1PAR1",
    "another footer": lambda data: data[:4] + bytes(len(data) - 12) + data[-8:],
    "encrypted": lambda data: b"PARE" + data[4:-4] + b"PARE",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_file_that_is_no_parquet_fails_no_read_by_default(stranger, collection):
    whole = read(collection, "auto").compute()
    for number in (0, 1):
        path = collection / f"0000{number}.parquet"
        data = path.read_bytes()
        path.write_bytes(STRANGERS[stranger](data))
        with pytest.warns(UserWarning, match=rf"0000{number}\.parquet are null for its shard"):
            frame = read(collection, "auto").compute()
        theirs = frame["__url__"].str.endswith(f"0000{number}.tar")
        assert frame.loc[theirs, "uid"].isna().all()
        pd.testing.assert_frame_equal(frame[~theirs], whole[~theirs])
        with pytest.raises(dii.ShardError, match=rf"0000{number}\.parquet .*Pass sidecar=None"):
            read(collection, "parquet").compute()
        path.write_bytes(data)
    for path in collection.glob("*.parquet"):
        path.write_bytes(STRANGERS[stranger](path.read_bytes()))
    with pytest.warns(UserWarning, match=r"sidecars are left out: .*00000\.parquet cannot be read"):
        frame = read(collection, "auto").compute()
    pd.testing.assert_frame_equal(frame, read(collection, None).compute())


def test_without_any_file_auto_has_no_more_columns(collection):
    plain = read(collection, None)
    assert "uid" not in plain.columns
    for path in collection.glob("*.parquet"):
        path.unlink()
    assert list(read(collection, "auto").columns) == list(plain.columns)


def rewrite(path, change):
    table = parquet.read_table(path)
    parquet.write_table(change(table), path)


def replaced(name, values, type_):
    def change(table):
        number = table.schema.get_field_index(name)
        return table.set_column(number, name, pa.array(values(table), type_))

    return change


def test_other_types_hold_where_no_value_changes(collection):
    score = collection / "00001.parquet"
    rewrite(score, replaced("score", lambda t: [0.5] * len(t), pa.float64()))
    rewrite(collection / "00002.parquet", replaced("score", lambda t: [None] * len(t), pa.null()))
    frame = read(collection)[["score"]].compute()
    assert frame["score"].dtype == "float[pyarrow]"
    assert frame["score"].iloc[17:34].eq(0.5).all()
    assert frame["score"].iloc[34:].isna().all()
    rewrite(score, replaced("score", lambda t: [0.1] * len(t), pa.float64()))
    with pytest.raises(dii.ShardError, match=r"'score' of .*00001\.parquet is of type double"):
        read(collection)[["score"]].compute()
    rewrite(score, replaced("score", lambda t: ["good"] * len(t), pa.string()))
    with pytest.raises(dii.ShardError, match="of type string"):
        read(collection)[["score"]].compute()
    read(collection)[["uid"]].compute()


def test_text_is_text_however_it_is_stored(collection):
    stored = [pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.null()]
    for shard, type_ in enumerate(stored):
        path = collection / f"{shard:05d}.parquet"
        values = [None] * 20 if type_ == pa.null() else [f"{n % 3}" for n in range(20)]
        rewrite(path, replaced("uid", lambda t, v=values: v, type_))
        rewrite(path, replaced("key", lambda t: t["key"].to_pylist(), stored[0]))
    ddf = read(collection)
    assert ddf["uid"].dtype == "string"
    frame = ddf[["uid", "__key__"]].compute()
    assert frame["uid"].notna().sum() == 34
    assert len(ddf[ddf.uid == "1"]) == (frame["uid"] == "1").sum()


def test_a_column_that_a_later_file_lacks_is_null(collection):
    rewrite(collection / "00001.parquet", lambda t: t.drop_columns(["score"]))
    ddf = read(collection)
    assert ddf[["score"]].compute()["score"].isna().tolist()[17:34] == [True] * 17
    assert len(ddf[ddf.score.isna()]) == 17
    assert len(ddf[ddf.score >= 0]) == 34


def test_columns_of_types_that_no_column_can_have_are_left_out(collection):
    maps = pa.map_(pa.string(), pa.int64())
    for path in collection.glob("*.parquet"):
        rewrite(path, lambda t: t.append_column("map", pa.array([[("a", 1)]] * len(t), maps)))
    with pytest.warns(UserWarning, match="'map' "):
        ddf = read(collection)
    assert "map" not in ddf.columns


def test_a_key_on_two_rows_is_an_error(collection):
    rewrite(collection / "00001.parquet", lambda t: pa.concat_tables([t, t.slice(5, 1)]))
    ddf = read(collection)
    assert len(ddf) == 51
    with pytest.raises(dii.ShardError, match=r"00001\.parquet has 1 keys .* '000010005'"):
        ddf[["uid"]].compute()
    with pytest.warns(UserWarning, match=r"null for its shard: .*00001\.parquet has 1 keys"):
        frame = read(collection, "auto")[["uid"]].compute()
    assert frame["uid"].isna().sum() == 17


def test_samples_without_a_row_are_null_and_told(collection):
    rewrite(collection / "00002.parquet", lambda t: t.slice(5))
    with pytest.warns(UserWarning, match=r"00002\.parquet has no row for 3 of 17 samples"):
        frame = read(collection)[["__key__", "uid"]].compute()
    assert frame["uid"].isna().sum() == 3
    assert len(frame) == 51


def test_files_without_keys_are_refused(collection):
    rewrite(collection / "00001.parquet", lambda t: t.drop_columns(["key"]))
    with pytest.raises(dii.ShardError, match=r"00001\.parquet has no column of text named"):
        read(collection)[["uid"]].compute()
    rewrite(collection / "00000.parquet", replaced("key", lambda t: range(len(t)), pa.int64()))
    with pytest.raises(dii.ArgumentError, match=r"has no keys.*sidecar=None"):
        read(collection)


def test_files_that_are_no_parquet_are_named(collection):
    (collection / "00001.parquet").write_bytes(b"no parquet")
    with pytest.raises(dii.ShardError, match=r"00001\.parquet cannot be read as parquet"):
        read(collection)[["uid"]].compute()


@pytest.mark.parametrize("name", ["key", "uid"])
def test_text_that_is_no_utf8_is_an_error_that_names_the_file(name, collection):
    def spoiled(table):
        number = table.schema.get_field_index(name)
        count = len(table)
        _, ends, content = pa.array([b"\xff\xfe"] * count).buffers()
        text = pa.StringArray.from_buffers(count, ends, content)
        return table.set_column(number, name, text)

    rewrite(collection / "00001.parquet", spoiled)
    with pytest.raises(dii.ShardError, match=r"00001\.parquet cannot be read as parquet: .*UTF8"):
        read(collection)[["uid"]].compute()


@pytest.mark.parametrize("choice", ["csv", True, 3, 0])
def test_other_choices_are_refused(collection, choice):
    with pytest.raises(dii.ArgumentError, match="sidecar="):
        read(collection, choice)


def test_another_file_is_another_collection(collection):
    before = read(collection)
    assert before._name == read(collection)._name
    rewrite(collection / "00001.parquet", lambda t: t.slice(0, 18))
    assert before._name != read(collection)._name
    assert read(collection, "auto")._name != read(collection, None)._name


# --- as to_webdataset writes them -----------------------------------------------------------------


@pytest.mark.slow
def test_computed_columns_of_an_export_come_back(shards, tmp_path):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16)
    frame = ddf.images.map_batches(
        lambda images: {"bright": images.mean(axis=(1, 2, 3))}, {"bright": "float32"}
    )
    frame = frame.assign(txt=frame.txt.str.upper(), even=frame.cls > 1)
    dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar", samples_per_shard=7)
    default = read(tmp_path, "auto")
    assert [name for name in default.columns if name not in ddf.columns] == ["bright", "even"]
    again = read(tmp_path)
    assert [name for name in again.columns if name not in ddf.columns] == [
        *("sidecar.txt", "sidecar.cls", "sidecar.json", "bright", "even"),
    ]
    columns = ["__key__", "bright", "even", "txt", "sidecar.txt"]
    found = again[again.bright > 90][columns].compute().reset_index(drop=True)
    expected = frame[["__key__", "bright", "even", "txt"]].compute()
    expected = expected[expected.bright > 90].reset_index(drop=True)
    assert (found["txt"].str.upper() == expected["txt"]).all()
    found = found.drop(columns="txt").rename(columns={"sidecar.txt": "txt"})
    pd.testing.assert_frame_equal(found[expected.columns], expected)


def _other(table: pa.Table, name: str, values) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


DAMAGES = {
    "nothing in it": lambda path, _: path.write_bytes(b""),
    "not there": lambda path, _: path.unlink(),
    "no keys": lambda path, table: parquet.write_table(table.drop_columns(["key"]), path),
    "keys twice": lambda path, table: parquet.write_table(pa.concat_tables([table] * 2), path),
    "another type": lambda path, table: parquet.write_table(
        _other(table, "score", pa.array(["high"] * len(table))), path
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_skipped_errors_of_a_sidecar_lose_no_row_whatever_is_asked(damage, collection):
    ddf = read(collection, shard_errors="drop")
    path = collection / "00001.parquet"
    whole = ddf.compute()
    DAMAGES[damage](path, parquet.read_table(path))
    with pytest.warns(UserWarning, match=r"null for its shard: .*00001\.parquet"):
        frame = ddf.compute()
    assert frame["__key__"].tolist() == whole["__key__"].tolist()
    theirs = frame["__url__"].str.endswith("00001.tar")
    assert theirs.sum() == 17
    assert frame.loc[theirs, "score"].isna().all()
    pd.testing.assert_frame_equal(frame[~theirs], whole[~theirs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(ddf) == len(ddf[["__key__"]].compute()) == len(whole)
        for ask in (lambda d: d[d.score > 0.5], lambda d: d[d.score.isna()]):
            kept, expected = ask(ddf)["__key__"].compute(), ask(frame)["__key__"]
            assert kept.tolist() == expected.tolist()
    with pytest.raises(dii.errors.DaskImageIngestError, match=r"00001\.(parquet|tar)"):
        read(collection).compute()
