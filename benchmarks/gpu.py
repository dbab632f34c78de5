"""How fast images are decoded on one GPU, next to the fastest that DALI can and to other ways.

Images per second, for photographs of 0.2, 1 and 12 million pixels made here with Pillow:

(a) DALI alone: mixed decoding in one pipeline, files in memory, outputs dropped. The limit.
(b) ``read_webdataset_images`` on a cluster of one GPU, persisted.
(c) The same with ``size=224``.
(d) One DALI pipeline for each shard, every batch copied to NumPy arrays on the host: the pattern of
    NeMo Curator's image reader.
(e) Pillow on all cores, over the webdataset library where it is installed.
(f) As (b), with 1 % of the images corrupt.

Each is the best of ``--repeats`` runs after one to warm up. What was busy in (a) and (b) is printed
too: the GPU's cores, its JPEG engines, PCIe, the CPU.

    python benchmarks/gpu.py            # all of it, under 5 minutes on an H100 with 16 cores
    python benchmarks/gpu.py --tune     # (a) over batch sizes, threads and JPEG engine loads
"""

import argparse
import contextlib
import datetime
import io
import multiprocessing
import os
import sys
import tarfile
import tempfile
import threading
import time
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

PACKAGES = (
    "nvidia-dali",
    "cudf",
    "cupy",
    "rmm",
    "dask-cuda",
    "dask",
    "numpy",
    "pillow",
    "webdataset",
)


class Kind(NamedTuple):
    """A kind of photograph, and how many of it a run reads."""

    name: str
    height: int
    width: int
    shards: int
    per_shard: int
    distinct: int


# Decoded, each set is 4 to 7 GB: it fits a GPU many times and takes DALI about a second.
KINDS = (
    Kind("0.2 MP", 400, 500, 32, 256, 64),
    Kind("1 MP", 866, 1155, 24, 64, 16),
    Kind("12 MP", 3000, 4000, 12, 16, 4),
)


