"""Iterates over 20 partitions and prints how much memory that took at its peak, in partitions.

Run as a program, since the peak of a process is known for the whole process only. The partitions
are made without a decoder, whose own buffers are no part of the measure.
"""

import json
import sys
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pyarrow as pa

import dask_image_ingest  # noqa: F401  registers .images
from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import get_backend

PARTITIONS, IMAGES, EDGE = 20, 100, 500


def partition(number, images=IMAGES):
    shapes = np.full((images, 3), (EDGE, EDGE, 3), np.int32)
    pixels = Pixels(np.full(images * EDGE * EDGE * 3, number, np.uint8), shapes, [None] * images)
    table = pa.table({"number": np.arange(images) + number * images})
    return get_backend("pandas").frame(table, np.arange(images), pixels)


def main(shuffle):
    ddf = dd.from_map(partition, range(PARTITIONS), meta=partition(0, images=1).iloc[:0])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    numbers = []
    for batch in ddf.images.iter_batches(7, shuffle=shuffle):
        assert (batch["image"][:, 0, 0, 0] == batch["number"] // IMAGES).all()
        numbers += batch["number"].tolist()
    assert sorted(numbers) == list(range(PARTITIONS * IMAGES))
    peak = (status("VmHWM") - before) / (IMAGES * EDGE * EDGE * 3)
    print(json.dumps({"peak": peak}))


def status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    with dask.config.set(scheduler="threads"):
        main(*map(int, sys.argv[1:])) if sys.argv[1:] else main(None)
