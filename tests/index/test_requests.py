"""With an index no shard is opened until pixels are asked for, and then few requests are made."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_server import faulty_server
from s3 import empty_bucket, s3_options
from synthetic import write_shards

import dask_image_ingest as dii

pytestmark = pytest.mark.slow

BUCKET = "indexed"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Nine shards of a megabyte and more, and their indexes."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, shards=9, per_shard=60, size=(300, 400))
    dii.write_index(str(folder))
    return folder


def table(ddf):
    return ddf.drop(columns=["image", "error"])


def questions(ddf):
    """What can be asked without pixels."""
    wide = ddf[(ddf.width > 390) & ddf.txt.str.contains("7")]
    keys = pd.DataFrame({"__key__": ["000007", "000133", "000534"], "score": [1.0, 2.0, 3.0]})
    return [
        len(ddf),
        table(ddf).compute(),
        table(wide).compute(),
        table(ddf).merge(keys, on="__key__").compute(),
        ddf.cls.value_counts().compute().sort_index(),
    ]


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, int):
            assert mine == theirs
        else:
            pd.testing.assert_frame_equal(unplaced(mine), unplaced(theirs))


def unplaced(found):
    frame = found.to_frame() if isinstance(found, pd.Series) else found
    if "__url__" in frame.columns:
        frame = frame.assign(__url__=frame["__url__"].str.rpartition("/")[2])
    return frame.reset_index(drop=True)


@pytest.fixture
def web(shards):
    """The shards and indexes behind a web server that lists them."""
    files = {f"/data/{path.name}": path.read_bytes() for path in shards.iterdir()}
    links = "".join(f'<a href="{name.rpartition("/")[2]}">x</a>' for name in files)
    files["/data/"] = files["/data"] = f"<html>{links}</html>".encode()
    with faulty_server(files=files) as server:
        # The versions of the shards are others on a server.
        urls = [f"{server.url}/data/{path.name}" for path in sorted(shards.glob("*.tar"))]
        yield server, urls


def asked_for(server, suffix):
    """How often each file of a kind was asked for, but for its size and version."""
    asked = (path for method, path, _ in server.seen if method == "GET")
    return Counter(path for path in asked if path.endswith(suffix))


def index_here(server, urls, tmp_path):
    """Indexes of the server's shards, on the server."""
    dii.write_index(urls, folder=tmp_path)
    for file in tmp_path.iterdir():
        server.files[f"/data/{file.name}"] = file.read_bytes()
    server.reset()


def test_no_tar_is_asked_for_until_pixels_are(web, shards, tmp_path):
    server, urls = web
    index_here(server, urls, tmp_path)
    ddf = dii.read_webdataset_images(urls, backend="pandas")
    assert len([path for _, path, _ in server.seen if path.rstrip("/") == "/data"]) == 1
    found = questions(ddf)
    assert not asked_for(server, ".tar")
    local = dii.read_webdataset_images(str(shards), backend="pandas", index=False)
    assert_same(questions(local), found)


@pytest.mark.parametrize("sidecar", ["auto", "parquet"])
def test_sidecars_and_indexes_are_found_by_one_listing(sidecar, web, shards, tmp_path):
    server, urls = web
    index_here(server, urls, tmp_path)
    keys = dii.read_webdataset_images(str(shards), backend="pandas")[["__url__", "__key__"]]
    page = server.files["/data"]
    for url, rows in keys.compute().groupby("__url__"):
        name = Path(url).with_suffix(".parquet").name
        scores = pa.table({"key": rows["__key__"].tolist(), "score": range(len(rows))})
        pq.write_table(scores, tmp_path / name)
        server.files[f"/data/{name}"] = (tmp_path / name).read_bytes()
        page += f'<a href="{name}">x</a>'.encode()
    server.files |= {"/data": page, "/data/": page}
    ddf = dii.read_webdataset_images(urls, backend="pandas", sidecar=sidecar)
    assert len([path for _, path, _ in server.seen if path.rstrip("/") == "/data"]) == 1
    sidecars = asked_for(server, ".parquet").keys() - asked_for(server, ".index.parquet").keys()
    assert len(sidecars) <= 1  # the first one, for its columns
    assert ddf["score"].compute().tolist() == [*range(60)] * 9
    assert not asked_for(server, ".tar")


@pytest.mark.parametrize("count", [2, 9])
def test_a_look_for_sidecars_asks_for_nothing_more(count, web, tmp_path):
    server, urls = web
    index_here(server, urls, tmp_path)
    asked = {}
    for sidecar in (None, "auto"):
        server.reset()
        dii.read_webdataset_images(urls[:count], backend="pandas", sidecar=sidecar)
        asked[sidecar] = sorted((method, path.partition("?")[0]) for method, path, _ in server.seen)
    assert asked["auto"] == asked[None]


