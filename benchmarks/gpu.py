"""How fast images are decoded on one GPU, next to the fastest that DALI can and to other ways.

It has not run on a GPU yet. Images per second, for photographs of 0.2, 1 and 12 million pixels and
for a mixture of sizes, made here with Pillow:

a    DALI alone: mixed decoding in one pipeline, files in memory, outputs dropped. The limit.
n    nvImageCodec alone, without DALI: into one buffer for each batch.
s    ``read_webdataset_images`` in this process, one partition after the other.
b    ``read_webdataset_images`` on a cluster of one GPU, persisted.
i    The same with an index beside each shard.
c    As b, with ``size=224``.
d    One DALI pipeline for each shard, every batch copied to NumPy arrays on the host: the pattern
     of NeMo Curator's image reader.
e    Pillow on all cores, over the webdataset library where it is installed.
f, g As b, with 1 % and 10 % of the images bad; before the clock starts, that exactly these rows are
     null.

Shards hold 2,048 images, those of 12 million pixels 256. Each is the best of ``--repeats`` runs
after one to warm up. What was busy in a, n, s, b and i is printed too (the GPU's cores, its JPEG
engines, PCIe, the CPU), with what the run waited for, and the GPU's memory at its peak. Needs no
installation of this package: it is found beside this script.

    python benchmarks/gpu.py             # all of it
    python benchmarks/gpu.py --tune      # a over batch sizes, threads, JPEG engine loads, depths
    python benchmarks/gpu.py --profile   # where the host's time goes in s
"""

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401
from _gpu_images import KINDS, Kind, cores, is_corrupt, kbytes, make_images, write_shards
from _gpu_machine import Busy, gpu_name, measure, print_machine, release_memory
from _gpu_ways import (
    a_pipeline_per_shard,
    dali_alone,
    nvimagecodec_alone,
    pillow,
    profile,
    read,
    read_here,
)

FIGURES = "ansbicdefg"

#: What is hoped for on an H200 with 16 cores: (a ratio's parts, or one figure of a kind), at least.
TARGETS = (
    ("b", "", "0.2 MP", 12_000),
    ("b", "", "12 MP", 700),
    ("b", "a", "0.2 MP", 0.95),
    ("b", "d", "0.2 MP", 5),
    ("f", "b", "0.2 MP", 0.9),
    ("g", "b", "0.2 MP", 0.9),
)


class Results:
    """Speeds, and what was busy, by kind and figure."""

    def __init__(self, repeats: int, figures: str = FIGURES) -> None:
        self.speeds: dict[tuple[str, str], float] = {}
        self.busy: dict[tuple[str, str], Busy] = {}
        self._repeats = repeats
        self.figures = figures

    def record(self, kind: Kind, figure: str, make) -> None:
        """Measure what ``make()`` makes; a figure that can't be had must not cost the others."""
        key = kind.name, figure
        if figure not in self.figures:
            return
        try:
            self.speeds[key], self.busy[key] = measure(make(), self._repeats)
        except Exception as error:
            say(f"{kind.name} ({figure}) failed: {type(error).__name__}: {error}")
        else:
            say(f"{kind.name} ({figure}) {self.speeds[key]:,.0f} images/s")

    def ratio(self, kind: str, one: str, other: str) -> float | None:
        """One figure by another, None where one is missing."""
        if (kind, one) in self.speeds and (kind, other) in self.speeds:
            return self.speeds[kind, one] / self.speeds[kind, other]
        return None

    def print(self, data) -> None:
        """The figures, their ratios, what was busy, and what was hoped for."""
        ratios = ("ba", "ia", "sa", "na", "bd", "fb", "gb")
        heads = [*FIGURES, *(f"{one}/{other}" for one, other in ratios)]
        print(f"\n| images | KB | {' | '.join(heads)} |")
        print(f"|---|---:|{'---:|' * len(heads)}")
        for kind, (images, _) in data.items():
            row = [kind.name, kbytes(images)]
            for figure in FIGURES:
                speed = self.speeds.get((kind.name, figure))
                row.append("" if speed is None else f"{speed:,.0f}")
            for one, other in ratios:
                ratio = self.ratio(kind.name, one, other)
                row.append("" if ratio is None else f"{ratio:.2f}")
            print(f"| {' | '.join(row)} |")
        for (kind, figure), found in self.busy.items():
            if figure in "ansbi" and str(found):
                print(f"{kind} ({figure}): {found}; {found.limit()}")
        self._print_targets()

    def _print_targets(self) -> None:
        for one, other, kind, least in TARGETS:
            got = self.ratio(kind, one, other) if other else self.speeds.get((kind, one))
            if got is not None:
                name = f"{kind} ({one}{'/' + other if other else ''})"
                met = "met" if got >= least else "NOT met"
                print(f"target {met}: {name} {got:,.2f}, at least {least:,}")


def benchmark(arguments) -> None:
    """Measure and print the table."""
    import dask_image_ingest as dii

    print_machine()
    results = Results(arguments.repeats, arguments.figures)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        data = prepare(arguments, folder)
        for kind, (images, paths) in data.items():
            count = kind.shards * kind.per_shard
            settings = {
                "batch": min(arguments.batch_size, count),
                "threads": arguments.threads or cores(),
            }
            load = arguments.hw_decoder_load
            results.record(kind, "a", partial(dali_alone, images, count, hw_load=load, **settings))
            results.record(kind, "n", partial(nvimagecodec_alone, images, count, **settings))
            results.record(kind, "d", partial(a_pipeline_per_shard, paths, count))
            results.record(kind, "s", partial(read_here, paths, count, index=False))
            release_memory()
        with dii.start_cluster(1, gpu=True, dashboard_address=None) as client:
            for kind, (_, paths) in data.items():
                count = kind.shards * kind.per_shard
                unindexed = partial(read, client, paths, count, index=False)
                results.record(kind, "b", unindexed)
                results.record(kind, "i", partial(read, client, paths, count, index=True))
                results.record(kind, "c", partial(unindexed, size=224))
            kind, (images, _) = next(iter(data.items()))
            for figure, every in (("f", 100), ("g", 10)):
                if figure not in results.figures:
                    continue
                paths = write_shards(kind, images, Path(folder) / f"bad-{every}", every)
                check_bad_rows(kind, paths, every)
                results.record(
                    kind, figure, partial(read, client, paths, kind.shards * kind.per_shard)
                )
        if "e" in results.figures:
            measure_pillow(data, results)
    results.print(data)


