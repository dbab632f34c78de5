"""How a remote shard begins tells its columns, and little of it is fetched for that."""

import dask
import numpy as np
import pytest
from faulty_server import faulty_server
from tars import samples_of, tar, webdataset_samples

from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import index_head, index_tar

RNG = np.random.default_rng(1)


def shard(samples: int, size: int, apart: bool = False) -> bytes:
    names = [(f"{i:05d}", e) for i in range(samples) for e in ("jpg", "txt")]
    if apart:
        names.sort(key=lambda name: name[1])
    return tar({f"{key}.{e}": RNG.bytes(size if e == "jpg" else 20) for key, e in names})


@pytest.fixture
def served():
    with faulty_server() as server:

        def opened(data: bytes, **how):
            server.files["/x.tar"] = data
            return open_shard(f"{server.url}/x.tar", **how)

        yield server, opened


def test_the_head_of_a_shard_is_enough(served):
    server, opened = served
    data = shard(200, 50_000)
    with opened(data) as content:
        index, share = index_head(content, "x")
        whole = index_tar(data).samples
        assert index.samples == whole[: len(index.samples)]
        assert len(index.samples) / share == pytest.approx(200, rel=0.1)
    assert server.sent < 2_000_000


def test_large_images_are_skipped(served):
    server, opened = served
    with opened(shard(20, 3_000_000)) as content:
        index, share = index_head(content, "x")
        assert len(index.samples) >= 4
        assert len(index.samples) / share == pytest.approx(20, rel=0.3)
    assert server.sent < 3_000_000


def test_all_of_it_is_scanned_where_its_end_has_other_members(served):
    _, opened = served
    with opened(shard(100, 50_000, apart=True)) as content:
        index, share = index_head(content, "x")
        assert share == 1
        assert {frozenset(sample.members) for sample in index.samples} == {
            frozenset({"jpg", "txt"})
        }


def test_a_scan_that_skips_finds_the_same(served):
    server, opened = served
    data = shard(30, 400_000)
    with dask.config.set({"image-ingest.remote.skip": "0"}), opened(data) as content:
        assert index_tar(content).samples == index_tar(data).samples
    assert server.sent < len(data) / 5


@pytest.mark.slow
def test_what_was_announced_is_fetched_at_once_and_nothing_else(served):
    server, opened = served
    data = shard(200, 50_000)
    places = [sample.members["jpg"] for sample in index_tar(data).samples[::10]]
    with opened(data) as content:
        server.together = 16
        content.prefetch([(start, start + size) for start, size in places])
        for start, size in places:
            assert content[start : start + size] == data[start : start + size]
    assert server.counts["GET"] <= len(places) + 1
    assert server.peak >= 16
    assert server.sent < 1.5 * sum(size for _, size in places) + 100_000


def test_what_came_with_the_head_is_not_asked_for_again(served):
    server, opened = served
    data = shard(20, 50_000)
    with opened(data) as content:
        content.prefetch([(0, 1000), (60_000, 64 << 10)])
        assert content[60_000:64_000] == data[60_000:64_000]
        assert content[70_000:80_000] == data[70_000:80_000]
    ranges = [headers["Range"] for _, _, headers in server.seen]
    # The second begins at a page of 4 KiB.
    assert ranges == ["bytes=0-65535", "bytes=69632-81919"]


@pytest.mark.slow
def test_memory_for_what_is_fetched_ahead_is_bounded(served):
    _server, opened = served
    data = shard(300, 50_000)
    small = {"read-ahead": "1 MiB", "cache": "1 MiB", "request-size": "256 KiB"}
    limits = dask.config.set({f"image-ingest.remote.{name}": size for name, size in small.items()})
    with limits, opened(data) as content:
        most = 0
        for start in range(0, len(data), 100_000):
            assert content[start : start + 512] == data[start : start + 512]
            cache = content._cache
            most = max(most, cache.unused_bytes + cache._used_bytes)
        assert most <= (2 << 20) + (256 << 10)
        assert samples_of(content) == webdataset_samples(data)
