"""Processes that die, memory and disks that run full: the result is whole, or an error says why."""

from __future__ import annotations

import os
import resource
import signal
import time

import dask
import numpy as np
import pytest
from distributed import Client, KilledWorker, LocalCluster
from photo_shards import make_photos, write_photo_shards
from processes import until

import dask_image_ingest as dii

pytestmark = [pytest.mark.slow, pytest.mark.newest]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_photo_shards(make_photos(160), tmp_path_factory.mktemp("faults"), per_shard=10)


@pytest.fixture(scope="module")
def expected(shards):
    return dii.read_webdataset_images(shards, backend="pandas").compute(scheduler="synchronous")


def assert_same(frame, expected):
    for column in ("__key__", "error", "txt", "width"):
        assert frame[column].equals(expected[column])
    for got, want in zip(frame.images.arrays(), expected.images.arrays(), strict=True):
        np.testing.assert_array_equal(got, want)


def cluster(**options):
    return LocalCluster(threads_per_worker=1, dashboard_address=":0", **options)


def test_a_worker_killed_mid_read_costs_nothing_but_time(shards, expected, tmp_path):
    with (
        cluster(n_workers=2) as two,
        Client(two) as client,
    ):
        ddf = dii.read_webdataset_images(shards, backend="pandas")
        slowed = ddf.map_partitions(slowly, meta=ddf._meta)
        futures = client.compute(slowed)
        pids = client.run(os.getpid)
        until(lambda: any(client.has_what().values()))
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        assert_same(futures.result(timeout=280), expected)


def slowly(frame):
    time.sleep(0.1)
    return frame


def test_a_worker_over_its_memory_limit_says_so(shards):
    """A partition that no worker can hold kills each that tries: dask names the task."""
    with (
        dask.config.set(
            {
                "distributed.worker.memory.terminate": 0.9,
                "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 65536,
                "distributed.scheduler.allowed-failures": 0,
            }
        ),
        cluster(n_workers=1, memory_limit="900 MB") as one,
        Client(one) as client,
    ):
        ddf = dii.read_webdataset_images(shards[:2], backend="pandas")
        with pytest.raises(KilledWorker):
            client.compute(ddf.map_partitions(hoard, meta=ddf._meta)).result(timeout=280)


def hoard(frame):
    held = []
    for _ in range(100):
        held.append(np.ones(100 << 20, np.uint8))
        time.sleep(0.15)
    return frame


def test_a_full_disk_for_spilling_loses_nothing(shards, expected, tmp_path):
    """No file can grow: what does not fit in memory has to stay there all the same."""
    limits = {
        "distributed.worker.memory.target": 0.001,
        "distributed.worker.memory.spill": 0.002,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
    }
    with (
        dask.config.set(limits),
        cluster(n_workers=1, memory_limit="400 MB", local_directory=str(tmp_path)) as one,
        Client(one) as client,
    ):
        client.run(forbid_files_to_grow)
        ddf = client.persist(dii.read_webdataset_images(shards, backend="pandas"))
        assert_same(client.compute(ddf).result(timeout=280), expected)
        ((on_disk, in_memory),) = client.run(where_data_is).values()
        # Far more than it should hold in memory, and nothing on the disk.
        assert on_disk == 0
        assert in_memory > 10 * 0.002 * 400e6


def where_data_is(dask_worker) -> tuple[int, int]:
    return len(dask_worker.data.slow), dask_worker.data.fast.total_weight


def forbid_files_to_grow():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