def prepare(arguments, folder: str) -> dict:
    """Images and shards of each kind, with indexes beside them."""
    import dask_image_ingest as dii

    data = {}
    for kind in chosen(arguments):
        images = make_images(kind)
        data[kind] = images, write_shards(kind, images, Path(folder) / kind.name)
        dii.write_index(data[kind][1])
        say(f"made {kind.name}: {kind.shards * kind.per_shard} images of {kbytes(images)} KB")
    return data


def check_bad_rows(kind: Kind, paths: list[str], every: int) -> None:
    """Exactly the bad images are rows without one, those that are cut short included."""
    import dask_image_ingest as dii

    ddf = dii.read_webdataset_images(paths, backend="cudf", columns=["__key__", "error"])
    table = ddf.to_backend("pandas").compute()
    bad = set(table["__key__"][table["error"].notna()])
    numbers = range(kind.shards * kind.per_shard)
    expected = {f"{number:08d}" for number in numbers if is_corrupt(number, every)}
    verdict = "as expected" if bad == expected else f"WRONG: {sorted(bad ^ expected)[:5]} differ"
    print(f"{kind.name}, 1 of {every} bad: {len(bad)} rows without an image, {verdict}", flush=True)


def measure_pillow(data, results: Results) -> None:
    """Pillow, in processes that are there before the clock starts."""
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        for kind, (_, paths) in data.items():
            count = kind.shards * kind.per_shard
            results.record(kind, "e", partial(pillow, pool, paths, count))


def tune(arguments) -> None:
    """DALI alone, of the first kind, over batch sizes, threads, loads and depths."""
    print_machine()
    kind = chosen(arguments)[0]
    images = make_images(kind)
    count = kind.shards * kind.per_shard
    print(f"{kind.name}, {kbytes(images)} KB\n")
    print("| batch | threads | hw_decoder_load | in flight | images/s |")
    print("|---:|---:|---:|---:|---:|")
    for depth in (1, 2, 3):
        for batch in (32, 64, 128, 256):
            for threads in sorted({cores() // 4 or 1, cores() // 2 or 1, cores()}):
                for load in (0.0, 0.65, 0.9, 1.0):
                    settings = {"batch": batch, "threads": threads, "hw_load": load}
                    run = dali_alone(images, count, depth=depth, **settings)
                    speed, _ = measure(run, 1)
                    print(f"| {batch} | {threads} | {load} | {depth} | {speed:,.0f} |", flush=True)
                    del run
                    release_memory()


def profile_read(arguments) -> None:
    """Where the host's time goes, of the first kind."""
    print_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for kind, (_, paths) in prepare(arguments, folder).items():
            for index in (False, True):
                print(f"\n{kind.name}, {'with an' if index else 'no'} index")
                profile(read_here(paths, kind.shards * kind.per_shard, index=index))


def without_gpu(arguments) -> None:
    """Say what is missing; with ``--cpu-parts`` try the parts that need no GPU, on little data."""
    print("benchmarks/gpu.py needs an NVIDIA GPU, and CUDA finds none here: nothing measured.")
    if not arguments.cpu_parts:
        return
    results = Results(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        data = {}
        for kind in chosen(arguments):
            small = kind._replace(shards=2, per_shard=4, distinct=2)
            images = make_images(small)
            write_shards(small, images, Path(folder) / f"{kind.name} bad", 4)
            data[small] = images, write_shards(small, images, Path(folder) / kind.name)
        measure_pillow(data, results)
        results.print(data)


def chosen(arguments) -> list[Kind]:
    """The kinds that were asked for."""
    kinds = [kind for kind in KINDS if not arguments.only or kind.name in arguments.only]
    return [_scaled(kind, kind.shards * arguments.scale) for kind in kinds]


def _scaled(kind: Kind, shards: float) -> Kind:
    """The kind with so many shards; less than one is a small one."""
    if shards >= 1:
        return kind._replace(shards=int(shards))
    return kind._replace(shards=1, per_shard=max(1, int(kind.per_shard * shards)))


def say(line: str) -> None:
    """Report progress."""
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Parse the arguments and do what they ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, help="kinds of photographs")
    parser.add_argument("--figures", default=FIGURES, help=f"some of {FIGURES} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each (default 3)")
    parser.add_argument("--batch-size", type=int, default=64, help="of a and n (default 64)")
    parser.add_argument("--threads", type=int, help="of a and n (default: all cores)")
    parser.add_argument("--hw-decoder-load", type=float, default=0.65, help="of a, DALI's own")
    parser.add_argument("--folder", help="where the shards are made (default: the temporary one)")
    parser.add_argument("--tune", action="store_true", help="try many settings of a instead")
    parser.add_argument("--profile", action="store_true", help="profile s instead")
    parser.add_argument("--cpu-parts", action="store_true", help="without a GPU: try the rest")
    arguments = parser.parse_args()
    if gpu_name() is None:
        without_gpu(arguments)
    elif arguments.tune:
        tune(arguments)
    elif arguments.profile:
        profile_read(arguments)
    else:
        benchmark(arguments)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
