"""Persisted pixels: fetched by the client, and shuffled where memory does not hold them.

    python benchmarks/persisted.py gather [--rounds 7]
    python benchmarks/persisted.py shuffle [--gigabytes 4] [--seconds 240]

The same bytes as a column of `image`, as plain Arrow `large_binary` and, to be fetched, as one
NumPy array. `gather`: a partition of 315 MB of a worker process, by way of the scheduler (which is
the client's process) and straight from the worker: processor time of both processes. `shuffle`:
partitions of 59 MB of two workers of 1 GB, which write the rest to disk; each way ends after so
many seconds.
"""

import argparse
import logging
import os
import statistics
import time
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import psutil
from dask.distributed import Client, LocalCluster, futures_of, wait
from moves import SHAPE, frame

NBYTES = int(np.prod(SHAPE))
ROWS = 100  # of a partition that is shuffled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", default="gather", choices=["gather", "shuffle"])
    parser.add_argument("--rounds", type=int, default=7, help="of each transfer (default 7)")
    parser.add_argument("--gigabytes", type=float, default=4, help="shuffled (default 4)")
    parser.add_argument("--seconds", type=int, default=240, help="for each shuffle (default 240)")
    args = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.ERROR)
    if args.what == "gather":
        gather(args.rounds)
        return
    for column in ("large_binary", "image"):
        shuffle(column, int(args.gigabytes * 1e9 / NBYTES / ROWS), args.seconds)


def gather(rounds: int) -> None:
    """Print what each transfer takes, all in turn."""
    made = {name: (frame, name, 315_000_000 // NBYTES) for name in ("image", "large_binary")}
    made["NumPy array"] = (random_bytes, 315_000_000)
    found: dict[tuple[bool, str], list[tuple[float, float]]] = {
        (direct, name): [] for direct in (False, True) for name in made
    }
    with LocalCluster(
        n_workers=1, threads_per_worker=1, memory_limit=None, dashboard_address=None
    ) as cluster:
        clients = [Client(cluster, direct_to_workers=direct) for direct in (False, True)]
        (pid,) = clients[0].run(os.getpid).values()
        processes = [psutil.Process(), psutil.Process(pid)]
        for _ in range(rounds):
            for direct, name in found:
                client = clients[direct]
                future = client.submit(*made[name], pure=False)
                wait(future)
                start, used = time.perf_counter(), processor_seconds(processes)
                client.gather(future)
                seconds = time.perf_counter() - start
                found[direct, name].append((processor_seconds(processes) - used, seconds))
                del future
        for client in clients:
            client.close()
    print("| 315 MB | processor seconds | of the array | MB/s, best |\n|---|---:|---:|---:|")
    medians = {way: statistics.median(used for used, _ in each) for way, each in found.items()}
    for (direct, name), each in found.items():
        ratio = medians[direct, name] / medians[direct, "NumPy array"]
        print(
            f"| {name}, {'straight' if direct else 'by the scheduler'} "
            f"| {medians[direct, name]:.2f} | {ratio:.2f} "
            f"| {315 / min(seconds for _, seconds in each):.0f} |"
        )


def processor_seconds(processes: list[psutil.Process]) -> float:
    """What processes have taken of a processor so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def shuffle(column: str, partitions: int, seconds: int) -> None:
    """Print how far a shuffle of persisted rows came."""
    with (
        dask.config.set({"dataframe.convert-string": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="1 GB", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        made = [dask.delayed(frame)(column, ROWS, first) for first in range(partitions)]
        meta = frame(column, 1).iloc[:0]
        start = time.monotonic()
        rows = dd.from_delayed(made, meta=meta, verify_meta=False).persist()
        told(f"{column}, {partitions} partitions persisted", rows, start, seconds, client)
        start = time.monotonic()
        told(f"{column}, shuffled", counted(rows), start, seconds, client)


def counted(rows: Any) -> Any:
    """Rows of each partition after a shuffle."""
    return rows.shuffle("cls", shuffle_method="p2p").map_partitions(len).persist()


def told(what: str, collection: Any, start: float, seconds: int, client: Client) -> None:
    """Wait for a collection; say what came of it."""
    futures = futures_of(collection)
    try:
        wait(futures, timeout=seconds)
        end = {future.status for future in futures}
    except TimeoutError:
        end = "not finished"
    states = client.run_on_scheduler(
        lambda dask_scheduler: [
            (each.status.name, f"{each.metrics['memory'] / 1e6:.0f} MB")
            for each in dask_scheduler.workers.values()
        ]
    )
    print(f"{what}: {end} after {time.monotonic() - start:.0f} s; workers {states}", flush=True)


if __name__ == "__main__":
    main()
