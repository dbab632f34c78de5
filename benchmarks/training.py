"""The job of training: batches of 64 at 224 pixels with labels, beside the peers at their best.

    python benchmarks/training.py [--quick] [--shards FOLDER] [--jobs NAME ...] [--ways NAME ...]

Three collections: ``original`` are the shards of FOLDER, whose samples need members ``jpg`` and
``cls``, or 1,600 photographs of ImageNet's size made here; ``prepared`` are the same with a shorter
edge of 256 pixels and quality 90; ``large`` are an eighth as many of 3 megapixels.

Five jobs: ``resize``; ``crop``, a random resized crop and a flip; ``floats``, the same as
normalised float32 with channels first; and of the large ones ``resize-scaled`` and ``crop-scaled``,
where JPEGs are decoded at a reduced scale (``scaled_decode=True``; simplejpeg's ``min_height`` and
``fastdct``; Pillow's ``draft``), which gives other pixels.

Each way runs alone, in a process of its own with two decoding threads or workers: an epoch to warm
up, then ``--epochs``, of which the median counts. Printed are images a second, milliseconds of the
cores an image, workers included, E, at what part of an epoch its first batch came, and the peak of
memory in MiB (PSS of all processes in one epoch more, since reading it costs time). E is the time
of the cores that libjpeg-turbo takes to decode the same files from memory into one buffer of each
thread, divided by that of the way: nothing else is 1.

A way whose package is not installed, or that cannot do a job, is left out, and named. All of them:
``pip install torch torchvision litdata spdl datago opencv-python-headless`` beside the extra
``bench``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import _checkout  # noqa: F401
import psutil
from _shards import Sample, as_jpeg, from_tars, make_shards, write_shards
from _training_peers import BATCH, MEAN, PEERS, SIZE, STD, WORKERS, Epochs, Job, Way, bound
from PIL import Image
from scaled import photographs

JOBS = {
    "resize": Job(),
    "crop": Job(crop=True),
    "floats": Job(crop=True, floats=True),
    "resize-scaled": Job(scaled=True),
    "crop-scaled": Job(crop=True, scaled=True),
}
COLLECTIONS = {
    "original": ("resize", "crop", "floats"),
    "prepared": ("resize", "crop", "floats"),
    "large": ("resize-scaled", "crop-scaled"),
}
BOUND = "the bound: libjpeg-turbo, from memory into one buffer"
# Shorter edge in pixels, and quality, of prepared shards.
EDGE, QUALITY = 256, 90
# Width and height of large photographs, how many differ, and how many fewer there are of them.
LARGE, DISTINCT, FEWER = (2010, 1507), 28, 8
SHARDS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few images, one epoch: does it run?")
    parser.add_argument("--shards", type=Path, help="a folder of tars; made here if not given")
    parser.add_argument("--images", type=int, default=1600, help="made here (default 1600)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--collections", nargs="+", default=[*COLLECTIONS], choices=[*COLLECTIONS])
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--one", nargs=2, metavar=("WAY", "JOB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, job = options.one
        print(json.dumps(measure(WAYS[way], JOBS[job], options.shards, options.epochs)))
        return
    if options.quick:
        options.images, options.epochs = 256, 1
    with tempfile.TemporaryDirectory() as folder:
        for collection in options.collections:
            shards = shards_of(collection, Path(folder), options)
            for job in sorted({*options.jobs} & {*COLLECTIONS[collection]}, key=[*JOBS].index):
                compare(f"{collection}, {job}", shards, job, options)


def shards_of(collection: str, folder: Path, options: argparse.Namespace) -> Path:
    """Folder with the shards of a collection, which are made if need be."""
    if collection == "large":
        images = options.images // FEWER
        samples = islice(cycle(photographs(LARGE, DISTINCT)), images)
        write_shards(folder / collection, samples, max(images // SHARDS, 1))
        return folder / collection
    originals = options.shards
    if originals is None:
        originals = folder / "original"
        if not originals.exists():
            make_shards(originals, options.images, options.images // SHARDS)
    if collection == "original":
        return originals
    paths = sorted(originals.glob("*.tar"))
    write_shards(folder / collection, map(prepared, from_tars(paths)), 100)
    return folder / collection


def prepared(sample: Sample) -> Sample:
    """A sample whose photograph has the size that training needs."""
    with Image.open(io.BytesIO(sample.jpeg)) as image:
        scale = min(1, EDGE / min(image.size))
        width, height = (round(edge * scale) for edge in image.size)
        smaller = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    return sample._replace(jpeg=as_jpeg(smaller, QUALITY))


def compare(title: str, shards: Path, job: str, options: argparse.Namespace) -> None:
    """Print the table of a job."""
    print(f"\n| {title} | images/s | core ms/image | E | first batch | MiB |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    least = None
    # The bound first: the others are told in parts of it.
    for way in dict.fromkeys([BOUND, *options.ways]):
        command = [sys.executable, __file__, "--shards", shards, "--epochs", str(options.epochs)]
        command += ["--one", way, job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no error"]
            print(f"| {way} | left out: {reason[-1][:90]} | | | | |", flush=True)
            continue
        speed, cost, first, peak = json.loads(done.stdout.splitlines()[-1])
        if way == BOUND:
            least = cost
        share = "" if least is None else f"{least / cost:.2f}"
        cells = f"{speed:,.0f} | {cost:.2f} | {share} | {first:.0%} | {peak:,.0f}"
        print(f"| {way} | {cells} |", flush=True)


def measure(way: Way, job: Job, shards: Path, epochs: int) -> tuple[float, float, float, float]:
    """Images a second, ms of the cores an image, when the first batch came, peak of memory."""
    epoch = way(sorted(str(path) for path in shards.glob("*.tar")), job)
    run(epoch, job)
    passes = []
    for _ in range(epochs):
        start, used = perf_counter(), processor()
        images, first = run(epoch, job)
        took = perf_counter() - start
        passes.append((images / took, (processor() - used) / images * 1e3, first / took))
    speed, cost, first = map(statistics.median, zip(*passes, strict=True))
    return speed, cost, first, peak_memory(lambda: run(epoch, job))


def run(epoch: Epochs, job: Job) -> tuple[int, float]:
    """Number of images, and seconds until the first batch."""
    images, start, first = 0, perf_counter(), 0.0
    for pixels, labels in epoch():
        first = first or perf_counter() - start
        shape = (3, SIZE, SIZE) if job.floats else (SIZE, SIZE, 3)
        assert tuple(pixels.shape[1:]) == shape, pixels.shape
        assert len(pixels) == len(labels)
        images += len(pixels)
    return images, first


def processor() -> float:
    """Seconds of this process and of all processes that it started, those that ended included."""
    own = psutil.Process()
    times = own.cpu_times()
    spent = times.user + times.system + times.children_user + times.children_system
    for child in own.children(recursive=True):
        times = child.cpu_times()
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


def peak_memory(job: Callable[[], object]) -> float:
    """Most MiB of all processes together, shared memory counted once."""
    peaks: list[float] = []
    done = threading.Event()

    def watch() -> None:
        own, ended = psutil.Process(), False
        while not ended:
            ended = done.wait(0.1)
            total = 0
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it has ended
                    total += process.memory_full_info().pss
            peaks.append(total / 2**20)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        job()
    finally:
        done.set()
        thread.join()
    return max(peaks)


# Ours


def frame_of(paths: list[str], job: Job) -> Any:
    import dask_image_ingest as dii

    return dii.read_webdataset_images(
        paths,
        backend="pandas",
        size=SIZE,
        augment="random_resized_crop" if job.crop else None,
        scaled_decode=job.scaled,
    )


def arguments(job: Job) -> dict[str, Any]:
    normalize = (MEAN, STD) if job.floats else None
    return {"columns": ["cls"], "shuffle": 0, "normalize": normalize}


def ours(paths: list[str], job: Job) -> Epochs:
    import dask

    dask.config.set(scheduler="threads")
    return ours_by_iter_batches(paths, job)


def ours_by_iter_batches(paths: list[str], job: Job) -> Epochs:
    frame, numbers = frame_of(paths, job), iter(range(1_000))

    def epoch() -> Iterator[tuple[Any, Any]]:
        batches = frame.images.iter_batches(BATCH, epoch=next(numbers), **arguments(job))
        return ((batch["image"], batch["cls"]) for batch in batches)

    return epoch


def ours_on_a_cluster(paths: list[str], job: Job) -> Epochs:
    import dask_image_ingest as dii

    dii.start_cluster(dashboard_address=None)
    return ours_by_iter_batches(paths, job)


def ours_by_dataloader(workers: int) -> Way:
    def way(paths: list[str], job: Job) -> Epochs:
        loader = frame_of(paths, job).images.dataloader(
            BATCH, num_workers=workers, persistent_workers=workers > 0, **arguments(job)
        )
        numbers = iter(range(1_000))

        def epoch() -> Iterator[tuple[Any, Any]]:
            loader.dataset.set_epoch(next(numbers))
            return ((batch["image"], batch["cls"]) for batch in loader)

        return epoch

    return way


WAYS: dict[str, Way] = {
    BOUND: bound,
    "ours, iter_batches, no cluster": ours,
    "ours, iter_batches on start_cluster()": ours_on_a_cluster,
    "ours, dataloader, threads": ours_by_dataloader(0),
    "ours, dataloader, 2 workers": ours_by_dataloader(WORKERS),
    **PEERS,
}


if __name__ == "__main__":
    main()
