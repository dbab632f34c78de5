"""Chained URLs of fsspec that keep copies of remote shards, over real servers."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import dask
import fsspec
import numpy as np
import pandas as pd
import pytest
from faulty_server import faulty_server
from processes import printed
from tars import COMPRESSIONS, samples_of, tar, webdataset_samples

import dask_image_ingest as dii
from dask_image_ingest.storage import find_shards, open_shard

# fsspec's block cache leaves its files to the garbage collector.
_LEFT_OPEN = "ignore:(?s).*FileIO name=.*copies/:pytest.PytestUnraisableExceptionWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(_LEFT_OPEN)]

RNG = np.random.default_rng(3)
SHARDS = {
    f"/d/{n}.tar": tar({f"{i:03d}.{e}": RNG.bytes(9000) for i in range(30) for e in ("jpg", "txt")})
    for n in range(10)
}
PAGE = "".join(f'<a href="{n}.tar">{n}</a>' for n in range(10)).encode()
CACHES = ("filecache", "simplecache", "blockcache")


@pytest.fixture
def server():
    with faulty_server(files={**SHARDS, "/d/": PAGE, "/d": PAGE}) as state:
        yield state


@pytest.fixture(params=CACHES)
def cache(request):
    return request.param


@pytest.fixture
def options(cache, tmp_path):
    return {cache: {"cache_storage": str(tmp_path / "copies")}}


@pytest.mark.parametrize("pattern", ["{0..9}.tar", "*.tar", "", "[0-9].tar"])
def test_shards_are_found_as_without_a_cache(server, cache, options, pattern):
    url = f"{server.url}/d/{pattern}"
    if "[" in pattern:  # brackets are part of web addresses
        with pytest.raises(dii.ShardNotFoundError):
            find_shards(f"{cache}::{url}", options)
        return
    plain = find_shards(url)
    assert len(plain) == 10
    found = find_shards(f"{cache}::{url}", options)
    assert [shard.url for shard in found] == [f"{cache}::{shard.url}" for shard in plain]
    assert [(s.size, s.version) for s in found] == [(s.size, s.version) for s in plain]
    assert server.counts["GET"] <= 8  # pages


def test_what_was_read_once_is_not_fetched_again(server, cache, options):
    url = f"{cache}::{server.url}/d/3.tar"
    for again in (False, True):
        server.reset()
        with open_shard(url, options) as content:
            assert samples_of(content) == webdataset_samples(SHARDS["/d/3.tar"])
        assert (server.sent == 0) is again


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_shards_are_kept_as_they_are(server, cache, options, compression):
    stored = COMPRESSIONS[compression](SHARDS["/d/1.tar"])
    server.files["/d/z"] = stored
    with open_shard(f"{cache}::{server.url}/d/z", options) as content:
        assert samples_of(content) == webdataset_samples(SHARDS["/d/1.tar"])


def test_a_shard_that_is_not_there_is_named(server, cache, options):
    url = f"{cache}::{server.url}/d/none.tar"
    with pytest.raises(dii.ShardNotFoundError):
        find_shards(url, options)
    with pytest.raises(dii.ShardNotFoundError, match=r"none\.tar"), open_shard(url, options):
        pass


def test_a_collection_is_read_filtered_and_decoded_late(cache, options, shards):
    files = {f"/{shard.name}": shard.read_bytes() for shard in shards}
    local = dii.read_webdataset_images(shards, backend="pandas", size=32)
    with faulty_server(files=files) as server:
        url = f"{cache}::{server.url}/photos-{{000..002}}.tar"
        ddf = dii.read_webdataset_images(url, backend="pandas", size=32, storage_options=options)
        frame = ddf.compute()
        server.reset()
        table = ddf[ddf.width > 120].drop(columns=["image", "error"])
        late = dii.decode_images(table, size=32, storage_options=options).compute()
        assert server.sent == 0
    expected = local.compute()
    same = [name for name in expected.columns if name not in ("__url__", "image")]
    pd.testing.assert_frame_equal(frame[same], expected[same])
    wide = expected[expected.width > 120]
    assert late["__key__"].tolist() == wide["__key__"].tolist()
    for got, wanted in zip(late.images.arrays(), wide.images.arrays(), strict=True):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("cache", ["filecache", "simplecache"], indirect=True)
def test_half_a_file_is_never_taken_for_a_copy(server, cache, options, tmp_path):
    url = f"{cache}::{server.url}/d/3.tar"
    server.rates = {"truncate": 1.0}
    few = dask.config.set({"image-ingest.remote.retry-limit": 0.3})
    with few, pytest.raises(dii.ShardError), open_shard(url, options):
        pass
    assert not [path for path in (tmp_path / "copies").iterdir() if path.name != "cache"]
    server.rates = {"truncate": 0.3, "503": 0.2}
    with open_shard(url, options) as content:
        assert content[:] == SHARDS["/d/3.tar"]


@pytest.mark.parametrize("cache", ["filecache", "simplecache"], indirect=True)
def test_what_a_killed_process_left_goes_and_what_another_writes_stays(
    server, cache, options, tmp_path
):
    url = f"{cache}::{server.url}/d/3.tar"
    with open_shard(url, options):
        pass
    (copy,) = (path for path in (tmp_path / "copies").iterdir() if path.name != "cache")
    names = ("left", "written", "kept")
    left, written, kept = (copy.with_name(f"{copy.name}.{name}.part") for name in names)
    left.write_bytes(b"half")
    written.write_bytes(b"half")
    kept.mkdir()  # can't be removed as a file, as one of another user's
    long_ago = time.time() - 7200
    for old in (left, kept):
        os.utime(old, (long_ago, long_ago))
    copy.unlink()
    with open_shard(url, options) as content:
        assert content[:] == SHARDS["/d/3.tar"]
    assert not left.exists()
    assert written.exists()
    assert kept.exists()


@pytest.mark.parametrize("cache", ["filecache", "simplecache"], indirect=True)
def test_threads_fetch_a_shard_once(server, cache, options):
    server.latency = 0.05
    url = f"{cache}::{server.url}/d/3.tar"

    def read(_):
        with open_shard(url, options) as content:
            return bytes(content[:])

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(read, range(8))) == {SHARDS["/d/3.tar"]}
    assert server.sent < 2 * len(SHARDS["/d/3.tar"])


def test_threads_read_blocks_of_many_shards(server, tmp_path):
    options = {"blockcache": {"cache_storage": str(tmp_path / "copies")}}

    def read(name):
        with open_shard(f"blockcache::{server.url}{name}", options) as content:
            return samples_of(content) == webdataset_samples(SHARDS[name])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, [*SHARDS, *SHARDS]))


@pytest.mark.parametrize("cache", ["filecache", "simplecache"], indirect=True)
def test_fsspec_finds_the_copy_that_was_made_here(server, cache, options):
    url = f"{cache}::{server.url}/d/3.tar"
    with open_shard(url, options):
        pass
    server.reset()
    with fsspec.open(url, **options) as file:
        assert file.read() == SHARDS["/d/3.tar"]
    assert server.sent == 0


def test_a_copy_expires_as_fsspec_says(server, tmp_path, monkeypatch):
    place = str(tmp_path / "copies")
    options = {"filecache": {"cache_storage": place, "expiry_time": 3600}}
    url = f"filecache::{server.url}/d/3.tar"
    with open_shard(url, options):
        pass
    server.files["/d/3.tar"] = SHARDS["/d/4.tar"]
    with open_shard(url, options) as content:
        assert content[:] == SHARDS["/d/3.tar"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3700)
    with open_shard(url, options) as content:
        assert content[:] == SHARDS["/d/4.tar"]


def test_buckets_are_cached_with_the_options_of_both(bucket, s3_options, cache, options):
    fs, name = bucket
    for n in range(3):
        fs.pipe_file(f"{name}/d/{n}.tar", SHARDS[f"/d/{n}.tar"])
    options = {"s3": s3_options, **options}
    with faulty_server(upstream=s3_options["endpoint_url"]) as proxy:
        options["s3"] = s3_options | {"endpoint_url": proxy.url}
        for pattern in ("{0..2}.tar", "*.tar", ""):
            found = find_shards(f"{cache}::s3://{name}/d/{pattern}", options)
            assert [s.url for s in found] == [f"{cache}::s3://{name}/d/{n}.tar" for n in range(3)]
        counts = Counter()
        for turn in ("first", "second"):
            proxy.reset()
            for n, shard in enumerate(found):
                with open_shard(shard.url, options) as content:
                    assert samples_of(content) == webdataset_samples(SHARDS[f"/d/{n}.tar"])
            counts[turn] = proxy.sent
        assert counts["first"] >= sum(len(SHARDS[f"/d/{n}.tar"]) for n in range(3))
        assert counts["second"] < 4096


FORKED = """
import json, os, random, signal, tempfile, threading, time
from dask_image_ingest.storage import open_shard
from faulty_server import faulty_server

data = random.Random(0).randbytes(1 << 20)
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
options = {"blockcache": {"cache_storage": folder.name}}
with faulty_server(files={"/x.tar": data, "/y.tar": data}) as server:
    def read(name):
        with open_shard(f"blockcache::{server.url}{name}", options) as content:
            return content[:] == data

    assert read("/x.tar")
    server.reset()
    server.rates["stall"] = 1.0
    threading.Thread(target=read, args=["/y.tar"], daemon=True).start()
    while not server.counts["206"]:
        time.sleep(0.01)
    server.rates.clear()
    child = os.fork()
    if not child:
        signal.alarm(10)
        os._exit(not read("/x.tar"))
    print(json.dumps(os.waitpid(child, 0)[1]), flush=True)
    folder.cleanup()
    os._exit(0)  # the request is still under way
"""


@pytest.mark.newest  # with the oldest fsspec it waits still
def test_a_fork_does_not_wait_for_a_request_of_its_parent():
    assert printed(FORKED) == 0
