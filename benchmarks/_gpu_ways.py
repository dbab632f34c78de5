"""Ways to decode images on a GPU: each function makes a ``run()``, which tells how many it did."""

import io
import itertools
import tarfile
import time

import numpy as np
from PIL import Image


def dali_alone(
    images: list[bytes], count: int, *, batch: int, threads: int, hw_load: float, depth: int = 2
):
    """A run decodes ``count`` images in one pipeline and drops what comes out."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    arrays = [np.frombuffer(image, np.uint8) for image in images]
    batches = -(-count // batch)
    feed = [
        [arrays[(start + n) % len(arrays)] for n in range(batch)] for start in range(len(arrays))
    ]
    pipeline = Pipeline(
        batch_size=batch, num_threads=threads, device_id=0, prefetch_queue_depth=depth
    )
    with pipeline:
        encoded = fn.external_source(
            source=lambda i: feed[i % len(feed)],
            no_copy=True,
            dtype=types.UINT8,
            ndim=1,
            device="cpu",
        )
        pipeline.set_outputs(
            fn.decoders.image(
                encoded,
                device="mixed",
                output_type=types.RGB,
                jpeg_fancy_upsampling=True,
                hw_decoder_load=hw_load,
            )
        )
    pipeline.build()

    def run() -> int:
        for _ in range(batches):
            pipeline.run()
        return batches * batch

    return run


def nvimagecodec_alone(images: list[bytes], count: int, *, batch: int, threads: int):
    """A run decodes ``count`` images with nvImageCodec, into one buffer for each batch.

    It gives None for a bad image where DALI refuses the batch, and needs no copy of the pixels.
    """
    import cupy
    from nvidia import nvimgcodec

    decoder = nvimgcodec.Decoder(max_num_cpu_threads=threads, options=":fancy_upsampling=1")
    arrays = [np.frombuffer(image, np.uint8) for image in images]
    stream = cupy.cuda.get_current_stream()

    def decode(part: list[np.ndarray]) -> int:
        # Each is parsed by itself: one that can't be raises.
        coded = [nvimgcodec.CodeStream(array) for array in part]
        shapes = [(each.height, each.width, 3) for each in coded]
        ends = np.cumsum([0, *(height * width * 3 for height, width, _ in shapes)])
        flat = cupy.empty(int(ends[-1]), cupy.uint8)
        views = [
            flat[start:end].reshape(shape)
            for start, end, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
        ]
        # The JPEG engines write when they are called: whatever else used this memory must be done.
        stream.synchronize()
        wrapped = nvimgcodec.as_images(views, stream.ptr)
        decoded = decoder.decode(coded, images=wrapped, cuda_stream=stream.ptr)
        stream.synchronize()
        return sum(image is not None for image in decoded)

    def run() -> int:
        decoded = 0
        endless = itertools.cycle(arrays)
        while decoded < count:
            decoded += decode(list(itertools.islice(endless, batch)))
        return decoded

    return run


def read(client, paths: list[str], count: int, **options):
    """A run reads all shards on a cluster and holds them on the GPU."""
    from distributed import wait

    import dask_image_ingest as dii

    held = []

    def run() -> int:
        held.append(dii.read_webdataset_images(paths, backend="cudf", **options).persist())
        wait(held[0])
        return count

    def settle() -> None:
        # The next run asks for the same tasks, and must not find them done.
        held.clear()
        while client.run_on_scheduler(tasks_left):
            time.sleep(0.05)

    run.settle = settle
    return run


def tasks_left(dask_scheduler) -> int:
    """How many tasks a scheduler knows."""
    return len(dask_scheduler.tasks)


def read_here(paths: list[str], count: int, **options):
    """A run reads all shards in this process, one partition after the other, and drops them."""
    import dask
    import pandas as pd

    import dask_image_ingest as dii

    meta = pd.Series([], dtype="int64", name="rows")

    def run() -> int:
        with dask.config.set(scheduler="synchronous"):
            ddf = dii.read_webdataset_images(paths, backend="cudf", **options)
            decoded = int(ddf.map_partitions(rows, meta=meta).compute().sum())
        if decoded != count:
            raise RuntimeError(f"{decoded} of {count} images were decoded")
        return count

    return run


def rows(part):
    """How many rows of a partition have an image, as a pandas series."""
    import pandas as pd

    return pd.Series([sum(array is not None for array in part.images.arrays())], name="rows")


def a_pipeline_per_shard(paths: list[str], count: int):
    """A run decodes shard after shard, each in a pipeline of its own, to arrays on the host."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    def run() -> int:
        for path in paths:
            pipeline = Pipeline(batch_size=100, num_threads=8, device_id=0)
            with pipeline:
                encoded = fn.readers.webdataset(
                    paths=[path], ext=["jpg"], missing_component_behavior="skip", name="reader"
                )
                pipeline.set_outputs(
                    fn.decoders.image(encoded, device="mixed", output_type=types.RGB)
                )
            pipeline.build()
            left = pipeline.reader_meta("reader")["epoch_size"]
            while left > 0:
                (images,) = pipeline.run()
                on_host = images.as_cpu()
                _ = [np.array(on_host[n]) for n in range(min(left, len(on_host)))]
                left -= len(on_host)
        return count

    return run


def pillow(pool, paths: list[str], count: int):
    """A run decodes all shards on the CPU, one to each process at a time."""

    def run() -> int:
        decoded = sum(pool.map(pillow_shard, paths, chunksize=1))
        if decoded != count:
            raise RuntimeError(f"{decoded} of {count} images were decoded")
        return count

    return run


def pillow_shard(path: str) -> int:
    """Decode one shard with Pillow."""
    try:
        import webdataset
    except ImportError:
        with tarfile.open(path) as tar:
            members = (m for m in tar if m.name.endswith(".jpg"))
            return sum(_with_pillow(tar.extractfile(member).read()) for member in members)
    samples = webdataset.WebDataset(path, shardshuffle=False, empty_check=False)
    return sum(_with_pillow(sample["jpg"]) for sample in samples)


def _with_pillow(content: bytes) -> int:
    return 1 if np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).ndim == 3 else 0


def profile(run, lines: int = 45) -> None:
    """Print where the time of this process goes in a run, the second one."""
    import cProfile
    import pstats

    run()
    profiler = cProfile.Profile()
    profiler.runcall(run)
    statistics = pstats.Stats(profiler).strip_dirs()
    for order in ("tottime", "cumtime"):
        print(f"\nBy {order}:")
        statistics.sort_stats(order).print_stats(lines)