def test_an_index_costs_two_requests_and_pixels_two_of_each_shard(web, tmp_path):
    server, urls = web
    index_here(server, urls, tmp_path)
    ddf = dii.read_webdataset_images(urls, backend="pandas", size=16)
    server.reset()
    rows = table(ddf)[ddf.txt.isin(["picture 30", "picture 31", "picture 300"])].compute()
    assert max(asked_for(server, ".parquet").values()) <= 2
    server.reset()
    images = dii.decode_images(rows, size=16)
    assert images["error"].isna().all()
    assert asked_for(server, ".tar").keys() == {"/data/shard-0000.tar", "/data/shard-0005.tar"}
    assert max(asked_for(server, ".tar").values()) <= 2
    # The same in the task of the read itself.
    server.reset()
    image = ddf[ddf.txt == "picture 300"][["image"]].compute()
    assert image["image"].iloc[0] == images[images.txt == "picture 300"]["image"].iloc[0]
    asked = asked_for(server, ".tar")
    assert asked.keys() == {"/data/shard-0005.tar"}
    assert max(asked.values()) <= 2


@pytest.mark.parametrize("combined", [False, True])
def test_a_server_without_listings_is_asked_for_two_indexes(web, tmp_path, combined):
    server, urls = web
    dii.write_index(urls, folder=tmp_path, combined=combined)
    del server.files["/data/"], server.files["/data"]
    for path in [path for path in server.files if path.endswith(".index.parquet")]:
        del server.files[path]  # with other versions of the shards
    unindexed, indexed = Counter(), Counter()
    for asked in (unindexed, indexed):
        server.reset()
        assert len(dii.read_webdataset_images(urls, backend="pandas", sidecar=None)) == 540
        asked.update(path for _, path, _ in server.seen if path.endswith(".parquet"))
        assert bool(asked_for(server, ".tar")) == (asked is unindexed)
        for file in tmp_path.iterdir():
            server.files[f"/data/{file.name}"] = file.read_bytes()
    names = ["_index.parquet", "shard-0000.tar.index.parquet"]
    assert sorted(unindexed) == [f"/data/{name}" for name in names]
    server.reset()
    ddf = dii.read_webdataset_images(urls, backend="pandas", index=True, sidecar=None)
    assert not [path for _, path, _ in server.seen if path.rstrip("/") == "/data"]
    assert len(ddf) == 540
    assert not asked_for(server, ".tar")


def test_a_remote_shard_that_is_replaced_is_no_mixture(web, tmp_path):
    server, urls = web
    index_here(server, urls, tmp_path)
    ddf = dii.read_webdataset_images(urls[:2], backend="pandas", size=16)
    server.files["/data/shard-0001.tar"] = server.files["/data/shard-0002.tar"]
    assert len(ddf) == 120
    with pytest.raises(dii.ShardError, match=r"shard-0001\.tar has changed since it was listed"):
        ddf.compute()
    stale = r"index .*shard-0001\.tar\.index\.parquet is not used: it is stale"
    with pytest.warns(UserWarning, match=stale):
        keys = dii.read_webdataset_images(urls[:2], backend="pandas")["__key__"].compute()
    assert keys.iloc[60] == "000120"


@pytest.mark.more
def test_shards_in_a_bucket(s3_server, shards):
    fs, name, options = empty_bucket(s3_server, BUCKET), BUCKET, s3_options(s3_server)
    for path in shards.glob("*.tar"):
        fs.put_file(str(path), f"{name}/train/{path.name}")
    url = f"s3://{name}/train/shard-*.tar"
    written = dii.write_index(url, storage_options=options)
    assert written["state"].tolist() == ["written"] * 9
    beside = fs.ls(f"{name}/train", detail=False, refresh=True)
    assert len(beside) == 18, beside
    with faulty_server(upstream=s3_server) as server:
        counted = s3_options(server.url)
        ddf = dii.read_webdataset_images(url, backend="pandas", storage_options=counted)
        found = questions(ddf)
        tars = [path for _, path, _ in server.seen if re.search(r"\d\.tar(\?|$)", path)]
        listings = [path for _, path, _ in server.seen if "list-type" in path]
        assert not tars
        assert len(listings) <= 3, listings
        asked = []
        for sidecar in (None, "auto"):
            server.reset()
            dii.read_webdataset_images(
                url, backend="pandas", sidecar=sidecar, storage_options=counted
            )
            asked.append(
                sorted((method, path.partition("?")[0]) for method, path, _ in server.seen)
            )
        assert asked[0] == asked[1]
        server.reset()
        few = [f"s3://{name}/train/shard-000{n}.tar" for n in (3, 5)]
        assert (
            len(dii.read_webdataset_images(few, backend="pandas", storage_options=counted)) == 120
        )
        assert not [path for _, path, _ in server.seen if re.search(r"\.tar\?x-id=GetObj", path)]
    local = dii.read_webdataset_images(str(shards), backend="pandas", index=False)
    assert_same(questions(local), found)
    again = dii.write_index(url, storage_options=options)
    assert again["state"].tolist() == ["kept"] * 9


@pytest.mark.more
def test_other_file_systems(shards, tmp_path):
    fs = fsspec.filesystem("memory")
    for path in shards.glob("*.tar"):
        fs.pipe_file(f"/indexed/{path.name}", path.read_bytes())
    try:
        dii.write_index("memory://indexed/", folder=tmp_path)
        ddf = dii.read_webdataset_images("memory://indexed/", backend="pandas", index=tmp_path)
        local = dii.read_webdataset_images(str(shards), backend="pandas", index=False)
        assert_same(questions(local), questions(ddf))
        picture = ddf[ddf.txt == "picture 77"][["image"]].compute()["image"].iloc[0]
        assert picture == local[local.txt == "picture 77"][["image"]].compute()["image"].iloc[0]
    finally:
        fs.rm("/indexed", recursive=True)
