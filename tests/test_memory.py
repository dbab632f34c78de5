"""What a worker's memory holds while it reads one partition after the other."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from photo_shards import make_photos, write_photo_shards

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

PARTITIONS = 20

# In a process of its own, so that the peak is that of the partitions: 79 MB each when decoded.
READER = """
import json, sys, threading, time
import psutil
from dask_image_ingest import read_webdataset_images

process = psutil.Process()
ddf = read_webdataset_images(sys.argv[1:], backend="pandas", size=1024, partition_size=None)
ddf.partitions[0].compute(scheduler="synchronous")  # imports and DALI's threads are no pixels

peaks, decoded, done = [0], [], threading.Event()

def watch():
    while not done.is_set():
        peaks[-1] = max(peaks[-1], process.memory_info().rss)
        time.sleep(0.002)

idle = process.memory_info().rss - sys.modules[
    "dask_image_ingest.frames.pixel_memory"
].pixel_memory.unused
threading.Thread(target=watch).start()
for part in range(ddf.npartitions):
    peaks.append(0)
    frame = ddf.partitions[part].compute(scheduler="synchronous")
    decoded.append(int(frame.image.array.nbytes))
    del frame
done.set()
print(json.dumps({"idle": idle, "peaks": peaks[1:], "decoded": max(decoded)}))
"""


@pytest.fixture(scope="module")
def memory(tmp_path_factory) -> dict:
    """Resident bytes of a process that reads 20 partitions: idle, and the peak of each."""
    folder: Path = tmp_path_factory.mktemp("memory")
    shards = write_photo_shards(make_photos(PARTITIONS * 25), folder, 25)
    assert len(shards) == PARTITIONS
    output = subprocess.run(
        [sys.executable, "-c", READER, *map(str, shards)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    return json.loads(output)


def test_a_partition_costs_little_more_than_its_pixels(memory):
    most = 1.25 * memory["decoded"] + 200e6
    assert max(memory["peaks"]) - memory["idle"] <= most


def test_memory_does_not_grow_from_partition_to_partition(memory):
    # DALI's threads keep the most that they have needed for one image, which levels off. Anything
    # that is kept of each partition would come to a quarter of one in these fifteen.
    early, late = median(memory["peaks"][3:8]), median(memory["peaks"][-5:])
    assert late <= early + memory["decoded"] / 4
