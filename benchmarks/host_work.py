"""What a read costs the host beside decoding: µs of a core for each photograph, stage by stage.

On a GPU the host is the limit: what decodes 12,000 photographs of 500 × 375 a second leaves it 83
µs for each. No GPU is needed here: instead of DALI's decoder stands one that is fed by DALI's own
``feed_input`` in batches as large as on a GPU, and has the result at once, in which nothing is.

Printed for shards without and with an index: what a whole partition costs all threads together;
how long the thread that feeds the decoder works while that has nothing to do, which is what does
not overlap with decoding; and each stage by itself. With ``--paced`` also what an image takes by
the clock where the stand-in is as slow as a decoder of 12,000 images/s: one partition after the
other, and two at a time, as a worker of two threads has them. The best of some rounds, since others
may use the machine.

    python benchmarks/host_work.py
    python benchmarks/host_work.py --shards train/*.tar   # photographs of one's own, repeated
    python benchmarks/host_work.py --profile              # of the whole partition
"""

import argparse
import cProfile
import math
import pstats
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import dask
import numpy as np
from _shards import make_shards

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan.samples import open_samples
from dask_image_ingest.dataset.scan.task import read_partition
from dask_image_ingest.decode import dali, planner
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.formats import is_valid
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.pandas_backend import PandasBackend

# As on a GPU, whose batches are of so many images and not limited by their bytes.
BATCH, BATCH_BYTES = 256, 2**30

CHANNELS = 3

# Bytes at the end of a file by which it is told from others.
_END = 32

#: Images a second that a fast decoder decodes, and the partitions that are read with it.
SPEED, PARTITIONS = 12_000, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="+", metavar="PATH", help="tars of photographs to use")
    parser.add_argument("--images", type=int, default=2000, help="of the shard (default 2000)")
    parser.add_argument("--rounds", type=int, default=7, help="of each (default 7)")
    parser.add_argument("--paced", action="store_true", help="beside a decoder that takes its time")
    parser.add_argument("--profile", action="store_true", help="where a partition's time goes")
    arguments = parser.parse_args()
    dask.config.set({"image-ingest.decode-threads": 1})
    clock = Clock()
    stand_in(clock)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        count = arguments.images
        (path,) = make_shards(Path(temporary), count, count, arguments.shards or ())
        print(f"{count:,} photographs, {path.stat().st_size / count / 1000:.0f} kB of tar each")
        found = {"no index": measure(path, arguments, clock)}
        dii.write_index(str(path))
        found["index"] = measure(path, arguments, clock)
    print(as_table(found))


