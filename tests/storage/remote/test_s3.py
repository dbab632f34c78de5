"""Shards of an S3 server, with the options that users of s3fs know."""

import dask
import numpy as np
import pytest
from faulty_server import FAILURES, KINDS, faulty_server
from tars import COMPRESSIONS, samples_of, tar, webdataset_samples

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage import find_shards, open_shard

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(3)
SHARD = tar({f"{i:03d}.{e}": RNG.bytes(9000) for i in range(60) for e in ("jpg", "txt")})


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_shard_reads_as_webdataset_reads_it(bucket, s3_options, compression):
    fs, name = bucket
    fs.pipe_file(f"{name}/a b+c/x.tar", COMPRESSIONS[compression](SHARD))
    (shard,) = find_shards(f"s3://{name}/a b+c/*.tar", s3_options)
    with open_shard(shard.url, s3_options) as content:
        assert content.is_remote == (compression == "")
        assert samples_of(content) == webdataset_samples(SHARD)


def test_a_public_object_needs_no_credentials(bucket, s3_options, monkeypatch):
    fs, name = bucket
    fs.pipe_file(f"{name}/x.tar", SHARD, ACL="public-read")
    options = {"anon": True, "client_kwargs": {"endpoint_url": s3_options["endpoint_url"]}}
    with open_shard(f"s3://{name}/x.tar", options) as content:
        assert content[:] == SHARD


def test_where_no_url_can_be_signed_the_file_system_reads(bucket, s3_options):
    fs, name = bucket
    fs.pipe_file(f"{name}/x.tar", SHARD)
    options = s3_options | {"requester_pays": True}
    with open_shard(f"s3://{name}/x.tar", options) as content:
        assert samples_of(content) == webdataset_samples(SHARD)


def test_a_replaced_object_is_an_error(bucket, s3_options):
    fs, name = bucket
    fs.pipe_file(f"{name}/x.tar", SHARD)
    changed = pytest.raises(ShardError, match=r"x\.tar has changed while it was read")
    with changed, open_shard(f"s3://{name}/x.tar", s3_options) as content:
        fs.pipe_file(f"{name}/x.tar", SHARD[::-1])
        content[:]


def test_a_missing_object_is_named(bucket, s3_options):
    url = f"s3://{bucket[1]}/no.tar"
    with pytest.raises(ShardNotFoundError, match=url), open_shard(url, s3_options):
        pass


@pytest.mark.nightly  # one of each kind of server is in tests/test_remote_contract.py
def test_faults_between_here_and_there_lose_nothing(bucket, s3_options):
    fs, name = bucket
    fs.pipe_file(f"{name}/x.tar", SHARD)
    rates = dict.fromkeys(KINDS, 0.08)
    small = {"image-ingest.remote.request-size": "16 KiB", "image-ingest.remote.read-timeout": 0.5}
    upstream = s3_options["endpoint_url"]
    with faulty_server(upstream=upstream, rates=rates, seed=2) as proxy, dask.config.set(small):
        options = s3_options | {"endpoint_url": proxy.url}
        with open_shard(f"s3://{name}/x.tar", options) as content:
            assert samples_of(content) == webdataset_samples(SHARD)
        assert sum(proxy.injected[kind] for kind in KINDS if kind != "delay") >= 5


def test_a_fault_between_here_and_there_costs_one_request(bucket, s3_options):
    fs, name = bucket
    fs.pipe_file(f"{name}/x.tar", SHARD)
    rates = dict.fromkeys(FAILURES, 0.1)
    upstream = s3_options["endpoint_url"]
    with (
        faulty_server(upstream=upstream, rates=rates, seed=2) as proxy,
        dask.config.set({"image-ingest.remote.request-size": "16 KiB"}),
    ):
        options = s3_options | {"endpoint_url": proxy.url}
        with open_shard(f"s3://{name}/x.tar", options) as content:
            assert samples_of(content) == webdataset_samples(SHARD)
        bad = sum(proxy.injected.values())
        assert bad >= 5
        assert proxy.counts["GET"] <= len(SHARD) // (16 << 10) + 20 + bad
