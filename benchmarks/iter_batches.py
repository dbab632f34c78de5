"""``iter_batches`` beside the persisted read: what it costs to have the images batch by batch.

    python benchmarks/iter_batches.py [FOLDER OF SHARDS]

Without a folder, shards of synthetic photographs are written first. Each way reads all shards once
in turn, several times; the medians and their ratio are printed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep

import dask
from distributed import default_client, wait

import dask_image_ingest as dii

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ROUNDS = 3
BATCH = 64


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shards = sys.argv[1] if len(sys.argv) > 1 else write(folder)
        for options in ({}, {"size": 224}):
            with dask.config.set(scheduler="threads"):
                compare("no cluster", shards, options)
            with dii.start_cluster(dashboard_address=None):
                compare("cluster", shards, options)


def write(folder: str) -> str:
    from synthetic import write_shards

    write_shards(Path(folder), 8, 96, size=(375, 500))
    return folder


def compare(where: str, shards: str, options: dict) -> None:
    ddf = dii.read_webdataset_images(shards, backend="pandas", **options)
    ways = {"persist": persist, "iter_batches": iterate, "shuffled": shuffled}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    images = 0
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            settle()
            start = perf_counter()
            images = way(ddf)
            seconds[name].append(perf_counter() - start)
    speed = {n: images / statistics.median(s[1:]) for n, s in seconds.items()}
    told = ", ".join(f"{name} {value:,.0f} images/s" for name, value in speed.items())
    print(
        f"{where}, {options or 'full size'}: {told}; "
        f"ratio {speed['iter_batches'] / speed['persist']:.2f}, "
        f"shuffled {speed['shuffled'] / speed['persist']:.2f}",
        flush=True,
    )


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


def iterate(ddf, shuffle: int | None = None) -> int:
    batches = ddf.images.iter_batches(BATCH, columns=["__key__"], shuffle=shuffle)
    return sum(len(batch["image"]) for batch in batches)


def shuffled(ddf) -> int:
    return iterate(ddf, shuffle=0)


if __name__ == "__main__":
    main()
