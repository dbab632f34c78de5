"""What it costs to move rows with pixels: an image column beside the same bytes in other columns.

    python benchmarks/moves.py

The same images as a column of `image`, as plain Arrow `large_binary`, and as lists of uint8, which
is how images were stored once (`--lists`, slow). Each move runs in a process of its own, forked
once the frame is there: processor seconds, and by how much its memory grew at the most. The shuffle
is dask's own, between two workers.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
from dask.distributed import Client, LocalCluster, wait
from distributed.protocol import deserialize_bytes, serialize_bytelist

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import get_backend

SHAPE = (443, 444, 3)  # 590 kB
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=200, help="of 590 kB (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="of each move (default 5)")
    parser.add_argument("--lists", action="store_true", help="with the column of lists")
    parser.add_argument("--shuffled", type=int, default=1000, help="images that are shuffled")
    args = parser.parse_args()
    columns = ["large_binary", "image", *(["lists"] if args.lists else [])]
    size = int(np.prod(SHAPE)) / MB
    print(f"{args.images} images, {args.images * size:.0f} MB; medians of {args.rounds} rounds\n")
    heads = [f"{name}: seconds | MB" for name in columns]
    print(f"| move | {' | '.join(heads)} | image / large_binary: seconds | memory |")
    print("|---|" + "---:|" * (2 * len(columns) + 2))
    frames = {name: frame(name, args.images) for name in columns}
    with tempfile.TemporaryDirectory() as folder:
        for made in frames.values():
            # Also so that no import or first use is measured.
            made.to_parquet(Path(folder) / "read.parquet")
        for move, function in MOVES.items():
            found = measure(function, frames, Path(folder), args.rounds)
            print_row(move, found)
    del frames
    # Dask can't shuffle the lists: it does not find their dtype again.
    shuffled: dict[str, list] = {name: [] for name in columns if name != "lists"}
    for _ in range(args.rounds):
        for name, rounds in shuffled.items():
            rounds.append(shuffle(name, args.shuffled))
    print_row(f"shuffle of {args.shuffled * size:.0f} MB", medians(shuffled))


def frame(column: str, images: int, first: int = 0) -> pd.DataFrame:
    """Rows of random pixels, and numbers to move them by."""
    rng = np.random.default_rng(first)
    nbytes = int(np.prod(SHAPE))
    flat = rng.integers(0, 256, images * nbytes, np.uint8)
    table = pa.table({"key": rng.permutation(images), "cls": rng.integers(0, 10, images)})
    if column == "image":
        pixels = Pixels(flat, np.full((images, 3), SHAPE, np.int32), [None] * images)
        return get_backend("pandas").frame(table, np.arange(images), pixels)
    places = np.arange(images + 1) * nbytes
    buffers = [None, pa.py_buffer(places)]
    if column == "large_binary":
        array = pa.Array.from_buffers(pa.large_binary(), images, [*buffers, pa.py_buffer(flat)])
    else:
        lists = pa.LargeListArray.from_arrays(places, pa.array(flat))
        edges = [pa.array(np.full(images, edge, np.int32)) for edge in SHAPE]
        array = pa.StructArray.from_arrays([lists, *edges], ["data", "height", "width", "channels"])
    made = get_backend("pandas").frame(table, np.arange(images), None)
    made["image"] = pd.arrays.ArrowExtensionArray(array)
    return made


def take(frame: pd.DataFrame, folder: Path) -> Any:
    return frame.iloc[np.random.default_rng(0).permutation(len(frame))]


def filtered(frame: pd.DataFrame, folder: Path) -> Any:
    return frame[frame["cls"] < 5]


def concat(frame: pd.DataFrame, folder: Path) -> Any:
    return pd.concat([frame.iloc[: len(frame) // 2], frame.iloc[len(frame) // 2 :]])


def merge(frame: pd.DataFrame, folder: Path) -> Any:
    right = pd.DataFrame({"key": np.arange(0, len(frame), 2), "other": 1})
    return frame.merge(right.astype("int64[pyarrow]"), on="key")


def spill(frame: pd.DataFrame, folder: Path) -> Any:
    with (folder / "spilled").open("wb") as file:
        file.writelines(serialize_bytelist(frame, on_error="raise"))
    return deserialize_bytes((folder / "spilled").read_bytes())


MOVES: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "take": take,
    "filter": filtered,
    "sort": lambda frame, folder: frame.sort_values("key"),
    "concat": concat,
    "merge": merge,
    "spill and back": spill,
    "write parquet": lambda frame, folder: frame.to_parquet(folder / "written.parquet"),
    "read parquet": lambda frame, folder: pd.read_parquet(
        folder / "read.parquet", dtype_backend="pyarrow"
    ),
}


def measure(
    move: Callable, frames: dict[str, pd.DataFrame], folder: Path, rounds: int
) -> dict[str, tuple[float, ...]]:
    """Median processor seconds and memory of a move, the columns in turn."""
    found: dict[str, list] = {name: [] for name in frames}
    for _ in range(rounds):
        for name, made in frames.items():
            if move is MOVES["read parquet"]:
                made.to_parquet(folder / "read.parquet")
            found[name].append(in_a_fork(move, made, folder))
    return medians(found)


def medians(rounds: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(map(statistics.median, zip(*each, strict=True)))
        for name, each in rounds.items()
    }


def in_a_fork(move: Callable, frame: pd.DataFrame, folder: Path) -> tuple[float, float]:
    """Processor seconds of a move, and by how many MB memory grew."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(move, frame, folder, sender)
    )
    process.start()
    answer = receiver.recv()
    process.join()
    return answer


def run(move: Callable, frame: pd.DataFrame, folder: Path, sender: Any) -> None:
    before = forget_peak()
    start = time.process_time()
    move(frame, folder)
    sender.send((time.process_time() - start, (peak() - before) / MB))


def forget_peak() -> int:
    """Let this process's peak memory begin here; how much it has now."""
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak() -> int:
    """The most memory, in bytes, since then."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def shuffle(column: str, images: int) -> tuple[float, float]:
    """Processor seconds and memory of two workers that shuffle persisted rows."""
    part = 100
    with (
        dask.config.set({"dataframe.convert-string": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=None, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        meta = frame(column, 1).iloc[:0]
        made = [delayed_frame(column, part, first) for first in range(0, images, part)]
        rows = dd.from_delayed(made, meta=meta, verify_meta=False).persist()
        wait(rows)
        before = client.run(forget_peak)
        seconds = sum(client.run(processor_seconds).values())
        shuffled = rows.shuffle("cls", shuffle_method="p2p").persist()
        wait(shuffled)
        seconds = sum(client.run(processor_seconds).values()) - seconds
        after = client.run(peak)
        assert len(shuffled) == images
        return seconds, max(after[worker] - before[worker] for worker in after) / MB


delayed_frame = dask.delayed(frame)


def processor_seconds() -> float:
    return time.process_time()


def print_row(move: str, found: dict[str, tuple[float, ...]]) -> None:
    cells = [f"{seconds:.4f} | {memory:.0f}" for seconds, memory in found.values()]
    (seconds, memory), (plain_seconds, plain_memory) = found["image"], found["large_binary"]
    ratios = f"{seconds / plain_seconds:.2f} | {memory / max(plain_memory, 1):.2f}"
    print(f"| {move} | {' | '.join(cells)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
