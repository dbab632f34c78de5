"""A broken index of the right size and version: told, not used, and the rows are the same."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.index import open_index as index_read

METADATA = b"image-ingest.index"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A shard of 20 samples with its index."""
    (shard,) = write_shards(tmp_path_factory.mktemp("broken"), 1, per_shard=20, size=(30, 40))
    dii.write_index(shard)
    return Path(shard)


@pytest.fixture
def shard(written, tmp_path):
    for name in (written.name, index_of(written).name):
        shutil.copy2(written.parent / name, tmp_path)
    index_read._kept.clear()
    return tmp_path / written.name


def index_of(shard: Path) -> Path:
    return Path(f"{shard}.index.parquet")


def answers(shard, **options):
    """What is asked by several ways through an index: all rows, counts, filters, a late decode."""
    ddf = dii.read_webdataset_images(shard, backend="pandas", partition_size=100_000, **options)
    table = ddf[["__key__", "__url__", "offset", "nbytes", "height", "format", "txt", "cls"]]
    late = dii.decode_images(table[table.cls < 3]).compute()
    pixels = [None if image is None else image.sum() for image in late.images.arrays()]
    return len(ddf), table.compute().to_dict("list"), pixels, ddf.head(2)["txt"].tolist()


def facts(**changed):
    def change(table):
        found = json.loads(table.schema.metadata[METADATA])
        told = json.dumps({**found, **changed}).encode()
        return table.replace_schema_metadata({METADATA: told})

    return change


def column(name, values):
    def change(table):
        place = table.column_names.index(name)
        return table.set_column(place, name, values(table.column(name)))

    return change


def nulls(values):
    return pa.nulls(len(values), values.type)


def some_null(values):
    return pa.array([None, *values.to_pylist()[1:]], values.type)


def last_null(values):
    return pa.array([*values.to_pylist()[:-1], None], values.type)


def swapped(table):
    """As many nulls among places as among sizes, and not in the same rows."""
    return column("txt/size", last_null)(column("txt/offset", some_null)(table))


BROKEN = {
    "rows cut": lambda table: table.slice(0, 5),
    "rows twice": lambda table: pa.concat_tables([table, table]),
    "a column gone": lambda table: table.drop_columns(["txt/offset"]),
    "the keys gone": lambda table: table.drop_columns(["__key__"]),
    "a column twice": lambda table: table.append_column("txt/size", table.column("jpg/size")),
    "keys of another type": column("__key__", lambda keys: pa.array(range(len(keys)))),
    "keys null": column("__key__", some_null),
    "places null": column("jpg/offset", nulls),
    "places of another type": column("jpg/offset", lambda values: values.cast(pa.string())),
    "places negative": column("jpg/offset", lambda values: pa.array([-1] * len(values))),
    "sizes null": column("txt/size", nulls),
    "sizes and places of other rows null": swapped,
    "contents of another type": column("txt/content", lambda values: values.cast(pa.binary())),
    "heights of another type": column("jpg/height", lambda values: values.cast(pa.float64())),
    "fewer samples": facts(samples=-1),
    "more samples": facts(samples=10**12),
    "half a sample": facts(samples=20.0),
    "no extensions": facts(extensions=None),
    "extensions without places": facts(extensions={"jpg": ["size"]}),
    "extensions that are not there": facts(extensions={"npy": ["offset", "size"]}),
    "fields that nobody knows": facts(extensions={"jpg": ["offset", "size", "colour"]}),
    "heights negative": column("jpg/height", lambda values: pa.array([-30] * len(values))),
    "members of no row": facts(rest=[[99, "npy", 0, 1]]),
    "members of no place": facts(rest=[[1, "npy", None, 1]]),
    "duplicates of no row": facts(duplicates=[[-1, ["txt"]]]),
    "holes out of place": facts(sparse=[[1, 10, [[5, 6]]]]),
    "damage that says nothing": facts(damage={}),
    "damage at no byte": facts(damage={"offset": "x", "reason": "", "code": ""}),
    "keys that are no list": facts(interleaved="a"),
    "a fact too many": facts(colour="red"),
}

# By its end alone, which is what `write_index` looks at.
UNNOTICED = {"keys null", "heights negative", "sizes and places of other rows null"}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_fit_together_costs_a_walk_and_no_row(shard, kind):
    path = index_of(shard)
    pq.write_table(BROKEN[kind](pq.read_table(path)), path)
    with pytest.warns(UserWarning, match=r"\.tar\.index\.parquet is not used: it is "):
        found = answers(shard)
    assert found == answers(shard, index=False)
    with pytest.raises(dii.ShardError, match=r"index\.parquet can't be used: it is "):
        answers(shard, index=True)
    again = {"overwrite": True} if kind in UNNOTICED else {}
    assert dii.write_index(shard, **again)["state"].tolist() == ["written"]
    assert answers(shard, index=True) == found


@pytest.mark.parametrize("damaged", ["txt/content", "jpg/height", "cls/offset", "__key__"])
def test_a_column_that_cannot_be_read_is_noticed_when_it_is_asked_for(shard, damaged):
    path = index_of(shard)
    whole = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    start = columns[damaged].dictionary_page_offset or columns[damaged].data_page_offset
    for at in range(start, start + columns[damaged].total_compressed_size):
        whole[at] = 0xFF
    path.write_bytes(whole)
    with pytest.warns(UserWarning, match=r"is not used: it is broken: its column .* cannot be"):
        assert answers(shard) == answers(shard, index=False)
    with pytest.raises(dii.ShardError, match="can't be used: it is broken"):
        answers(shard, index=True)


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.rounds(1, nightly=30)
def test_no_damage_to_the_file_is_another_error_than_of_this_package(shard, rng):
    """Bytes are changed, cut out and put in at random."""
    path = index_of(shard)
    whole = path.read_bytes()
    sound = answers(shard, index=False)
    others = 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at, length = rng.randrange(len(data)), rng.randrange(1, 9)
            data[at : at + rng.choice([0, length])] = rng.randbytes(rng.choice([0, length]))
        path.write_bytes(data)
        index_read._kept.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = answers(shard)
            except dii.DaskImageIngestError:
                others += 1
                continue
        if any("is not used" in str(warning.message) for warning in said):
            assert found == sound
        else:
            others += found != sound
    assert others < 6  # a value that reads as well as the one that was written
