"""The same photographs from tars, from a folder of files, and from parquet as Hugging Face has it.

    python benchmarks/sources.py [--photos 2000] [--rounds 3] [--shards train/*.tar]

Each way decodes every image in one process, with all cores, and keeps no more than a partition. The
ways take turns, after one round to warm up. Printed are images per second, the time of the cores
that this process took for an image, which another's work on the machine changes less, and both as a
share of what the tars give in the same run. Pillow reading the files one by one is the peer that is
always there. All files are in the page cache: the cores are the limit, not the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import _checkout  # noqa: F401
import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from _shards import make_shards
from PIL import Image

import dask_image_ingest as dii

PER_SHARD = 250
PER_ROW_GROUP = 100  # as `datasets` writes images
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SIZES = {"full size": None, "size=224": 224}

# Reads all images once, at a size; gives how many there were.
Way = Callable[[int | None], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", nargs="*", default=(), help="photographs of one's own")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "The inplace keyword")  # dask's own call of pandas 3.1
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="synchronous"):
        ways = prepare(Path(folder), given.photos, given.shards)
        for name, size in SIZES.items():
            compare(name, ways, size, given.photos, given.rounds)


def prepare(folder: Path, count: int, sources: Iterable[str]) -> dict[str, Way]:
    """Write the three collections of the same bytes; say how each is read."""
    shards = make_shards(folder / "tars", count, PER_SHARD, list(sources))
    photos = {name: data for shard in shards for name, data in members(shard)}
    for number, (name, data) in enumerate(photos.items()):
        path = folder / "files" / f"class-{number % 10}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    values = [{"bytes": data, "path": name} for name, data in photos.items()]
    table = pa.table({"image": pa.array(values, STRUCT), "label": np.arange(len(photos)) % 10})
    pq.write_table(table, folder / "train-00000.parquet", row_group_size=PER_ROW_GROUP)

    def tars(size: int | None) -> int:
        ddf = dii.read_webdataset_images(folder / "tars", backend="pandas", size=size)
        return decode_all(ddf[["__key__", "image"]])

    def files(size: int | None) -> int:
        ddf = dii.read_images(folder / "files", backend="pandas", size=size, label="folder")
        return decode_all(ddf[["__key__", "label", "image"]])

    def parquet(size: int | None) -> int:
        path = folder / "train-00000.parquet"
        ddf = dii.read_parquet_images(path, backend="pandas", size=size)
        return decode_all(ddf[["label", "image"]])

    def pillow(size: int | None) -> int:
        paths = sorted((folder / "files").rglob("*.jpg"))
        return sum(with_pillow(path, size) is not None for path in paths)

    return {
        "tars, read_webdataset_images": tars,
        "folder, read_images": files,
        "parquet, read_parquet_images": parquet,
        "folder, Pillow in one thread": pillow,
    }


def members(shard: Path) -> Iterable[tuple[str, bytes]]:
    with tarfile.open(shard) as tar:
        for member in tar:
            if member.name.endswith(".jpg"):
                yield member.name, tar.extractfile(member).read()


def decode_all(ddf) -> int:
    counts = ddf.map_partitions(count_images, meta=pd.Series([], dtype="int64"))
    return int(counts.compute().sum())


def count_images(frame: pd.DataFrame) -> pd.Series:
    return pd.Series([frame.image.count()])


def with_pillow(path: Path, size: int | None) -> np.ndarray:
    with Image.open(path) as picture:
        image = picture.convert("RGB")
        if size is not None:
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image)


def compare(title: str, ways: dict[str, Way], size: int | None, photos: int, rounds: int) -> None:
    clock: dict[str, list[float]] = {name: [] for name in ways}
    cores: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in ways if turn % 2 == 0 else reversed(ways):
            busy, start = time.process_time(), time.perf_counter()
            found = ways[name](size)
            clock[name].append(time.perf_counter() - start)
            cores[name].append(time.process_time() - busy)
            if found != photos:
                raise SystemExit(f"{name}: {found} of {photos} images")
    seconds = {name: statistics.median(found[1:]) for name, found in clock.items()}
    work = {name: statistics.median(found[1:]) for name, found in cores.items()}
    first = next(iter(ways))
    print(f"\n{title}: {photos:,} photographs, median of {rounds}\n")
    print("| | images/s | of the tars | core ms/image | of the tars |\n|---|---:|---:|---:|---:|")
    for name in ways:
        print(
            f"| {name} | {photos / seconds[name]:,.0f} | {seconds[first] / seconds[name]:.2f} "
            f"| {1000 * work[name] / photos:.2f} | {work[name] / work[first]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
