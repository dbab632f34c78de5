"""The job of training: batches of 64 at 224 pixels with labels, beside the peers at their best.

    python benchmarks/training.py --shards FOLDER [--epochs 3] [--ways NAME ...]

Three jobs: ``resize``; ``crop``, a random resized crop and a flip; ``floats``, the same as
normalised float32 with channels first. Each way runs alone, in a process of its own with two
decoding threads or workers: an epoch to warm up, then ``--epochs``, of which the median counts.
Printed are images a second, milliseconds of the cores an image, workers included, at what part of
an epoch its first batch came, and the peak of memory in MiB (PSS of all processes in one epoch
more, since reading it costs time). The shards need members ``jpg`` and ``cls``. A way whose
package is not installed is left out, and named.

Every way gives whole batches from its workers: a uint8 array (64, 224, 224, 3), or for ``floats``
float32 (64, 3, 224, 224), and 64 labels. What is random is drawn anew for each image.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import json
import math
import random
import statistics
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil

BATCH, SIZE, WORKERS = 64, 224, 2
JOBS = ("resize", "crop", "floats")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Epochs = Callable[[], Iterable[tuple[Any, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=JOBS)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--one", nargs=2, metavar=("WAY", "JOB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.shards, options.epochs)))
        return
    for job in options.jobs:
        print(f"\n{job}: images/s, ms of the cores an image, first batch at, peak MiB")
        for way in options.ways:
            command = [sys.executable, __file__, "--shards", options.shards]
            command += ["--epochs", str(options.epochs), "--one", way, job]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip().splitlines() or ["no error"]
                print(f"  {way:<58} left out: {reason[-1][:90]}", flush=True)
                continue
            speed, cores, first, peak = json.loads(done.stdout.splitlines()[-1])
            line = f"{speed:>7,.0f} {cores:>6.2f} {first:>5.0%} {peak:>6,.0f}"
            print(f"  {way:<58} {line}", flush=True)


def measure(way: str, job: str, shards: str, epochs: int) -> tuple[float, float, float, float]:
    paths = sorted(str(path) for path in Path(shards).glob("*.tar"))
    epoch = WAYS[way](paths, job)
    run(epoch, job)
    passes = []
    for _ in range(epochs):
        start, used = perf_counter(), processor()
        images, first = run(epoch, job)
        took = perf_counter() - start
        passes.append((images / took, (processor() - used) / images * 1e3, first / took))
    speed, cost, first = map(statistics.median, zip(*passes, strict=True))
    return speed, cost, first, peak_memory(lambda: run(epoch, job))


def run(epoch: Epochs, job: str) -> tuple[int, float]:
    """Number of images, and seconds until the first batch."""
    images, start, first = 0, perf_counter(), 0.0
    for pixels, labels in epoch():
        first = first or perf_counter() - start
        shape = (3, SIZE, SIZE) if job == "floats" else (SIZE, SIZE, 3)
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
    peaks, done = [0.0], threading.Event()

    def watch() -> None:
        own = psutil.Process()
        while not done.wait(0.1):
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


def frame_of(paths: list[str], job: str) -> Any:
    import dask_image_ingest as dii

    augment = None if job == "resize" else "random_resized_crop"
    return dii.read_webdataset_images(paths, backend="pandas", size=SIZE, augment=augment)


def arguments(job: str) -> dict[str, Any]:
    normalize = (MEAN, STD) if job == "floats" else None
    return {"columns": ["cls"], "shuffle": 0, "normalize": normalize}


def ours(paths: list[str], job: str) -> Epochs:
    import dask

    dask.config.set(scheduler="threads")
    return ours_by_iter_batches(paths, job)


def ours_by_iter_batches(paths: list[str], job: str) -> Epochs:
    frame, numbers = frame_of(paths, job), iter(range(1_000))

    def epoch() -> Iterator[tuple[Any, Any]]:
        batches = frame.images.iter_batches(BATCH, epoch=next(numbers), **arguments(job))
        return ((batch["image"], batch["cls"]) for batch in batches)

    return epoch


def ours_on_a_cluster(paths: list[str], job: str) -> Epochs:
    import dask_image_ingest as dii

    dii.start_cluster(dashboard_address=None)
    return ours_by_iter_batches(paths, job)


def ours_by_dataloader(workers: int) -> Callable[[list[str], str], Epochs]:
    def way(paths: list[str], job: str) -> Epochs:
        loader = frame_of(paths, job).images.dataloader(
            BATCH, num_workers=workers, persistent_workers=workers > 0, **arguments(job)
        )
        numbers = iter(range(1_000))

        def epoch() -> Iterator[tuple[Any, Any]]:
            loader.dataset.set_epoch(next(numbers))
            return ((batch["image"], batch["cls"]) for batch in loader)

        return epoch

    return way


# Peers


def region(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of torchvision's random resized crop."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    return 0, 0, height, width


class Turbo:
    """An encoded image to its pixels, by simplejpeg and OpenCV."""

    def __init__(self, job: str) -> None:
        self.job = job

    def __call__(self, encoded: bytes) -> np.ndarray:
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)
        pixels = simplejpeg.decode_jpeg(encoded)
        if self.job == "resize":
            return cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        top, left, height, width = region(*pixels.shape[:2])
        pixels = pixels[top : top + height, left : left + width]
        pixels = cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        return pixels[:, ::-1] if random.random() < 0.5 else pixels


class WithPillow:
    """An encoded image to its pixels, by Pillow."""

    def __init__(self, job: str) -> None:
        self.job = job

    def __call__(self, encoded: bytes) -> np.ndarray:
        from PIL import Image

        picture = Image.open(io.BytesIO(encoded)).convert("RGB")
        box = None
        if self.job != "resize":
            top, left, height, width = region(picture.height, picture.width)
            box = (left, top, left + width, top + height)
        picture = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if self.job != "resize" and random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(picture)


def collate(rows: list[tuple[np.ndarray, int]], job: str) -> tuple[Any, Any]:
    """Rows to a batch."""
    pixels = np.stack([pixels for pixels, _ in rows])
    labels = np.array([label for _, label in rows])
    if job == "floats":
        pixels = pixels.transpose(0, 3, 1, 2).astype(np.float32)
        mean, std = (np.array(part, np.float32).reshape(1, 3, 1, 1) for part in (MEAN, STD))
        pixels -= mean * 255
        pixels /= std * 255
    return pixels, labels


class Collate:
    """`collate` for a job, which workers can unpickle."""

    def __init__(self, job: str) -> None:
        self.job = job

    def __call__(self, rows: list[tuple[np.ndarray, int]]) -> tuple[Any, Any]:
        import torch

        pixels, labels = collate(rows, self.job)
        return torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels)


def webdataset_with(decode: Any) -> Callable[[list[str], str], Epochs]:
    def way(paths: list[str], job: str) -> Epochs:
        import torch
        import webdataset

        dataset = (
            webdataset.WebDataset(paths, shardshuffle=100, empty_check=False)
            .shuffle(1000)
            .to_tuple("jpg", "cls")
            .map_tuple(decode(job), int)
            .batched(BATCH, collation_fn=Collate(job))
        )
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True
        )
        return lambda: loader

    return way


def samples(paths: list[str]) -> Iterator[tuple[bytes, int]]:
    """Encoded image and label of each sample, of shards in random order."""
    for path in random.sample(paths, len(paths)):
        with tarfile.open(path) as tar:
            encoded = b""
            for member in tar:
                content = tar.extractfile(member)
                if content is None:
                    continue
                if member.name.endswith(".jpg"):
                    encoded = content.read()
                elif member.name.endswith(".cls"):
                    yield encoded, int(content.read())


def threads(paths: list[str], job: str) -> Epochs:
    """Tars read in turn, images decoded by two threads."""
    decode = Turbo(job)
    pool = ThreadPoolExecutor(WORKERS)

    def started() -> Iterator[list[Any]]:
        batch = []
        for encoded, label in samples(paths):
            batch.append((pool.submit(decode, encoded), label))
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def epoch() -> Iterator[tuple[Any, Any]]:
        queue: list[Any] = []
        for batch in started():
            queue.append(batch)
            if len(queue) > 2:
                yield collate([(f.result(), label) for f, label in queue.pop(0)], job)
        for batch in queue:
            yield collate([(f.result(), label) for f, label in batch], job)

    return epoch


def dali(paths: list[str], job: str) -> Epochs:
    """DALI's own reader of shards, as its manual shows it."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def build() -> tuple[Any, Any]:
        encoded, label = fn.readers.webdataset(
            paths=paths, ext=["jpg", "cls"], random_shuffle=True, initial_fill=1000, name="r"
        )
        if job == "resize":
            pixels = fn.resize(fn.decoders.image(encoded), size=(SIZE, SIZE))
            return pixels, label
        pixels = fn.decoders.image_random_crop(encoded, random_area=(0.08, 1.0))
        pixels = fn.resize(pixels, size=(SIZE, SIZE))
        flip = fn.random.coin_flip()
        if job == "crop":
            return fn.flip(pixels, horizontal=flip), label
        pixels = fn.crop_mirror_normalize(
            pixels,
            mirror=flip,
            mean=[255 * part for part in MEAN],
            std=[255 * part for part in STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return pixels, label

    pipeline = build()
    pipeline.build()
    images = pipeline.epoch_size("r")

    def epoch() -> Iterator[tuple[Any, Any]]:
        for first in range(0, images, BATCH):
            pixels, labels = pipeline.run()
            count = min(BATCH, images - first)
            numbers = [int(bytes(labels.at(row))) for row in range(count)]
            # A copy: the pipeline's memory has the next batch soon.
            yield np.array(pixels.as_array())[:count], np.array(numbers)

    return epoch


def spdl(paths: list[str], job: str) -> Epochs:
    """SPDL's pipeline of threads, with simplejpeg and OpenCV as its operations."""
    from spdl.pipeline import PipelineBuilder

    decode = Turbo(job)

    def decoded(sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
        return decode(sample[0]), sample[1]

    def epoch() -> Iterator[tuple[Any, Any]]:
        pipeline = (
            PipelineBuilder()
            .add_source(samples(paths))
            .pipe(decoded, concurrency=WORKERS)
            .aggregate(BATCH)
            .pipe(lambda rows: collate(rows, job))
            .add_sink(3)
            .build(num_threads=WORKERS + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def datago(paths: list[str], job: str) -> Epochs:
    """Its reader of shards, which takes them from a server only, and knows no random crop."""
    from datago import DatagoClient, initialize_logging

    if job != "resize":
        raise NotImplementedError("datago has no random resized crop")
    initialize_logging(log_level="error")
    folder, port = Path(paths[0]).parent, 8765
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    server = subprocess.Popen([*command, "-d", str(folder)], stderr=subprocess.DEVNULL)
    atexit.register(server.kill)
    names = ",".join(Path(path).stem for path in paths)
    square = {"crop_and_resize": True, "default_image_size": SIZE, "downsampling_ratio": 32}
    square |= {"min_aspect_ratio": 1.0, "max_aspect_ratio": 1.0}
    source = {"url": f"http://127.0.0.1:{port}/{{{names}}}.tar", "random_sampling": True}
    source |= {"concurrent_downloads": WORKERS, "rank": 0, "world_size": 1}
    options = {"source_type": "webdataset", "source_config": source, "image_config": square}
    options |= {"prefetch_buffer_size": 128, "samples_buffer_size": 64, "limit": 10**9}

    def epoch() -> Iterator[tuple[Any, Any]]:
        client, rows = DatagoClient(json.dumps(options)), []
        while (sample := client.get_sample()) is not None:
            pixels, label = sample.image.to_numpy_array(), int(json.loads(sample.attributes)["cls"])
            rows.append((np.broadcast_to(pixels, (SIZE, SIZE, 3)), label))  # grey has one channel
            if len(rows) == BATCH:
                yield collate(rows, job)
                rows = []
        if rows:
            yield collate(rows, job)
        client.stop()

    return epoch


def hugging_face(paths: list[str], job: str) -> Epochs:
    """Streaming, decoded in the workers of a DataLoader."""
    import datasets
    import torch

    shards = datasets.load_dataset(
        "webdataset", data_files={"train": paths}, split="train", streaming=True
    )
    shards = shards.cast_column("jpg", datasets.Image(decode=False)).shuffle(0, buffer_size=1000)
    loader = torch.utils.data.DataLoader(
        shards,
        batch_size=BATCH,
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=CollateSamples(job),
    )
    return lambda: loader


class CollateSamples(Collate):
    """Samples of Hugging Face to a batch."""

    def __call__(self, rows: list[Any]) -> tuple[Any, Any]:
        decode = Turbo(self.job)
        return super().__call__([(decode(row["jpg"]["bytes"]), int(row["cls"])) for row in rows])


def ray_data(paths: list[str], job: str) -> Epochs:
    """Ray Data's reader, decoded in tasks."""
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    decode = Turbo(job)

    def decoded(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = [decode(encoded) for encoded in rows["jpg"]]
        labels = [int(label) for label in rows["cls"]]
        batch = collate(list(zip(pixels, labels, strict=True)), job)
        return {"image": batch[0], "label": batch[1]}

    dataset = ray.data.read_webdataset(paths, decoder=None, shuffle="files")
    dataset = dataset.map_batches(decoded, batch_size=BATCH)

    def epoch() -> Iterator[tuple[Any, Any]]:
        batches = dataset.iter_batches(batch_size=BATCH)
        return ((batch["image"], batch["label"]) for batch in batches)

    return epoch


WAYS: dict[str, Callable[[list[str], str], Epochs]] = {
    "ours, iter_batches, no cluster": ours,
    "ours, iter_batches on start_cluster()": ours_on_a_cluster,
    "ours, dataloader, threads": ours_by_dataloader(0),
    "ours, dataloader, 2 workers": ours_by_dataloader(WORKERS),
    "two threads: tarfile, simplejpeg, cv2": threads,
    "SPDL, 2 threads: tarfile, simplejpeg, cv2": spdl,
    "webdataset, simplejpeg + cv2, .batched(64) in 2 workers": webdataset_with(Turbo),
    "webdataset, Pillow, .batched(64) in 2 workers": webdataset_with(WithPillow),
    "DALI, readers.webdataset": dali,
    "datago, shards from a server on this machine": datago,
    "Hugging Face datasets, simplejpeg + cv2 in 2 workers": hugging_face,
    "Ray Data, simplejpeg + cv2": ray_data,
}


if __name__ == "__main__":
    main()
