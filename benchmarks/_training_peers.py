"""The peers of ``training.py``, each in its strongest form: epochs of batches of a job.

Every way gives whole batches from its workers: a uint8 array (64, 224, 224, 3), or for ``floats``
float32 (64, 3, 224, 224), and 64 labels. What is random is drawn anew for each image.
"""

from __future__ import annotations

import atexit
import io
import json
import math
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BATCH, SIZE, WORKERS = 64, 224, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Job(NamedTuple):
    """What is made of each image of 224 pixels.

    Attributes
    ----------
    crop
        A random resized crop, mirrored at random; else the whole image is resized.
    floats
        Normalised float32 with channels first; else uint8 as decoded.
    scaled
        JPEGs are decoded at a reduced scale that is no smaller than the result; else in full.
    """

    crop: bool = False
    floats: bool = False
    scaled: bool = False


# An epoch of batches of images and labels.
Epochs = Callable[[], Iterable[tuple[Any, Any]]]
Way = Callable[[list[str], Job], Epochs]


class Region(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def scaled(self, y: float, x: float) -> Region:
        """The same region of the image at another scale."""
        top, left = round(self.top * y), round(self.left * x)
        bottom, right = (self.top + self.height) * y, (self.left + self.width) * x
        return Region(top, left, max(round(bottom) - top, 1), max(round(right) - left, 1))


def region_of(job: Job, height: int, width: int) -> Region:
    """The whole image, or a region by the rule of torchvision's random resized crop."""
    for _ in range(10 if job.crop else 0):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Region(random.randint(0, height - h), random.randint(0, width - w), h, w)
    return Region(0, 0, height, width)


def turbo_options(job: Job, region: Region, height: int, width: int) -> dict[str, Any]:
    """Options of simplejpeg: those of the smallest scale whose region is as large as the result.

    No scale above a half: libjpeg-turbo is slower at these than in full.
    """
    if not job.scaled:
        return {}
    least = {
        "min_height": math.ceil(height * SIZE / region.height),
        "min_width": math.ceil(width * SIZE / region.width),
    }
    return least | {"min_factor": 2, "fastdct": True, "fastupsample": True}


class Turbo:
    """An encoded image to its pixels, by simplejpeg and OpenCV."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, encoded: bytes) -> np.ndarray:
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)
        height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
        region = region_of(self.job, height, width)
        pixels = simplejpeg.decode_jpeg(encoded, **turbo_options(self.job, region, height, width))
        top, left, h, w = region.scaled(pixels.shape[0] / height, pixels.shape[1] / width)
        # INTER_LINEAR does not antialias, which less than half the size needs not.
        kind = cv2.INTER_LINEAR if self.job.scaled else cv2.INTER_AREA
        pixels = cv2.resize(
            pixels[top : top + h, left : left + w], (SIZE, SIZE), interpolation=kind
        )
        return pixels[:, ::-1] if self.job.crop and random.random() < 0.5 else pixels


class WithPillow:
    """An encoded image to its pixels, by Pillow."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, encoded: bytes) -> np.ndarray:
        from PIL import Image

        picture = Image.open(io.BytesIO(encoded))
        width, height = picture.size
        region = region_of(self.job, height, width)
        if self.job.scaled:
            least = width * SIZE / region.width, height * SIZE / region.height
            picture.draft("RGB", tuple(map(math.ceil, least)))
        top, left, h, w = region.scaled(picture.height / height, picture.width / width)
        picture = picture.convert("RGB").resize(
            (SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h)
        )
        if self.job.crop and random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(picture)


class TorchVision:
    """An encoded image to its pixels, by torchvision's decoder and its transforms of tensors."""

    def __init__(self, job: Job) -> None:
        from torchvision.transforms import v2

        if job.scaled:
            raise NotImplementedError("decode_jpeg knows no reduced scale")
        steps: list[Any] = [v2.Resize((SIZE, SIZE), antialias=True)]
        if job.crop:
            steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
        self.transform = v2.Compose(steps)

    def __call__(self, encoded: bytes) -> Any:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return self.transform(decode_jpeg(data, mode=ImageReadMode.RGB))


class CollateTensors:
    """Rows of tensors to a batch, normalised by torchvision."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, rows: list[tuple[Any, int]]) -> tuple[Any, Any]:
        import torch
        from torchvision.transforms import v2

        pixels = torch.stack([pixels for pixels, _ in rows])
        labels = torch.tensor([label for _, label in rows])
        if not self.job.floats:
            return pixels.permute(0, 2, 3, 1), labels
        normalized = v2.functional.normalize(
            v2.functional.to_dtype(pixels, torch.float32, scale=True), MEAN, STD, inplace=True
        )
        return normalized, labels


def collate(rows: list[tuple[np.ndarray, int]], job: Job) -> tuple[Any, Any]:
    """Rows to a batch."""
    pixels = np.stack([pixels for pixels, _ in rows])
    labels = np.array([label for _, label in rows])
    if job.floats:
        pixels = pixels.transpose(0, 3, 1, 2).astype(np.float32)
        mean, std = (np.array(part, np.float32).reshape(1, 3, 1, 1) for part in (MEAN, STD))
        pixels -= mean * 255
        pixels /= std * 255
    return pixels, labels


class Collate:
    """`collate` for a job, which workers can unpickle."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, rows: list[tuple[np.ndarray, int]]) -> tuple[Any, Any]:
        import torch

        pixels, labels = collate(rows, self.job)
        return torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels)


