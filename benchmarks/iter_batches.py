"""``iter_batches`` beside the persisted read: what it costs to have the images batch by batch.

    python benchmarks/iter_batches.py [FOLDER OF SHARDS]
    python benchmarks/iter_batches.py large

Without a folder, shards of synthetic photographs are written first. Each way reads all shards once
in turn, several times; the medians and their ratio are printed. ``large`` shuffles photographs of
2000 × 1500, in a process of its own with a cluster and without: from how many shards the first
batch comes, when, and the most memory of the process that has the batches.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time, sleep

import dask
from distributed import default_client, wait

import dask_image_ingest as dii

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

ROUNDS = 3
BATCH = 64


def main() -> None:
    if sys.argv[1:2] == ["large"]:
        return large(*sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        shards = sys.argv[1] if len(sys.argv) > 1 else write(folder, 8, 96, (375, 500))
        for options in ({}, {"size": 224}):
            with dask.config.set(scheduler="threads"):
                compare("no cluster", shards, options)
            with dii.start_cluster(dashboard_address=None):
                compare("cluster", shards, options)
    return None


def write(folder: str, shards: int, images: int, size: tuple[int, int]) -> str:
    from synthetic import write_shards

    write_shards(Path(folder), shards, images, size=size)
    return folder


def large(shards: str = "", where: str = "") -> None:
    if not shards:
        with tempfile.TemporaryDirectory() as folder:
            write(folder, 8, 64, (1500, 2000))
            for where in ("threads", "cluster"):
                subprocess.run([sys.executable, __file__, "large", folder, where], check=True)
        return
    if where == "cluster":
        with dii.start_cluster(dashboard_address=None):
            first_batch(shards, where)
    else:
        with dask.config.set(scheduler=where):
            first_batch(shards, where)


def first_batch(shards: str, where: str) -> None:
    ddf = dii.read_webdataset_images(shards, backend="pandas")
    start, spent = perf_counter(), process_time()
    batches = ddf.images.iter_batches(BATCH, columns=["__url__"], shuffle=1)
    mixed = len(set(next(batches)["__url__"]))
    first = perf_counter() - start
    images = BATCH + sum(len(batch["image"]) for batch in batches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{where}: {mixed} shards in the first batch, after {first:.1f} s; {images} images in "
        f"{perf_counter() - start:.1f} s, {process_time() - spent:.1f} s of this processor; "
        f"{peak:.1f} GB",
        flush=True,
    )


def compare(where: str, shards: str, options: dict) -> None:
    ddf = dii.read_webdataset_images(shards, backend="pandas", **options)
    ways = {"persist": persist, "iter_batches": iterate, "shuffled": shuffled}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    images = 0
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            settle()
            start, used = perf_counter(), processor()
            images = way(ddf)
            seconds[name].append(perf_counter() - start)
            spent[name].append(processor() - used)
    speed = {n: images / statistics.median(s[1:]) for n, s in seconds.items()}
    told = ", ".join(
        f"{name} {value:,.0f} images/s ({statistics.median(spent[name][1:]) / images * 1e3:.2f} ms "
        "of a processor each)"
        for name, value in speed.items()
    )
    ratios = ", ".join(f"{name} {speed[name] / speed['persist']:.2f}" for name in [*ways][1:])
    print(f"{where}, {options or 'full size'}: {told}; of persist {ratios}", flush=True)


def processor() -> float:
    """Seconds that this process and the workers have used."""
    if dask.config.get("scheduler", None) is not None:
        return process_time()
    return process_time() + sum(default_client().run(process_time).values())


def persist(ddf) -> int:
    frame = ddf[["__key__", "image"]].persist()
    if dask.config.get("scheduler", None) is None:
        wait(frame)
    return len(frame)


def settle() -> None:
    """Wait until the workers have let go of the results, or the next way would find them."""
    if dask.config.get("scheduler", None) is None:
        client = default_client()
        while client.sync(client.scheduler.who_has):
            sleep(0.01)


def iterate(ddf, **options) -> int:
    batches = ddf.images.iter_batches(BATCH, columns=["__key__"], **options)
    return sum(len(batch["image"]) for batch in batches)


def shuffled(ddf) -> int:
    return iterate(ddf, shuffle=0)


if __name__ == "__main__":
    main()
