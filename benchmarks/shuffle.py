"""The cost of moving rows whose images are used then: references that move, beside pixels.

    python benchmarks/shuffle.py                            # synthetic photographs
    python benchmarks/shuffle.py --shards train/*.tar       # photographs of one's own, repeated

Each row is a process of its own: shards are read, all rows moved, and the images counted value by
value. Seconds by the clock; the most memory that the process and all below it took together, in
proportion where they share it; and what the two workers of Dask sent to each other, by their own
count. The peers, where they are installed: Ray Data's `random_shuffle` and Daft's `sort` of
decoded images.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from _shards import make_shards

RESULT = "result: "
MOVES: dict[str, Callable] = {
    "shuffle": lambda ddf: ddf.shuffle("cls"),
    "sort_values": lambda ddf: ddf.sort_values("width"),
    "set_index": lambda ddf: ddf.set_index("__key__"),
}


class Row(NamedTuple):
    """A way to move rows, and the package that it needs."""

    name: str
    run: Callable[[list[str]], dict]
    needs: str = "dask"


def ours(move: str, late: bool) -> Callable[[list[str]], dict]:
    def run(paths: list[str]) -> dict:
        import dask

        import dask_image_ingest as dii

        with dask.config.set({"image-ingest.decode-late": late}):
            client = dii.start_cluster(n_workers=2, gpu=False, dashboard_address=None)
            ddf = dii.read_webdataset_images(paths, backend="pandas")
            start = time.perf_counter()
            stats = MOVES[move](ddf).images.channel_stats().compute()
            seconds = time.perf_counter() - start
            sent = sum(client.run(sent_bytes).values())
        return {"seconds": seconds, "sent": sent, "values": int(stats.pixels.sum())}

    return run


def sent_bytes(dask_worker) -> int:
    """What a worker sent, as results and as parts of shuffles, by its own counters."""
    counters = dask_worker.digests_total.items()
    shuffled = sum(value for name, value in counters if is_shuffled_bytes(name))
    return int(dask_worker.transfer_outgoing_bytes_total + shuffled)


def is_shuffled_bytes(name: object) -> bool:
    """Whether a counter is of what a worker's shuffles handed over; half of it to itself."""
    return (
        isinstance(name, tuple)
        and name[0] == "p2p"
        and name[2:4] == ("background-comms", "process")
        and name[-1] == "bytes"
    )


def ray_shuffle(paths: list[str]) -> dict:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    start = time.perf_counter()
    rows = ray.data.read_webdataset(paths).random_shuffle()
    values = rows.map(lambda row: {"values": int(row["jpg"].size)}).sum("values")
    return {"seconds": time.perf_counter() - start, "values": int(values)}


def daft_sort(paths: list[str]) -> dict:
    import daft
    import webdataset

    samples = webdataset.WebDataset(paths, shardshuffle=False).to_tuple("__key__", "jpg", "cls")
    names = ("key", "jpg", "cls")
    start = time.perf_counter()
    columns = dict(zip(names, map(list, zip(*samples, strict=True)), strict=True))
    frame = daft.from_pydict({**columns, "cls": [int(label) for label in columns["cls"]]})
    frame = frame.with_column("jpg", daft.col("jpg").decode_image(mode="RGB")).sort("cls")
    images = frame.collect().to_pydict()["jpg"]
    return {"seconds": time.perf_counter() - start, "values": sum(int(i.size) for i in images)}


ROWS = {
    **{
        f"{move}-{'references' if late else 'pixels'}": Row(
            f"`{move}`, {'references' if late else 'pixels'} move", ours(move, late)
        )
        for move in MOVES
        for late in (True, False)
    },
    "ray": Row("Ray Data, `random_shuffle`", ray_shuffle, "ray"),
    "daft": Row("Daft, `sort` of decoded images", daft_sort, "daft"),
}


def run_row(name: str, paths: list[str], limit: int) -> dict | None:
    """What one process says of its run, and the most memory of it and all below it."""
    command = [sys.executable, __file__, "--row", name, *paths]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    )
    peak = [0]
    watch = threading.Thread(target=watch_memory, args=(process, peak), daemon=True)
    watch.start()
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        return None
    watch.join()
    found = [line.removeprefix(RESULT) for line in out.splitlines() if line.startswith(RESULT)]
    return {**json.loads(found[-1]), "peak": peak[0]} if found else None


def watch_memory(process: subprocess.Popen, peak: list[int]) -> None:
    while process.poll() is None:
        total = 0
        try:
            family = psutil.Process(process.pid)
            for each in [family, *family.children(recursive=True)]:
                total += each.memory_full_info().pss
        except psutil.Error:
            pass
        peak[0] = max(peak[0], total)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--shards", nargs="*", default=[], help="tars to repeat the images of")
    parser.add_argument("--turns", type=int, default=3, help="runs of each row (3)")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a run (300)")
    parser.add_argument("--rows", nargs="*", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--row", choices=[*ROWS], help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(RESULT + json.dumps(ROWS[args.row].run(args.paths)), flush=True)
        return
    names = [name for name in args.rows if importlib.util.find_spec(ROWS[name].needs)]
    with tempfile.TemporaryDirectory() as folder:
        made = make_shards(Path(folder), args.images, 200, args.shards)
        paths = [str(path) for path in made]
        found: dict[str, list[dict | None]] = {name: [] for name in names}
        for _ in range(args.turns):
            for name in names:
                found[name].append(run_row(name, paths, args.limit))
                print(f"{ROWS[name].name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(f"{args.images} images, {args.turns} turns, medians\n")
    print("| | seconds | peak memory, MB | between workers, MB |\n|---|---:|---:|---:|")
    for name, runs in found.items():
        done = [run for run in runs if run is not None]
        if len(done) < len(runs):
            print(f"| {ROWS[name].name} | failed {len(runs) - len(done)} of {len(runs)} | | |")
            continue
        seconds, peak, sent = (
            statistics.median(run.get(key, 0) for run in done)
            for key in ("seconds", "peak", "sent")
        )
        between = f"{sent / 1e6:,.2f}" if "sent" in done[0] else ""
        print(f"| {ROWS[name].name} | {seconds:.1f} | {peak / 1e6:,.0f} | {between} |")


if __name__ == "__main__":
    main()