def photograph(height: int, width: int, seed: int) -> bytes:
    """A JPEG of about the bytes per pixel that ImageNet's have: large shapes and grain."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (height // 24, width // 24, 3), np.uint8)
    shapes = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    grain = random.normal(0, 10, (height, width)).astype(np.float32)
    # Photographs of many pixels have finer grain for their size: the same noise, smoothed.
    if height * width > 2**22:
        grain = (grain[:, :-1] + grain[:, 1:]) / 2
        grain = np.pad(grain, ((0, 0), (0, 1)), mode="edge")
    pixels = (np.asarray(shapes, np.float32) + grain[..., None]).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=92)
    return file.getvalue()


def make_images(kind: Kind) -> list[bytes]:
    """The distinct images of a kind, of slightly different shapes."""
    with multiprocessing.get_context("spawn").Pool(min(kind.distinct, cores())) as pool:
        shapes = [
            (kind.height + 8 * (n % 4), kind.width - 8 * (n % 4), n) for n in range(kind.distinct)
        ]
        return pool.starmap(photograph, shapes)


def write_shards(
    kind: Kind, images: list[bytes], folder: Path, corrupt_every: int = 0
) -> list[str]:
    """The images over and over, in shards of the webdataset kind, each with a caption."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(kind.shards):
        path = folder / f"{shard:05d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(shard * kind.per_shard, (shard + 1) * kind.per_shard):
                content = images[number % len(images)]
                if corrupt_every and number % corrupt_every == corrupt_every // 2:
                    content = corrupted(content, number // corrupt_every)
                add(tar, f"{number:08d}.jpg", content)
                add(tar, f"{number:08d}.txt", b"a picture")
        paths.append(str(path))
    return paths


def corrupted(content: bytes, turn: int) -> bytes:
    """Cut short, which a header check sees, or damaged inside, which only a decoder sees."""
    if turn % 2:
        return content[: len(content) // 2]
    table = content.index(b"\xff\xc4") + 5
    return content[:table] + b"\xff" * 16 + content[table + 16 :]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def dali_alone(images: list[bytes], count: int, *, batch: int, threads: int, hw_load: float):
    """(a): a run decodes ``count`` images in one pipeline and drops what comes out."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    arrays = [np.frombuffer(image, np.uint8) for image in images]
    batches = -(-count // batch)
    feed = [
        [arrays[(start + n) % len(arrays)] for n in range(batch)] for start in range(len(arrays))
    ]
    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=0, prefetch_queue_depth=2)
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


def read(client, paths: list[str], count: int, **options):
    """(b), (c), (f): a run reads all shards and holds them on the GPU."""
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
    return len(dask_scheduler.tasks)


def a_pipeline_per_shard(paths: list[str], count: int):
    """(d): a run decodes shard after shard, each in a pipeline of its own, to host arrays."""
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
    """(e): a run decodes all shards, one to each process at a time."""

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
            return sum(decode_with_pillow(tar.extractfile(member).read()) for member in members)
    samples = webdataset.WebDataset(path, shardshuffle=False, empty_check=False)
    return sum(decode_with_pillow(sample["jpg"]) for sample in samples)


def decode_with_pillow(content: bytes) -> int:
    return 1 if np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).ndim == 3 else 0


class Busy:
    """Samples how busy the machine is while a run goes on."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def watch(self):
        """Sample until the block ends."""
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def __str__(self) -> str:
        means = {name: sum(values) / len(values) for name, values in self.seen.items() if values}
        return ", ".join(f"{name} {mean:.0f}" for name, mean in means.items())

    def _sample(self, stop: threading.Event) -> None:
        import psutil
        import pynvml

        pynvml.nvmlInit()
        handle = nvml_handle()
        probes = {
            "GPU %": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "JPEG engines %": lambda: pynvml.nvmlDeviceGetJpgUtilization(handle)[0],
            "PCIe to GPU MB/s": lambda: (
                pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES) / 1e3
            ),
            "CPU %": lambda: psutil.cpu_percent(),
        }
        psutil.cpu_percent()
        while not stop.wait(0.1):
            for name, probe in probes.items():
                # Not every card answers each of them, nor every virtual machine.
                with contextlib.suppress(pynvml.NVMLError):
                    self.seen[name].append(probe())


def nvml_handle():
    """The first visible GPU, as NVML knows it."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    if visible.isnumeric():
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    return pynvml.nvmlDeviceGetHandleByUUID(visible)


def measure(run, repeats: int) -> tuple[float, Busy]:
    """Images per second in the best run, and what was busy in it."""
    settle = getattr(run, "settle", lambda: None)
    run()
    settle()
    best, busy_then = 0.0, Busy()
    for _ in range(repeats):
        busy = Busy()
        watched = busy.watch() if gpu_name() else contextlib.nullcontext()
        with watched:
            start = time.perf_counter()
            count = run()
            speed = count / (time.perf_counter() - start)
        settle()
        if speed > best:
            best, busy_then = speed, busy
    return best, busy_then


def benchmark(arguments) -> None:
    """Measure and print the table."""
    import dask_image_ingest as dii

    print_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        data = {}
        for kind in chosen(arguments):
            images = make_images(kind)
            paths = write_shards(kind, images, Path(folder) / kind.name)
            data[kind] = images, paths
            say(f"made {kind.name}: {kind.shards * kind.per_shard} images of {kbytes(images)} KB")
        speeds: dict[tuple[Kind, str], float] = {}
        busy: dict[tuple[Kind, str], Busy] = {}

        def record(kind: Kind, figure: str, run) -> None:
            try:
                speeds[kind, figure], busy[kind, figure] = measure(run, arguments.repeats)
            except Exception as error:
                # A figure that can't be had must not cost the others.
                say(f"{kind.name} ({figure}) failed: {type(error).__name__}: {error}")
            else:
                say(f"{kind.name} ({figure}) {speeds[kind, figure]:,.0f} images/s")

        for kind, (images, paths) in data.items():
            count = kind.shards * kind.per_shard
            settings = {
                "batch": min(arguments.batch_size, count),
                "threads": arguments.threads or cores(),
                "hw_load": arguments.hw_decoder_load,
            }
            record(kind, "a", dali_alone(images, count, **settings))
            record(kind, "d", a_pipeline_per_shard(paths, count))
        release_memory()
        with dii.start_cluster(1, gpu=True, dashboard_address=None) as client:
            for kind, (_, paths) in data.items():
                count = kind.shards * kind.per_shard
                record(kind, "b", read(client, paths, count))
                record(kind, "c", read(client, paths, count, size=224))
            kind, (images, _) = next(iter(data.items()))
            paths = write_shards(kind, images, Path(folder) / "corrupt", corrupt_every=100)
            record(kind, "f", read(client, paths, kind.shards * kind.per_shard))
        measure_pillow(data, record)
    print_table(data, speeds, busy)


def measure_pillow(data, record) -> None:
    """(e), in processes that are there before the clock starts."""
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        for kind, (_, paths) in data.items():
            record(kind, "e", pillow(pool, paths, kind.shards * kind.per_shard))


def tune(arguments) -> None:
    """(a) of the first kind over batch sizes, threads and loads of the JPEG engines."""
    print_machine()
    kind = chosen(arguments)[0]
    images = make_images(kind)
    count = kind.shards * kind.per_shard
    print(f"{kind.name}, {kbytes(images)} KB\n\n| batch | threads | hw_decoder_load | images/s |")
    print("|---:|---:|---:|---:|")
    for batch in (32, 64, 128, 256):
        for threads in sorted({cores() // 4 or 1, cores() // 2 or 1, cores()}):
            for hw_load in (0.0, 0.65, 0.9, 1.0):
                run = dali_alone(images, count, batch=batch, threads=threads, hw_load=hw_load)
                speed, _ = measure(run, 1)
                print(f"| {batch} | {threads} | {hw_load} | {speed:,.0f} |", flush=True)
                del run
                release_memory()


def without_gpu(arguments) -> None:
    """Say what is missing; with ``--cpu-parts`` try the parts that need no GPU, on little data."""
    print("benchmarks/gpu.py needs an NVIDIA GPU, and CUDA finds none here: nothing measured.")
    if not arguments.cpu_parts:
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        data = {}
        for kind in chosen(arguments):
            small = kind._replace(shards=2, per_shard=4, distinct=2)
            images = make_images(small)
            data[small] = images, write_shards(small, images, Path(folder) / kind.name, 4)
            print(f"{kind.name}: {kbytes(images)} KB an image")
            data[small] = images, write_shards(small, images, Path(folder) / kind.name)
        speeds = {}

        def record(kind, figure, run):
            speeds[kind, figure], _ = measure(run, 1)

        measure_pillow(data, record)
        print_table(data, speeds, {})


def print_machine() -> None:
    """What the figures are of."""
    import cupy
    import pynvml

    pynvml.nvmlInit()
    print(f"{gpu_name()}, driver {pynvml.nvmlSystemGetDriverVersion()}, ", end="")
    print(f"CUDA {cupy.cuda.runtime.runtimeGetVersion()}, {cores()} CPU cores")
    print(", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name))))
    print(f"{datetime.date.today()}: python {' '.join(sys.argv)}\n", flush=True)


def print_table(data, speeds, busy) -> None:
    """The figures and their ratios."""
    figures = "abcdef"
    print(f"\n| images | KB | {' | '.join(f'({f})' for f in figures)} | b/a | b/d | f/b |")
    print(f"|---|---:|{'---:|' * (len(figures) + 3)}")
    for kind, (images, _) in data.items():
        row = [kind.name, kbytes(images)]
        row += [f"{speeds[kind, f]:,.0f}" if (kind, f) in speeds else "" for f in figures]
        for one, other in ("ba", "bd", "fb"):
            both = (kind, one) in speeds and (kind, other) in speeds
            row.append(f"{speeds[kind, one] / speeds[kind, other]:.2f}" if both else "")
        print(f"| {' | '.join(row)} |")
    for (kind, figure), found in busy.items():
        if figure in "ab" and str(found):
            print(f"{kind.name} ({figure}): {found}")


def chosen(arguments) -> list[Kind]:
    """The kinds that were asked for."""
    kinds = [kind for kind in KINDS if not arguments.only or kind.name in arguments.only]
    return [kind._replace(shards=max(1, int(kind.shards * arguments.scale))) for kind in kinds]


def release_memory() -> None:
    """Give back what DALI's pools in this process keep."""
    import gc

    from nvidia.dali import backend

    gc.collect()
    backend.ReleaseUnusedMemory()


def gpu_name() -> str | None:
    """The GPU's name; None where there is none, or nothing to use it with."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except ImportError:
        return None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def installed(name: str) -> str | None:
    """A package's version, whichever CUDA it was built for."""
    for suffix in ("", "-cu13", "-cu12", "-cuda130", "-cuda120", "-cuda13x", "-cuda12x"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name + suffix)
    return None


def kbytes(images: list[bytes]) -> str:
    return f"{sum(map(len, images)) / len(images) / 1000:,.0f}"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def say(line: str) -> None:
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, help="kinds of photographs")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each (default 3)")
    parser.add_argument("--batch-size", type=int, default=64, help="of (a) (default 64)")
    parser.add_argument("--threads", type=int, help="of (a) (default: all cores)")
    parser.add_argument("--hw-decoder-load", type=float, default=0.65, help="of (a), DALI's own")
    parser.add_argument("--folder", help="where the shards are made (default: the temporary one)")
    parser.add_argument("--tune", action="store_true", help="try many settings of (a) instead")
    parser.add_argument("--cpu-parts", action="store_true", help="without a GPU: try the rest")
    arguments = parser.parse_args()
    if gpu_name() is None:
        without_gpu(arguments)
    elif arguments.tune:
        tune(arguments)
    else:
        benchmark(arguments)


if __name__ == "__main__":
    main()