def as_table(found: dict[str, dict[str, float]]) -> str:
    """A row for each stage, a column for each kind of shard."""
    lines = [f"| µs an image | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for stage in next(iter(found.values())):
        cells = " | ".join(f"{one[stage]:.1f}" for one in found.values())
        lines.append(f"| {stage} | {cells} |")
    return "\n".join(lines)


def measure(path: Path, arguments: Any, clock: "Clock") -> dict[str, float]:
    """µs an image of the whole and of each stage, each the least of all rounds."""
    ddf = dii.read_webdataset_images(str(path), backend="pandas", partition_size=None)
    expr = ddf.expr.optimize(fuse=False)
    partition, query = expr._filtered_task("partition", 0).args
    (split,) = partition
    with open_samples(split.shard, split.index, query.options) as rows:
        images = rows.images(query.options.images[0], rows.numbers)
        images.prefetch()
        clock.shapes = {
            bytes(images.read(row)[-_END:]): (one.height, one.width, CHANNELS)
            for row, one in enumerate(images.headers)
        }
        clock.rows = len(images)
    best: dict[str, float] = {}
    for _ in range(1 + arguments.rounds):
        found = whole(partition, query, clock) | stages(split, query)
        if arguments.paced:
            found |= paced(partition, query, clock)
        for stage, seconds in found.items():
            best[stage] = min(best.get(stage, math.inf), seconds / arguments.images * 1e6)
    if arguments.profile:
        profiler = cProfile.Profile()
        profiler.runcall(whole, partition, query, clock)
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(40)
    return best


# --- the whole partition --------------------------------------------------------------------------


class Clock:
    """How long the decoder had nothing to do, though a partition was read."""

    def __init__(self) -> None:
        # Of a photograph by the end of its file.
        self.shapes: dict[bytes, tuple[int, ...]] = {}
        self.rows = 0
        self.seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin a partition."""
        self.images, self.since = 0, time.perf_counter()
        self.idle: list[float] = []

    def begins(self) -> None:
        """The decoder has got a batch."""
        self.idle.append(time.perf_counter() - self.since)

    def ends(self) -> None:
        """It has done what it got."""
        self.since = time.perf_counter()


def whole(partition: Any, query: Any, clock: Clock) -> dict[str, float]:
    """Seconds that one partition takes, from the shard's name to its dataframe."""
    clock.reset()
    start, busy = time.perf_counter(), time.process_time()
    frame = read_partition(partition, query)
    clock.begins()  # what follows the last batch is waited for, too
    found = {
        "**whole**, processor time of all threads": time.process_time() - busy,
        "**whole**, by the clock": time.perf_counter() - start,
        "not overlapped with decoding, by the clock": sum(clock.idle),
        "of that between two batches": sum(clock.idle[1:-1]),
    }
    assert clock.images == len(frame) == frame["image"].count(), "an image was not decoded"
    return found


def paced(partition: Any, query: Any, clock: Clock) -> dict[str, float]:
    """Seconds for each of some partitions where decoding takes as long as on a fast GPU."""
    found = {}
    clock.seconds = 1 / SPEED
    for threads in (1, 2):
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            read = lambda _: len(read_partition(partition, query))  # noqa: E731
            for rows in pool.map(read, range(PARTITIONS)):
                assert rows == clock.rows
        spent = (time.perf_counter() - start) / PARTITIONS
        found[f"beside a decoder of {SPEED:,} images/s, {threads} at a time"] = spent
    clock.seconds = 0.0
    return found


# --- the stages, one by one -----------------------------------------------------------------------


def stages(split: Any, query: Any) -> dict[str, float]:
    """Seconds of processor time of each stage of a partition, by itself."""
    spent: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        busy = time.process_time()
        result = work()
        spent[stage] = time.process_time() - busy
        return result

    names = [name for name in query.columns if name != "image"]
    backend = get_backend(query.options.backend)
    (image,) = query.options.images
    opened = open_samples(split.shard, split.index, query.options, query.member_columns)
    rows = timed("tar walk, or index", opened.__enter__)
    timed("headers", lambda: rows.headers(image, rows.numbers))
    images = rows.images(image, rows.numbers)
    images.prefetch()
    files = timed("reading members", lambda: [images.read(row) for row in range(len(images))])
    timed("validity", lambda: [is_valid("jpeg", file) for file in files])
    arrays = [np.frombuffer(file, np.uint8) for file in files]
    timed("DALI's parser", lambda: [dali.parsed_shape(array) for array in arrays])
    decoder = dali.DaliDecoder(DecodeSpec(), "encoded")
    batches = [arrays[start : start + BATCH] for start in range(0, len(arrays), BATCH)]
    timed("feed", lambda: list(decoder.run(iter(batches))))
    table = timed("table", lambda: rows.table(names, rows.numbers))
    timed("frame", lambda: backend.frame(table, rows.numbers, None))
    opened.__exit__(None, None, None)
    return spent


# --- the decoder that decodes nothing -------------------------------------------------------------


def stand_in(clock: Clock) -> None:
    """Have every read of this process decoded by a stand-in, and told by the clock."""
    dali.DaliDecoder._build = lambda _: InstantPipeline(clock)
    PandasBackend.pixel_buffer = lambda _, nbytes: NothingWritten(nbytes)
    planner._BATCH_BYTES = BATCH_BYTES
    planner._AT_ONCE["cpu"] = planner._AT_ONCE["gpu"]


class InstantPipeline:
    """A pipeline that is fed as one that decodes, and gives the shapes of nothing at once."""

    def __init__(self, clock: Clock) -> None:
        fn, types, _ = dali.dali()
        self._clock = clock
        self._begun, self._shapes = 0.0, []
        self._pipeline = dali.new_pipeline("cpu", 1)
        with self._pipeline:
            source = fn.external_source(
                name="images", no_copy=True, dtype=types.UINT8, ndim=1, device="cpu"
            )
            # One byte of each, so that what is measured is the feed.
            self._pipeline.set_outputs(fn.slice(source, start=0, shape=1, axes=[0]))
        self._pipeline.build()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def feed_input(self, name: str, files: Any) -> None:
        """Take a batch."""
        self._shapes = [self._clock.shapes[bytes(np.asarray(file)[-_END:])] for file in files]
        self._pipeline.feed_input(name, files)

    def schedule_run(self) -> None:
        """Begin to decode."""
        self._pipeline.schedule_run()
        self._begun = time.perf_counter()
        self._clock.begins()

    def share_outputs(self) -> tuple["Decoded"]:
        """What was decoded."""
        self._pipeline.share_outputs()
        if self._clock.seconds:
            spent = self._clock.seconds * len(self._shapes)
            time.sleep(max(0.0, self._begun + spent - time.perf_counter()))
        self._clock.ends()
        self._clock.images += len(self._shapes)
        return (Decoded(self._shapes),)


class Decoded:
    """A tensor list without pixels."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self) -> list[tuple[int, ...]]:
        """The shape of each image."""
        return self._shapes


class NothingWritten:
    """A buffer of pixels to which none are written."""

    def __init__(self, nbytes: int) -> None:
        self._flat = np.empty(nbytes, np.uint8)

    def append(self, images: Any) -> None:
        """Take a batch."""

    def finish(self) -> np.ndarray:
        """As many bytes as were foretold."""
        return self._flat


if __name__ == "__main__":
    main()
