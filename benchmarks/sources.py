"""The same photographs from tars, from a folder of files, and from parquet as Hugging Face has it.

    python benchmarks/sources.py [--photos 2000] [--rounds 3] [--shards train/*.tar]

Each way decodes every image in one process, with all cores, and keeps no more than a partition. The
ways take turns, after one round to warm up. Printed are images per second, the time of the cores
that this process took for an image, which another's work on the machine changes less, and both as a
share of what the tars give in the same run. Peers read the same folder and the same parquet: Pillow
always, Hugging Face datasets, Ray Data and Daft where they are installed. Ray's images are decoded
by processes of its own, whose time is not known here. All files are in the page cache: the cores
are the limit, not the disk.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
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
RAY = "folder, Ray Data `read_images`"


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

    ways = {
        "tars, read_webdataset_images": tars,
        "folder, read_images": files,
        "parquet, read_parquet_images": parquet,
        "folder, Pillow in one thread": pillow,
    }
    return ways | peers(folder / "files", folder / "train-00000.parquet")


def peers(files: Path, table: Path) -> dict[str, Way]:
    """The libraries that are installed, each by the call that its documentation has for images."""
    ways: dict[str, Way] = {}
    if find_spec("datasets"):
        ways["folder, datasets `imagefolder`"] = lambda size: with_datasets(
            "imagefolder", size, data_dir=str(files)
        )
        ways["parquet, datasets, streaming"] = lambda size: with_datasets(
            "parquet", size, data_files=str(table), streaming=True
        )
    if find_spec("ray"):
        ways[RAY] = lambda size: with_ray(files, size)
    if find_spec("daft"):
        import daft

        daft.set_runner_native()  # where Ray runs, it would take that
        ways["folder, Daft `from_glob_path`"] = lambda size: with_daft(files, size)
        ways["parquet, Daft `read_parquet`"] = lambda size: with_daft(table, size)
    return ways


def with_datasets(kind: str, size: int | None, **given: object) -> int:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(kind, split="train", **given)
    rows = rows.cast_column("image", datasets.Image(mode="RGB"))
    return sum(pixels(row["image"], size) is not None for row in rows)


def with_ray(files: Path, size: int | None) -> int:
    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level=logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    shape = None if size is None else (size, size)
    rows = ray.data.read_images(str(files), size=shape, mode="RGB")
    return sum(len(batch["image"]) for batch in rows.iter_batches(batch_size=64))


def with_daft(source: Path, size: int | None) -> int:
    import daft

    if source.is_dir():
        encoded = daft.col("path").download()
        frame = daft.from_glob_path(f"{source}/**/*.jpg").with_column("image", encoded)
    else:
        encoded = daft.col("image").get("bytes")
        frame = daft.read_parquet(str(source)).with_column("image", encoded)
    image = daft.col("image").decode_image(mode="RGB")
    image = image if size is None else image.resize(size, size)
    parts = frame.select(image.alias("image")).iter_partitions()
    return sum(len(part) for part in parts)


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
        return pixels(picture.convert("RGB"), size)


def pixels(image: Image.Image, size: int | None) -> np.ndarray:
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
        spent = f"{1000 * work[name] / photos:.2f} | {work[name] / work[first]:.2f}"
        print(
            f"| {name} | {photos / seconds[name]:,.0f} | {seconds[first] / seconds[name]:.2f} "
            f"| {'– | –' if name == RAY else spent} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
