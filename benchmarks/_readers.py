"""The ways to read shards that ``read.py`` compares: ours, DALI alone, and the peers.

Each gets ready, and returns a function that reads all shards once. That gives a function in turn,
which holds what was read and counts its images, once the clock has stopped. With a size, images are
brought to size × size by what a user of the library would take.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

CORES = len(os.sched_getaffinity(0))
PREFETCHED = 2  # batches, DALI's own default
BATCH = 64

Read = Callable[[], Callable[[], int]]


def ours_synchronous(paths: list[str], images: int, size: int | None) -> Read:
    import dask_image_ingest as dii

    def read():
        ddf = dii.read_webdataset_images(paths, backend="pandas", size=size)
        return ddf.compute(scheduler="synchronous").image.count

    return read


def ours_persisted(paths: list[str], images: int, size: int | None) -> Read:
    from distributed import wait

    import dask_image_ingest as dii

    dii.start_cluster(gpu=False, dashboard_address=None)

    def read():
        kept = dii.read_webdataset_images(paths, backend="pandas", size=size).persist()
        wait(kept)
        return lambda: kept.image.count().compute()

    return read


def ours_batches(paths: list[str], images: int, size: int | None) -> Read:
    import dask_image_ingest as dii

    dii.start_cluster(gpu=False, dashboard_address=None)
    ddf = dii.read_webdataset_images(paths, backend="pandas", size=size)

    def read():
        batches = ddf.images.iter_batches(BATCH, columns=["__key__", "txt"])
        done = sum(len(batch["image"]) for batch in batches)
        return lambda: done

    return read


def dali_recycled(paths: list[str], images: int, size: int | None) -> Read:
    # Decodes only: the limit of any size.
    pipeline = dali_pipeline(paths)

    def read():
        discard_prefetched(pipeline)
        done = 0
        while done < images:
            done += len(pipeline.run()[0])
        return lambda: done

    return read


def dali_kept(paths: list[str], images: int, size: int | None) -> Read:
    pipeline = dali_pipeline(paths, size=size)

    def read():
        discard_prefetched(pipeline)
        kept: list = []
        while len(kept) < images:
            kept.extend(copies(*pipeline.run()))
        return kept.__len__

    return read


def curator_pattern(paths: list[str], images: int, size: int | None) -> Read:
    def read():
        kept: list = []
        for path in paths:
            pipeline = dali_pipeline([path], batch_size=100, size=size)
            there = next(iter(pipeline.reader_meta().values()))["epoch_size"]
            shard: list = []
            while len(shard) < there:
                shard.extend(copies(*pipeline.run()))
            kept.extend(shard[:there])
        return kept.__len__

    return read


def dali_pipeline(paths: list[str], batch_size: int = BATCH, size: int | None = None):
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(
        batch_size=batch_size,
        num_threads=CORES,
        device_id=None,
        prefetch_queue_depth=PREFETCHED,
    )
    with pipeline:
        encoded = fn.readers.webdataset(paths=paths, ext=["jpg"])
        encoded = encoded[0] if isinstance(encoded, list) else encoded
        pixels = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        if size:
            pixels = fn.resize(pixels, size=(size, size), interp_type=types.INTERP_LINEAR)
        pipeline.set_outputs(pixels)
    pipeline.build()
    return pipeline


def discard_prefetched(pipeline) -> None:
    """Let go of the batches that were decoded while the clock stood still."""
    for _ in range(PREFETCHED):
        pipeline.run()


def copies(images) -> list:
    import numpy as np

    return [np.array(images.at(place)) for place in range(len(images))]


def webdataset_alone(paths: list[str], images: int, size: int | None) -> Read:
    return lambda: list(with_pillow(paths, size)).__len__


def webdataset_loader(paths: list[str], images: int, size: int | None) -> Read:
    return lambda: list(loader_of(with_pillow(paths, size))).__len__


def turbo_loader(paths: list[str], images: int, size: int | None) -> Read:
    import webdataset

    dataset = webdataset.WebDataset(paths, shardshuffle=False)
    columns = dataset.to_tuple("__key__", "jpg", "txt").map_tuple(None, Turbo(size), str)
    return lambda: list(loader_of(columns)).__len__


class Turbo:
    """What a person writes by hand to be fast: libjpeg-turbo, and torch's resize."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __call__(self, encoded: bytes) -> Any:
        import simplejpeg
        import torch

        pixels = torch.from_numpy(simplejpeg.decode_jpeg(encoded))
        if self.size is None:
            return pixels
        resized = torch.nn.functional.interpolate(
            pixels.permute(2, 0, 1)[None],
            (self.size, self.size),
            mode="bilinear",
            antialias=True,
        )
        return resized[0]


