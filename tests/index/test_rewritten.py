"""A process that has read an index reads it again when its file is another one, or gone."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_server import faulty_server
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.index.index_file import IndexTable
from dask_image_ingest.index.write_index import index_bytes


@pytest.fixture
def shard(tmp_path):
    return Path(write_shards(tmp_path, shards=1, per_shard=8, size=(60, 80))[0])


def captions(paths, **options):
    return dii.read_webdataset_images(paths, backend="pandas", **options)["txt"].compute().tolist()


def test_what_was_overwritten_is_read_anew(shard):
    """A change that neither size nor time tells of is what ``overwrite=True`` is for."""
    dii.write_index(shard)
    assert captions(shard)[7] == "picture 7"
    facts = shard.stat()
    shard.write_bytes(shard.read_bytes().replace(b"picture 7", b"painter 7"))
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert dii.write_index(shard, overwrite=True)["state"].tolist() == ["written"]
    assert captions(shard, index=True)[7] == "painter 7"


def test_one_that_was_read_and_goes_away_is_told(shard):
    dii.write_index(shard)
    assert captions(shard, index=True)
    ddf = dii.read_webdataset_images(shard, backend="pandas")
    os.unlink(f"{shard}.index.parquet")
    with pytest.warns(UserWarning, match="there is no such file"):
        assert len(ddf) == 8
    with pytest.raises(dii.ShardError, match="there is no such file"):
        captions(shard, index=True)


def test_the_same_holds_on_a_server(shard, tmp_path):
    with faulty_server(files={"/0.tar": shard.read_bytes()}) as server:
        url = f"{server.url}/0.tar"
        dii.write_index(url, folder=tmp_path)
        name = "/0.tar.index.parquet"
        whole = (tmp_path / name[1:]).read_bytes()
        rows = pq.read_table(io.BytesIO(whole))
        texts = [text.replace(b"picture", b"painter") for text in rows["txt/content"].to_pylist()]
        place = rows.column_names.index("txt/content")
        rows = rows.set_column(place, "txt/content", pa.array(texts, pa.large_binary()))
        facts = IndexTable(whole).facts("")
        server.files[name] = index_bytes(rows, facts)
        assert captions(url, index=True)[7] == "painter 7"
        server.files[name] = whole
        ddf = dii.read_webdataset_images(url, backend="pandas", index=True)
        server.reset()
        assert ddf["txt"].compute().tolist()[7] == "picture 7"
        assert len(server.seen) == 1
        del server.files[name]
        with pytest.raises(dii.ShardError, match="there is no such file"):
            ddf["txt"].compute()
