"""How long a finished checkpoint of many partitions takes to open.

    python benchmarks/checkpoint.py [--partitions 10000] [--folder /tmp/checkpoint]

Makes that many shards of four small images and their checkpoint, unless they are there, and opens
it five times: with the boundaries that are stored, and as a machine with less memory would. One
line of JSON each; seconds of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import dask_image_ingest as dii


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partitions", type=int, default=10_000, help="shards to make (10000)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/checkpoint"))
    args = parser.parse_args()
    shards = args.folder / f"shards-{args.partitions}"
    if not shards.exists():
        write_shards(shards, args.partitions)
    out = args.folder / f"stored-{args.partitions}"
    dii.checkpoint(frame(shards), out)
    for _ in range(5):
        # 8 x 8 pixels each: a partition that may hold 300 bytes holds one image.
        for partition_size in (None, 300):
            print(json.dumps(opened(shards, out, partition_size)), flush=True)


def frame(shards: Path, partition_size: int | None = None):
    ddf = dii.read_webdataset_images(
        shards, backend="pandas", size=8, partition_size=partition_size
    )
    return ddf.images.map_batches(vectors, outputs={"vector": "list<float32>"})


def vectors(images: np.ndarray) -> np.ndarray:
    return np.asarray(images).mean((1, 2), dtype="float32")


def opened(shards: Path, out: Path, partition_size: int | None) -> dict[str, float]:
    wanted = frame(shards, partition_size)
    began, busy = time.perf_counter(), time.process_time()
    stored = dii.checkpoint(wanted, out)
    rows = len(stored)
    return {
        "partitions of the frame": wanted.npartitions,
        "stored": stored.npartitions,
        "rows": rows,
        "seconds": round(time.perf_counter() - began, 2),
        "processor": round(time.process_time() - busy, 2),
    }


def write_shards(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    image, shard = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (64, 48), (9, 8, 7)).save(image, "JPEG")
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = image.tell()
            tar.addfile(member, io.BytesIO(image.getvalue()))
    for number in range(count):
        (folder / f"{number:06d}.tar").write_bytes(shard.getvalue())


if __name__ == "__main__":
    main()