class Resize:
    """What torchvision does with a Pillow image."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __call__(self, picture: Any) -> Any:
        import numpy as np
        from PIL.Image import Resampling

        if self.size is not None:
            picture = picture.resize((self.size, self.size), Resampling.BILINEAR)
        return np.asarray(picture)


def with_pillow(paths: list[str], size: int | None):
    import webdataset

    dataset = webdataset.WebDataset(paths, shardshuffle=False).decode("pil")
    return dataset.to_tuple("__key__", "jpg", "txt").map_tuple(None, Resize(size), str)


def loader_of(columns):
    """A DataLoader of two workers."""
    import torch

    # Else each tensor keeps a file open.
    torch.multiprocessing.set_sharing_strategy("file_system")
    return torch.utils.data.DataLoader(columns, batch_size=None, num_workers=2)


def hugging_face(paths: list[str], images: int, size: int | None) -> Read:
    import datasets

    shards = datasets.load_dataset(
        "webdataset", data_files={"train": paths}, split="train", streaming=True
    )
    resize = Resize(size)

    def read():
        kept = [
            (sample["__key__"], resize(sample["jpg"].convert("RGB")), sample["txt"])
            for sample in shards
        ]
        return kept.__len__

    return read


def ray_data(paths: list[str], images: int, size: int | None) -> Read:
    import ray

    ray.init(num_cpus=CORES, include_dashboard=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def resized(row: dict) -> dict:
        from PIL import Image

        row["jpg"] = Resize(size)(Image.fromarray(row["jpg"]))
        return row

    def read():
        rows = ray.data.read_webdataset(paths)
        return (rows if size is None else rows.map(resized)).materialize().count

    return read


def daft_frame(paths: list[str], images: int, size: int | None) -> Read:
    import daft
    import webdataset

    # Handed over in memory, since its own read_webdataset is several times slower on these shards.
    samples = webdataset.WebDataset(paths, shardshuffle=False).to_tuple("__key__", "jpg", "txt")

    def read():
        columns = dict(zip(("key", "jpg", "txt"), zip(*samples, strict=True), strict=True))
        frame = daft.from_pydict({name: list(values) for name, values in columns.items()})
        pixels = daft.col("jpg").decode_image(mode="RGB")
        pixels = pixels if size is None else pixels.resize(size, size)
        return frame.with_column("jpg", pixels).collect().__len__

    return read


class Row(NamedTuple):
    """A way to read the shards, and the packages that it needs."""

    name: str
    prepare: Callable[[list[str], int, int | None], Read]
    needs: tuple[str, ...]
    #: Whether what counts is the first read of a process.
    first: bool = False


ROWS = {
    "limit": Row("**the limit**: DALI decodes, outputs recycled", dali_recycled, ("nvidia.dali",)),
    "kept": Row("DALI alone, each image copied and kept", dali_kept, ("nvidia.dali",)),
    "synchronous": Row("ours, synchronous", ours_synchronous, ("nvidia.dali",)),
    "persisted": Row("ours, persisted on `start_cluster()`", ours_persisted, ("nvidia.dali",)),
    "batches": Row("ours, `iter_batches(64)`", ours_batches, ("nvidia.dali",)),
    "first": Row(
        "ours, the first read after `start_cluster()`", ours_persisted, ("nvidia.dali",), True
    ),
    "curator": Row(
        "NeMo Curator's pattern: a DALI pipeline per shard", curator_pattern, ("nvidia.dali",)
    ),
    "turbo": Row(
        "by hand: webdataset + simplejpeg + torch, DataLoader of 2 workers",
        turbo_loader,
        ("webdataset", "simplejpeg", "torch"),
    ),
    "alone": Row("webdataset + Pillow, one process", webdataset_alone, ("webdataset",)),
    "loader": Row(
        "webdataset + Pillow, DataLoader of 2 workers", webdataset_loader, ("webdataset", "torch")
    ),
    "datasets": Row("Hugging Face datasets, streaming", hugging_face, ("datasets",)),
    "ray": Row("Ray Data, `read_webdataset`", ray_data, ("ray", "webdataset")),
    "daft": Row("Daft, `decode_image` of webdataset's bytes", daft_frame, ("daft", "webdataset")),
}
