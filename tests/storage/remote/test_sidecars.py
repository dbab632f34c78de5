"""Parquet files beside remote shards: found by listings, fetched by ranges."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from faulty_server import KINDS, faulty_server
from pyarrow import parquet
from tars import tar

import dask_image_ingest as dii

pytestmark = pytest.mark.slow

SHARDS, GROUPS = 12, 5
KINDS_OF_FILE = (".tar", ".parquet")


def shard(n: int) -> bytes:
    return tar({f"{n:02d}{i:03d}.{e}": f"{i}".encode() for i in range(50) for e in ("jpg", "txt")})


def table(n: int) -> bytes:
    rng = np.random.default_rng(n)
    columns = {
        "key": [f"{n:02d}{i:03d}" for i in range(50)],
        "score": np.arange(50) / 50 + n,
        "large": [rng.bytes(20_000) for _ in range(50)],
    }
    out = io.BytesIO()
    parquet.write_table(pa.table(columns), out, row_group_size=50 // GROUPS)
    return out.getvalue()


@pytest.fixture(scope="module")
def files():
    tars = {f"{n:05d}.tar": shard(n) for n in range(SHARDS)}
    return tars | {f"{n:05d}.parquet": table(n) for n in range(SHARDS)}


@pytest.fixture(scope="module")
def expected(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return read(f"{folder}/*.tar")[["__key__", "score", "large"]].compute().reset_index(drop=True)


def read(paths, sidecar="parquet", **options):
    return dii.read_webdataset_images(paths, sidecar=sidecar, backend="pandas", **options)


def served(files, page=True, **options):
    listed = "".join(f'<a href="{name}">{name}</a>' for name in files).encode()
    paths = {f"/d/{name}": data for name, data in files.items()}
    return faulty_server(files=paths | ({"/d/": listed} if page else {}), **options)


PATTERN = f"{{00000..{SHARDS - 1:05d}}}.tar"


@pytest.mark.parametrize("page", [True, False])
def test_no_web_server_is_asked_for_each_file(files, expected, page):
    with served(files, page) as server:
        ddf = read(f"{server.url}/d/{PATTERN}")
        asked = Counter((verb, path) for verb, path, _ in server.seen if "parquet" in path)
        # The first one is opened, to know its columns; without a listing, two indexes are tried.
        indexes = {"/d/_index.parquet", "/d/00000.tar.index.parquet"}
        assert {path for _, path in asked} == {"/d/00000.parquet"} | (set() if page else indexes)
        assert asked["HEAD", "/d/00000.parquet"] == (0 if page else 1)
        found = ddf[["__key__", "score", "large"]].compute()
    pd.testing.assert_frame_equal(found.reset_index(drop=True), expected)


def test_a_file_that_a_server_turns_out_not_to_have(files):
    few = {name: data for name, data in files.items() if name != "00003.parquet"}
    with served(few, page=False) as server:
        ddf = read(f"{server.url}/d/{PATTERN}")
        with pytest.raises(dii.ShardNotFoundError, match=r"00003\.parquet"):
            ddf[["score"]].compute()
        assert "score" not in read(f"{server.url}/d/{PATTERN}", "auto").columns
    with served(files) as server:
        del server.files["/d/00003.parquet"]
        ddf = read(f"{server.url}/d/{PATTERN}", "auto")
        with pytest.warns(UserWarning, match=r"00003\.parquet does not exist"):
            scores = ddf[["score"]].compute()["score"]
    assert scores.isna().sum() == 50
    with served(few) as server, pytest.raises(dii.ArgumentError, match="1 of 12 shards"):
        read(f"{server.url}/d/{PATTERN}")


def test_only_the_bytes_of_what_is_asked_for_are_fetched(files, expected):
    with served(files) as server:
        ddf = read(f"{server.url}/d/{PATTERN}")
        server.reset()
        scores = ddf[["score"]].compute()
        assert scores["score"].tolist() == expected["score"].tolist()
        tars, tables = (
            sum(len(d) for n, d in files.items() if n.endswith(e)) for e in KINDS_OF_FILE
        )
        assert server.sent < tars + 0.25 * tables
        server.reset()
        some = ddf[(ddf.score > 3.35) & (ddf.score < 3.45)][["large"]].compute()
        assert (
            some["large"].tolist()
            == expected["large"][(expected.score > 3.35) & (expected.score < 3.45)].tolist()
        )
        # Of one shard, and of its file, a fifth of the large column.
        opened = {path for _, path, _ in server.seen if path.endswith(".tar")}
        assert opened == {"/d/00003.tar"}
        large = 0.2 * len(files["00003.parquet"]) + len(files["00003.tar"])
        # Of each file, how it begins and ends, and of row groups a page: of scores, here of keys.
        pages = (64 << 10) + (80 << 10) + GROUPS * (16 << 10)
        assert server.sent < large + (SHARDS + 1) * pages


@pytest.mark.more
def test_faults_lose_nothing(files, expected):
    rates = dict.fromkeys(KINDS[:5], 0.05)
    with served(files, rates=rates, seed=4) as server:
        found = read(f"{server.url}/d/{PATTERN}")[["__key__", "score", "large"]].compute()
        assert sum(server.injected.values()) > 3
    pd.testing.assert_frame_equal(found.reset_index(drop=True), expected)


def test_a_bucket_is_listed_once_for_both(files, expected, bucket, s3_options):
    fs, name = bucket
    for path, data in files.items():
        fs.pipe_file(f"{name}/d/{path}", data)
    with faulty_server(upstream=s3_options["endpoint_url"]) as proxy:
        options = s3_options | {"endpoint_url": proxy.url}
        ddf = read(f"s3://{name}/d/*.tar", storage_options=options)
        # The one with a limit asks whether the glob is a name.
        asked = [path for _, path, _ in proxy.seen if "list-type=2" in path]
        listings = [path for path in asked if "max-keys=1&" not in path]
        heads = [p for verb, p, _ in proxy.seen if verb == "HEAD" and "parquet" in p]
        assert len(listings) == 1
        assert not heads
        found = ddf[["__key__", "score", "large"]].compute()
    pd.testing.assert_frame_equal(found.reset_index(drop=True), expected)
