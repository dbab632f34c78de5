"""The cost of very many small shards, beside as many bare tasks of Dask.

    python benchmarks/scale.py [--shards 10000] [--graph 100000] [--rounds 1] [--peers ray daft]

100 shards of 100 samples (a JPEG of 32 × 32 and a label) are made, and linked under as many names
as asked for, with an index each, and in another folder with one index for all. Each question is
asked of the shards and of the control: a frame of `dask.dataframe.from_map` with as many
partitions, whose function gives one frame that lies in memory. All on one cluster, in turn.
Processor time is that of the client with the scheduler, and that of the workers, which have begun.
Peers read the same shards without indexes, each in a process of its own that has begun.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import _checkout  # noqa: F401
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from _shards import Sample, as_jpeg, write_shards
from PIL import Image

import dask_image_ingest as dii

SAMPLES = 100  # of a shard
DISTINCT = 100  # shards that are written; all others are links to them
CLASSES = 1000

# All that bare tasks have in common with a read: rows, labels and widths.
FRAME = pd.DataFrame({"cls": np.arange(SAMPLES), "width": np.full(SAMPLES, 32, "int32")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--graph", type=int, default=100_000, help="shards of the graph alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", default="", help="regular expression")
    parser.add_argument("--questions", default="", help="regular expression")
    parser.add_argument("--peers", nargs="*", default=[], choices=["ray", "daft"])
    parser.add_argument("--peer-python", default=sys.executable)
    args = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        bases = base_shards(Path(folder) / "base")
        paths = links(Path(folder), bases, args.shards)
        print(f"{args.shards:,} shards, {args.shards * SAMPLES:,} rows; {os.cpu_count()} cores\n")
        ways = {way: build for way, build in reads(paths).items() if re.search(args.ways, way)}
        asked = {name: ask for name, ask in QUESTIONS.items() if re.search(args.questions, name)}
        with dii.start_cluster() as client:
            compare(ways, asked, client, args)
        for peer in args.peers:
            for question in ("len", "groupby"):
                print(f"| {question} | {peer} | {ask_peer(peer, question, paths.each, args)} |")
        if args.graph:
            print(f"\nThe graph alone of {args.graph:,} shards\n")
            graph_alone(links(Path(folder), bases, args.graph), args.graph)


def reads(paths: Links) -> dict[str, Callable[[], Any]]:
    """Ways to the same rows."""
    shards = len(list(Path(paths.each).parent.glob("*.tar")))
    together: dict[str, Any] = {"shards_per_partition": "auto"}
    return {
        "bare tasks": lambda: bare(shards),
        "indexed": lambda: read(paths.each),
        "one index": lambda: read(paths.one),
        "no index": lambda: read(paths.each, index=False),
        "together, indexed": lambda: read(paths.each, **together),
        "together, one index": lambda: read(paths.one, **together),
        "together, no index": lambda: read(paths.each, index=False, **together),
        "bare tasks, as many": lambda: bare(-(-shards * SAMPLES // 10_000)),
    }


def bare(partitions: int) -> Any:
    return dd.from_map(take, range(partitions), meta=FRAME.iloc[:0])


def take(_: int) -> pd.DataFrame:
    return FRAME


def read(paths: str, **options: Any) -> Any:
    return dii.read_webdataset_images(paths, backend="pandas", **options)


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "build": lambda ddf: ddf.npartitions,
    "`len`": len,
    "filter of 1 %": lambda ddf: len(ddf[ddf.cls < CLASSES // 100].compute()),
    "0.1 %, decoded": lambda ddf: len(ddf[ddf.cls == 0].compute()),
    '`groupby("cls").size()`': lambda ddf: len(ddf.groupby("cls").size().compute()),
    "`cls.value_counts()`": lambda ddf: len(ddf.cls.value_counts().compute()),
}


class Cost(NamedTuple):
    """Seconds by the clock, and of the processors for the client and for the workers."""

    seconds: float
    client: float
    workers: float


def compare(
    ways: dict[str, Callable[[], Any]],
    asked: dict[str, Callable[[Any], Any]],
    client: Any,
    args: argparse.Namespace,
) -> None:
    for build in ways.values():
        build().partitions[:4].compute()  # imports, on either side
    workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
    print("| | | seconds | of bare tasks | client and scheduler, ms a shard | workers |")
    print("|---|---|---:|---:|---:|---:|")
    for question, ask in asked.items():
        control = None
        for way, build in ways.items():
            cost = median(ask, build, workers, args.rounds)
            control = control or cost
            client_ms, workers_ms = (1000 * each / args.shards for each in cost[1:])
            print(
                f"| {question} | {way} | {cost.seconds:.2f} | "
                f"{cost.seconds / control.seconds:.2f} × | {client_ms:.2f} | {workers_ms:.2f} |",
                flush=True,
            )


def ask_peer(peer: str, question: str, paths: str, args: argparse.Namespace) -> str:
    """Seconds of a peer for a question, read of the shards included."""
    script = str(Path(__file__).with_name("_remote_peers.py"))
    command = [args.peer_python, script, peer, json.dumps([paths]), question]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr.splitlines()[-1]}"
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["count"] == (args.shards * SAMPLES if question == "len" else CLASSES), answer
    return f"{answer['seconds']:.2f}"


def median(
    ask: Callable[[Any], Any],
    build: Callable[[], Any],
    workers: list[psutil.Process],
    rounds: int,
) -> Cost:
    """The cost of a question, the read of it included."""
    costs = []
    for _ in range(rounds):
        client, others, start = time.process_time(), spent(workers), time.perf_counter()
        ask(build())
        seconds = time.perf_counter() - start
        costs.append(Cost(seconds, time.process_time() - client, spent(workers) - others))
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def spent(workers: list[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in workers)


def graph_alone(paths: Links, shards: int) -> None:
    print("| | | tasks | seconds | µs a shard |\n|---|---|---:|---:|---:|")
    for way, build in reads(paths).items():
        start = time.perf_counter()
        ddf = build()
        built = time.perf_counter() - start
        tasks = len(ddf["cls"].sum().__dask_graph__())
        graph = time.perf_counter() - start - built
        for what, seconds in {"build": built, "graph of a sum": graph}.items():
            print(f"| {what} | {way} | {tasks:,} | {seconds:.2f} | {1e6 * seconds / shards:.0f} |")


def base_shards(folder: Path) -> list[Path]:
    """Shards with indexes beside them."""
    jpegs = [as_jpeg(Image.new("RGB", (32, 32), (shade, 90, 60))) for shade in range(0, 250, 10)]
    samples = (Sample(jpeg, "", number % CLASSES) for number, jpeg in enumerate(cycle(jpegs)))
    paths = write_shards(folder, islice(samples, DISTINCT * SAMPLES), SAMPLES)
    dii.write_index(paths)
    return paths


class Links(NamedTuple):
    """Shards with an index each, and the same with one index for all."""

    each: str
    one: str


def links(folder: Path, bases: list[Path], count: int) -> Links:
    """Names for shards and their indexes, in folders of their own."""
    each, one = folder / f"{count}", folder / f"{count}-one"
    each.mkdir()
    for number in range(count):
        for suffix in (".tar", ".tar.index.parquet"):
            base = bases[number % len(bases)].with_suffix(suffix)
            os.link(base, each / f"{number:06d}{suffix}")
    with dask.config.set(scheduler="threads"):
        dii.write_index(str(each / "*.tar"), combined=True)
    one.mkdir()
    for path in each.glob("*.tar"):
        os.link(path, one / path.name)
    (each / "_index.parquet").rename(one / "_index.parquet")
    return Links(str(each / "*.tar"), str(one / "*.tar"))


if __name__ == "__main__":
    main()
