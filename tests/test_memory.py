"""What a worker's memory holds while it reads one partition after the other."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import pytest
from photo_shards import encode, make_photos, write_photo_shards, write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.frames.pixel_pool import pixel_memory

pytestmark = [pytest.mark.slow, pytest.mark.newest]

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

PARTITIONS = 20
SLACK = 200_000_000


class Memory(NamedTuple):
    """Resident bytes of a worker: idle, at the peak of each partition; and what these decode to."""

    idle: int
    peaks: list[int]
    decoded: int


def photographs(folder: Path) -> list[Path]:
    """25 photographs a shard, which are read at 1024 × 1024."""
    return write_photo_shards(make_photos(PARTITIONS * 25), folder, 25)


def twelve_megapixels(folder: Path) -> list[Path]:
    """5 photographs a shard, of 36 MB each when decoded."""
    (photo,) = make_photos(1)
    large = Image.fromarray(photo.pixels).resize((4000, 3000))
    jpeg = encode(large)
    return [
        write_tar(folder / f"{shard:02}.tar", {f"{n}.jpg": jpeg for n in range(5)})
        for shard in range(PARTITIONS)
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((photographs, 1024), id="resized photographs", marks=pytest.mark.nightly),
        pytest.param((twelve_megapixels, None), id="12 megapixels"),
    ],
)
def memory(request, tmp_path_factory) -> Memory:
    """What a real worker needs to read 20 partitions."""
    make, size = request.param
    shards = make(tmp_path_factory.mktemp("memory"))
    assert len(shards) == PARTITIONS
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=size, partition_size=None)
    with dii.start_cluster(1, gpu=False, dashboard_address=None) as client:

        def read(number: int) -> int:
            part = ddf.partitions[number].persist()
            decoded = client.compute(part.to_delayed()[0].image.array.nbytes).result()
            del part
            while any(client.run(data_held).values()):
                time.sleep(0.01)
            return decoded

        read(0)  # imports and DALI's threads are no pixels
        (pid,) = client.run(os.getpid).values()
        (unused,) = client.run(unused_memory).values()
        worker = psutil.Process(pid)
        idle, peaks, decoded, done = worker.memory_info().rss - unused, [0], [], threading.Event()

        def watch() -> None:
            while not done.is_set():
                peaks[-1] = max(peaks[-1], worker.memory_info().rss)
                time.sleep(0.002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(PARTITIONS):
                peaks.append(0)
                decoded.append(read(number))
        finally:
            done.set()
            watcher.join()
    return Memory(idle, peaks[1:], max(decoded))


def data_held(dask_worker) -> int:
    return len(dask_worker.data)


def unused_memory() -> int:
    return pixel_memory.unused


def test_a_partition_costs_little_more_than_its_pixels(memory):
    assert max(memory.peaks) - memory.idle <= 1.25 * memory.decoded + SLACK


def test_memory_does_not_grow_from_partition_to_partition(memory):
    # DALI's threads keep the most that they have needed for one image, which levels off. Anything
    # that is kept of each partition would come to a quarter of one in these fifteen.
    early, late = median(memory.peaks[3:8]), median(memory.peaks[-5:])
    assert late <= early + memory.decoded / 4
