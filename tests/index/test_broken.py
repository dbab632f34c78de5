"""A damaged index of the right size and version: told, not used, and the rows are the same."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.index import IndexFile, UnusableIndexError, open_stored
from dask_image_ingest.storage import find_shards
from dask_image_ingest.tar import FIELDS


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


def test_what_another_tool_has_rewritten_costs_a_scan_and_no_row(shard):
    path = index_of(shard)
    pq.write_table(pq.read_table(path).slice(0, 5), path)
    with pytest.warns(UserWarning, match=r"\.tar\.index\.parquet is not used: it is damaged"):
        found = answers(shard)
    assert found == answers(shard, index=False)
    with pytest.raises(dii.ShardError, match=r"index\.parquet can't be used: it is damaged"):
        answers(shard, index=True)
    assert dii.write_index(shard)["state"].tolist() == ["written"]
    assert answers(shard, index=True) == found


@pytest.mark.parametrize("damaged", ["txt/content", "jpg/height", "cls/offset", "__key__"])
def test_a_damaged_column_is_noticed_when_it_is_asked_for(shard, damaged):
    path = index_of(shard)
    whole = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    start = columns[damaged].dictionary_page_offset or columns[damaged].data_page_offset
    # The last byte of a page, which might as well be another one.
    whole[start + columns[damaged].total_compressed_size - 1] ^= 1
    path.write_bytes(whole)
    with pytest.warns(UserWarning, match=rf"is not used: its column '{damaged}' can't be read"):
        assert answers(shard) == answers(shard, index=False)
    with pytest.raises(dii.ShardError, match="can't be used: its column"):
        answers(shard, index=True)


def every_column(shard):
    """All that the index of a shard tells; the reason where it is not used."""
    try:
        with open_stored(IndexFile(str(index_of(shard)), *find_shards(shard)), None) as index:
            kinds = [(kind, name) for kind in index.extensions for name in FIELDS]
            return len(index), index.keys, *(index.column(*kind) for kind in kinds)
    except UnusableIndexError as error:
        return str(error)


@pytest.mark.rounds(1, nightly=8)
def test_no_bit_of_the_file_is_changed_unnoticed(shard, rng):
    path = index_of(shard)
    whole = path.read_bytes()
    sound = every_column(shard)
    refused = 0
    for at in range(rng.randrange(8), len(whole), 8):
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found = every_column(shard)
        refused += isinstance(found, str)
        assert isinstance(found, str) or found == sound, at
    # Bits that nobody needs are those of minima and maxima in headers of pages.
    assert refused > len(whole) / 8 / 2


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=30)
def test_no_damage_to_the_file_is_believed(shard, rng):
    """Bytes are changed, cut out and put in at random."""
    path = index_of(shard)
    whole = path.read_bytes()
    sound = answers(shard, index=False)
    used = 0
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at, length = rng.randrange(len(data)), rng.randrange(1, 9)
            data[at : at + rng.choice([0, length])] = rng.randbytes(rng.choice([0, length]))
        path.write_bytes(data)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert answers(shard) == sound
        used += not any("is not used" in str(warning.message) for warning in said)
    # Some damage is to columns that nothing here asks for, and to none at all.
    assert used < 10
