"""Crops by box, a row each: cut in the partition, beside `explode` of pixels and of references.

    python benchmarks/crops.py

Writes 40 synthetic photographs of 1500 x 1000 with 20 boxes each. Each way is a process of its own,
in turn: seconds of the processor, and the most memory of the process.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time

import dask
import pandas as pd

import dask_image_ingest as dii

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

PHOTOGRAPHS, BOXES, EDGE, ROUNDS = 40, 20, 200, 3


def main() -> None:
    if len(sys.argv) > 1:
        return run(*sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        for _ in range(ROUNDS):
            for way in WAYS:
                subprocess.run([sys.executable, __file__, way, path], check=True)
    return None


def run(way: str, path: str) -> None:
    start = process_time()
    rows = len(WAYS[way](path).compute(scheduler="synchronous"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{way}: {rows} rows, {process_time() - start:.1f} s, {peak:.2f} GB", flush=True)


def write(folder: Path) -> str:
    from synthetic import encode, photograph, write_shard

    rng = random.Random(0)
    files = [encode(photograph(1000, 1500, seed)) for seed in range(4)]
    members = {}
    for number in range(PHOTOGRAPHS):
        corners = [(rng.randrange(1300), rng.randrange(800)) for _ in range(BOXES)]
        boxes = [[x, y, x + EDGE, y + EDGE] for x, y in corners]
        members[f"{number:03d}.jpg"] = files[number % len(files)]
        members[f"{number:03d}.json"] = json.dumps({"boxes": boxes}).encode()
    return write_shard(folder / "boxed.tar", members)


def read(path: str, decode: bool = True):
    fields = {"boxes": "list<list<int32>>"}
    ddf = dii.read_webdataset_images(path, backend="pandas", json_fields=fields, decode=decode)
    return ddf[["__key__", "json.boxes", "image"]]


def cut(frame):
    crops = [
        image[y0:y1, x0:x1]
        for image, boxes in zip(frame.images.arrays(), frame["json.boxes"], strict=True)
        for x0, y0, x1, y1 in boxes
    ]
    rows = frame.drop(columns="image").explode("json.boxes")
    return rows.assign(crop=pd.array(crops, dtype="image"))


def crop(images, boxes):
    return [image[y0:y1, x0:x1] for image, (x0, y0, x1, y1) in zip(images, boxes, strict=True)]


def in_partitions(path: str):
    ddf = read(path)
    return ddf.map_partitions(cut, meta=cut(ddf._meta))


def exploded(path: str):
    return mapped(read(path).explode("json.boxes"))


def exploded_references(path: str):
    return mapped(dii.decode_images(read(path, decode=False).explode("json.boxes")))


def mapped(rows):
    return rows.images.map_batches(crop, {"crop": "image"}, inputs=["image", "json.boxes"])


WAYS = {
    "decode alone": read,
    "cut in the partition": in_partitions,
    "explode of pixels": exploded,
    "explode of references": exploded_references,
}

if __name__ == "__main__":
    with dask.config.set(scheduler="synchronous"):
        main()