class CollateSamples(Collate):
    """Samples with encoded images to a batch."""

    def __call__(self, rows: list[Any]) -> tuple[Any, Any]:
        decode = Turbo(self.job)
        images = (row["jpg"] for row in rows)
        encoded = [image["bytes"] if isinstance(image, dict) else image for image in images]
        labels = [int(row["cls"]) for row in rows]
        return super().__call__(list(zip(map(decode, encoded), labels, strict=True)))


def webdataset_with(decode: Any, collation: Any = Collate) -> Way:
    def way(paths: list[str], job: Job) -> Epochs:
        import torch
        import webdataset

        dataset = (
            webdataset.WebDataset(paths, shardshuffle=100, empty_check=False)
            .shuffle(1000)
            .to_tuple("jpg", "cls")
            .map_tuple(decode(job), int)
            .batched(BATCH, collation_fn=collation(job))
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


def bound(paths: list[str], job: Job) -> Epochs:
    """libjpeg-turbo alone: files that lie in memory, each decoded into the buffer of its thread.

    Whole images: of a random crop a decoder may leave out what is below it.
    """
    import simplejpeg

    encoded = [jpeg for jpeg, _ in samples(paths)]
    headers = [simplejpeg.decode_jpeg_header(jpeg)[:2] for jpeg in encoded]
    pool, largest = ThreadPoolExecutor(WORKERS), max(h * w for h, w in headers)
    shape = (3, SIZE, SIZE) if job.floats else (SIZE, SIZE, 3)

    def decode(rows: range, buffer: np.ndarray) -> None:
        for row in rows:
            region = region_of(job, *headers[row])
            options = turbo_options(job, region, *headers[row])
            simplejpeg.decode_jpeg(encoded[row], buffer=buffer, **options)

    def epoch() -> Iterator[tuple[Any, Any]]:
        parts = [range(thread, len(encoded), WORKERS) for thread in range(WORKERS)]
        buffers = [np.empty(largest * 3, np.uint8) for _ in parts]
        list(pool.map(decode, parts, buffers))
        yield np.broadcast_to(np.uint8(0), (len(encoded), *shape)), range(len(encoded))

    return epoch


def threads(paths: list[str], job: Job) -> Epochs:
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


def dali(paths: list[str], job: Job) -> Epochs:
    """DALI's own reader of shards, as its manual shows it."""
    from nvidia.dali import fn, pipeline_def, types

    if job.scaled:
        raise NotImplementedError("DALI's decoders know no reduced scale")

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def build() -> tuple[Any, Any]:
        encoded, label = fn.readers.webdataset(
            paths=paths, ext=["jpg", "cls"], random_shuffle=True, initial_fill=1000, name="r"
        )
        if not job.crop:
            pixels = fn.resize(fn.decoders.image(encoded), size=(SIZE, SIZE))
            return pixels, label
        pixels = fn.decoders.image_random_crop(encoded, random_area=(0.08, 1.0))
        pixels = fn.resize(pixels, size=(SIZE, SIZE))
        flip = fn.random.coin_flip()
        if not job.floats:
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


def spdl(paths: list[str], job: Job) -> Epochs:
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


def litdata(paths: list[str], job: Job) -> Epochs:
    """litData's own files, written before; their JPEGs are decoded by simplejpeg and OpenCV."""
    import litdata

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    litdata.optimize(
        litdata_samples,
        inputs=paths,
        output_dir=f"{folder}/optimized",
        chunk_bytes="16MB",
        num_workers=1,
        start_method="fork",
        verbose=False,
    )
    dataset = litdata.StreamingDataset(f"{folder}/optimized", shuffle=True)
    return decoded_in_workers(litdata.StreamingDataLoader, dataset, job)


def decoded_in_workers(loader_class: Any, dataset: Any, job: Job) -> Epochs:
    """Samples with encoded images, decoded in the workers of a DataLoader."""
    loader = loader_class(
        dataset,
        batch_size=BATCH,
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=CollateSamples(job),
    )
    return lambda: loader


def litdata_samples(path: str) -> Iterator[dict[str, Any]]:
    """Samples of a shard as litData stores them."""
    for encoded, label in samples([path]):
        yield {"jpg": encoded, "cls": label}


def datago(paths: list[str], job: Job) -> Epochs:
    """Its reader of shards, which takes them from a server only, and knows no random crop."""
    from datago import DatagoClient, initialize_logging

    if job.crop or job.scaled:
        raise NotImplementedError("datago knows no random crop and no reduced scale")
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


def hugging_face(paths: list[str], job: Job) -> Epochs:
    """Streaming, decoded in the workers of a DataLoader."""
    import datasets
    import torch

    shards = datasets.load_dataset(
        "webdataset", data_files={"train": paths}, split="train", streaming=True
    )
    shards = shards.cast_column("jpg", datasets.Image(decode=False)).shuffle(0, buffer_size=1000)
    return decoded_in_workers(torch.utils.data.DataLoader, shards, job)


def ray_data(paths: list[str], job: Job) -> Epochs:
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


PEERS: dict[str, Way] = {
    "two threads: tarfile, simplejpeg, cv2": threads,
    "SPDL, 2 threads: tarfile, simplejpeg, cv2": spdl,
    "litData, its own files, simplejpeg + cv2 in 2 workers": litdata,
    "webdataset, simplejpeg + cv2, .batched(64) in 2 workers": webdataset_with(Turbo),
    "webdataset, Pillow, .batched(64) in 2 workers": webdataset_with(WithPillow),
    "webdataset, torchvision decode_jpeg + v2, .batched(64) in 2 workers": webdataset_with(
        TorchVision, CollateTensors
    ),
    "DALI, readers.webdataset": dali,
    "datago, shards from a server on this machine": datago,
    "Hugging Face datasets, simplejpeg + cv2 in 2 workers": hugging_face,
    "Ray Data, simplejpeg + cv2": ray_data,
}
