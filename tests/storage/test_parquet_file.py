"""A few rows of a large row group are read in batches: pyarrow's values, in their memory."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import MemoryReader, RowSpan, parquet_file
from dask_image_ingest.storage.parquet_file import ParquetSource

ROWS = 600


class Counted(MemoryReader):
    read = 0

    def __getitem__(self, part):
        data = super().__getitem__(part)
        self.read += len(data)
        return data

    def in_memory(self):
        return b""


def column(kind, rng):
    sizes = rng.integers(0, 400, ROWS)
    values = [rng.bytes(int(size)) if size % 7 else None for size in sizes]
    if kind == "repeated":
        values = [values[number % 5] for number in range(ROWS)]
    if kind == "text":
        return pa.array([None if value is None else value.hex() for value in values])
    if kind == "numbers":
        return pa.array(sizes)
    if kind == "list":
        return pa.array(
            [[value] * int(size % 3) for value, size in zip(values, sizes, strict=True)]
        )
    if kind == "struct":
        return pa.array([{"bytes": value, "path": "p"} for value in values])
    return pa.array(values)


@pytest.mark.rounds(2, nightly=60)
@pytest.mark.parametrize("kind", ["bytes", "repeated", "text", "numbers", "list", "struct"])
def test_rows_are_those_of_a_whole_read(kind, seed, monkeypatch):
    monkeypatch.setattr(parquet_file, "_LARGE_GROUP", 0)
    rng = np.random.default_rng(seed)
    table = pa.table({"before": range(ROWS), "x": column(kind, rng), "x.y": range(ROWS)})
    file = io.BytesIO()
    pq.write_table(
        table,
        file,
        row_group_size=int(rng.choice([ROWS, 250])),
        use_dictionary=bool(rng.integers(2)),
        data_page_size=int(rng.choice([100, 3000, 1 << 20])),
        write_batch_size=int(rng.choice([1, 16, 64])),
        dictionary_pagesize_limit=int(rng.choice([500, 1 << 20])),
        compression=str(rng.choice(["none", "snappy", "zstd"])),
        data_page_version=str(rng.choice(["1.0", "2.0"])),
        write_page_checksum=bool(rng.integers(2)),
        store_schema=bool(rng.integers(2)),
    )
    source = ParquetSource("a.parquet", Counted(file.getvalue()))
    first = 0
    for group in range(source.metadata.num_row_groups):
        rows = source.metadata.row_group(group).num_rows
        for _ in range(6):
            start, stop = sorted(rng.integers(0, rows + 1, 2).tolist())
            if start < stop:
                expected = table["x"].slice(first + start, stop - start).to_pylist()
                for packed in (False, True):
                    arrays = source.read_rows("x", [RowSpan(group, start, stop)], packed=packed)
                    assert [value for array in arrays for value in array.to_pylist()] == expected
        first += rows
    if kind == "struct":
        arrays = source.read_rows("x.bytes", [RowSpan(0, 5, 9)])
        values = [each for array in arrays for each in array.field("bytes").to_pylist()]
        assert values == [value["bytes"] for value in table["x"].to_pylist()[5:9]]


def test_a_few_rows_of_a_large_group_take_the_memory_of_these_rows(monkeypatch):
    rng = np.random.default_rng(0)
    values = pa.array([rng.bytes(20_000) for _ in range(2000)])
    file = io.BytesIO()
    pq.write_table(pa.table({"x": values}), file, use_dictionary=False, write_batch_size=16)
    source = ParquetSource("a.parquet", Counted(file.getvalue()))
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        arrays = source.read_rows("x", [RowSpan(0, 1500, 1550)])
        assert pa.chunked_array(arrays).equals(pa.chunked_array([values[1500:1550]]))
        assert pool.max_memory() < 8_000_000
        del arrays  # before the pool, which owns their memory
    finally:
        pa.set_memory_pool(default)


@pytest.mark.parametrize("kind", ["bytes", "struct", "list", "text", "fixed", "nulls"])
def test_what_unpacks_beyond_the_limit_is_an_error(kind):
    large = b"x" * 100_000
    values = {
        "bytes": lambda: pa.array([large] * 1000),
        "struct": lambda: pa.array([{"bytes": large}] * 1000),
        "list": lambda: pa.array([[large]] * 1000),
        "text": lambda: pa.array([large.decode()] * 1000),
        "fixed": lambda: pa.array([large] * 1000, pa.binary(len(large))),
        "nulls": lambda: pa.nulls(10_000_000, pa.int64()),
    }[kind]()
    file = io.BytesIO()
    count = len(values)
    pq.write_table(pa.table({"x": values}), file, row_group_size=count)
    del values
    source = ParquetSource("a.parquet", MemoryReader(file.getvalue()))
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    default = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(ShardError, match=r"'x'.* unpack to more than 50,000,000"):
            source.read_rows("x", [RowSpan(0, 0, count)], limit=50_000_000)
    finally:
        pa.set_memory_pool(default)
    assert pool.max_memory() < 50_000_000


def test_damaged_pages_are_errors(seed):
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    table = pa.table({"x": [rng.bytes(200) for _ in range(ROWS)]})
    pq.write_table(table, file, data_page_size=1000, write_batch_size=8, write_page_checksum=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parquet_file, "_LARGE_GROUP", 0)
        for _ in range(100):
            data = bytearray(file.getvalue())
            data[rng.integers(4, len(data) - 1000)] ^= 1 << rng.integers(8)
            start = int(rng.integers(ROWS - 50))
            try:
                source = ParquetSource("a.parquet", MemoryReader(bytes(data)))
                arrays = source.read_rows("x", [RowSpan(0, start, start + 50)])
            except ShardError:
                continue
            assert pa.chunked_array(arrays).to_pylist() == table["x"].to_pylist()[start:][:50]
