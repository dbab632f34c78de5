"""What is not decoded costs next to nothing: questions about metadata, against the full read.

    python benchmarks/laziness.py --shards train-000000.tar train-000001.tar

The shards are enlarged by repetition, under new keys, to at least --images images.
"""

import argparse
import platform
import statistics
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import dask
import psutil
from _shards import make_shards

import dask_image_ingest as dii


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="*", default=(), help="default: photographs made here")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="threads"):
        shards = make_shards(Path(folder), args.images, per_shard=500, sources=args.shards)
        ddf = dii.read_webdataset_images(shards, backend="pandas")
        report(ddf, args.rounds)


def report(ddf, rounds: int) -> None:
    """Time each question ``rounds`` times, in turn, and print its ratio to the full read."""
    widths = ddf["width"].compute()
    widest = int(widths.quantile(0.97))
    largest = int((ddf["height"] * ddf["width"]).compute().quantile(0.97))
    questions = {
        "full read": lambda: ddf.compute(),
        "height and width": lambda: ddf[["height", "width"]].compute(),
        "len": lambda: len(ddf),
        "filter: cls < 12": lambda: ddf[ddf["cls"] < 12].compute(),
        f"filter: width > {widest}": lambda: ddf[ddf["width"] > widest].compute(),
        f"filter: computed area > {largest:,}": lambda: ddf[
            ddf["height"] * ddf["width"] > largest
        ].compute(),
        "captions": lambda: ddf["txt"].compute(),
        "head(5)": lambda: ddf.head(5),
        "one partition of all": lambda: ddf.partitions[0].compute(),
    }
    seconds: dict[str, list[float]] = {question: [] for question in questions}
    for round_ in range(rounds + 1):
        for question, ask in questions.items():
            took = timed(ask)
            if round_:  # the first round warms up
                seconds[question].append(took)
    kept = float((ddf["cls"].compute() < 12).mean())
    wide = float((widths > widest).mean())
    packages = ("dask", "pandas", "pyarrow", "nvidia-dali-cuda120")
    print(
        f"{psutil.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in packages)
    )
    print(
        f"{len(widths):,} images in {ddf.npartitions} shards, threaded scheduler; the filters keep "
        f"{kept:.1%} and {wide:.1%}, the largest; median of {rounds} rounds\n"
    )
    whole = statistics.median(seconds["full read"])
    print(f"{'question':36} {'× faster':>9} {'seconds':>9}   fastest to slowest")
    for question, took in seconds.items():
        median = statistics.median(took)
        spread = f"{min(took):.4f} to {max(took):.4f}"
        print(f"{question:36} {whole / median:9.1f} {median:9.4f}   {spread}")


def timed(ask: Callable[[], object]) -> float:
    start = perf_counter()
    ask()
    return perf_counter() - start


if __name__ == "__main__":
    main()
