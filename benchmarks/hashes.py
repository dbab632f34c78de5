"""The search for near hashes among millions of random ones, with pairs planted among them.

    python benchmarks/hashes.py 1000000 4000000 10000000
    python benchmarks/hashes.py 100000000 --distance 24 --memory "4 GiB" --no-new
    python benchmarks/hashes.py 1000000 --peers

Each line is a process of its own. Pairs are planted at 8, 16, 24 and 31 bits, 1 % of a million rows
at each. `look` takes a second look at pairs of 25 to 64 bits, all of which show one picture. `new`
compares 1 % new hashes with the others, as stored. Peers (faiss, imagededup) run where they are
installed, in one thread; they need nothing of this package but this file.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter, process_time

import numpy as np

PLANTED = (8, 16, 24, 31)
_BLOCK = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("counts", nargs="*", type=int, default=[1_000_000, 4_000_000, 10_000_000])
    parser.add_argument("--distance", type=int, nargs="*", default=[24, 31])
    parser.add_argument("--memory", default="4 GiB")
    parser.add_argument("--no-new", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--way", choices=WAYS, help="one measurement, in this process")
    args = parser.parse_args()
    if args.way:
        measure(args.way, args.counts[0], args.distance[0], args.memory)
        return
    print(f"{'':28}{'rows':>12}{'bits':>5}{'s':>9}{'core s':>9}{'GiB':>7}  found at {PLANTED}")
    for count in args.counts:
        for distance in args.distance:
            for way in WAYS:
                if (way in PEERS) != args.peers or (way == "new" and args.no_new):
                    continue
                if way in PEERS and not find_spec(PEERS[way]):
                    print(f"{way}: {PEERS[way]} is not installed")
                    continue
                command = [sys.executable, __file__, str(count), "--distance", str(distance)]
                command += ["--way", way, "--memory", args.memory]
                subprocess.run(command, check=False)


def measure(way: str, count: int, distance: int, memory: str) -> None:
    """Print what one way finds of ``count`` hashes, and what it takes."""
    hashes, pairs = planted(count)
    before = peak()
    search = WAYS[way](hashes, pairs, distance, memory)
    start, used = perf_counter(), process_time()
    found = search()
    wall, cpu = perf_counter() - start, process_time() - used
    shares = ", ".join(f"{share:.4f}" for share in found)
    print(
        f"{way:28}{count:12,}{distance:5}{wall:9.1f}{cpu:9.1f}{peak():7.2f}  {shares}"
        f"  (hashes and their making: {before:.2f} GiB)",
        flush=True,
    )


def planted(count: int) -> tuple[np.ndarray, int]:
    """Random hashes, uint64 (count, 4). The last rows are near to the first ones, pair by pair."""
    random = np.random.default_rng(1)
    pairs = min(10_000, count // 400)
    hashes = np.empty((count, 4), np.uint64)
    for start in range(0, count, _BLOCK):
        block = hashes[start : start + _BLOCK]
        block[:] = random.integers(0, 2**64, block.shape, dtype=np.uint64)
    for number, bits in enumerate(PLANTED):
        rows = hashes[number * pairs : (number + 1) * pairs]
        stop = count - number * pairs
        hashes[stop - pairs : stop] = flipped(random, rows, bits)
    return hashes, pairs


def flipped(random: np.random.Generator, hashes: np.ndarray, bits: int) -> np.ndarray:
    """Hashes that differ from these in so many random bits each."""
    raw = np.unpackbits(hashes.view(np.uint8), axis=1)
    places = np.argpartition(random.random(raw.shape), bits, axis=1)[:, :bits]
    np.put_along_axis(raw, places, 1 - np.take_along_axis(raw, places, axis=1), axis=1)
    return np.packbits(raw, axis=1).view(np.uint64)


def shares(of: np.ndarray, pairs: int) -> list[float]:
    """The share of pairs found at each distance, where each row is `of` another (-1: none)."""
    found = []
    for number in range(len(PLANTED)):
        stop = len(of) - number * pairs
        expected = np.arange(number * pairs, (number + 1) * pairs)
        found.append(float((of[stop - pairs : stop] == expected).mean()))
    return found


Search = Callable[[], list[float]]


def ours(hashes: np.ndarray, pairs: int, distance: int, memory: str) -> Search:
    import _checkout  # noqa: F401
    from dask.utils import parse_bytes

    from dask_image_ingest.curate.near_hashes import nearest_kept

    rows = hashes[:, None]
    return lambda: shares(nearest_kept(rows, distance, memory=parse_bytes(memory))[0], pairs)


def look(hashes: np.ndarray, pairs: int, distance: int, memory: str) -> Search:
    import _checkout  # noqa: F401
    from dask.utils import parse_bytes

    from dask_image_ingest.curate.near_hashes import SecondLook, nearest_kept
    from dask_image_ingest.curate.second_look import are_same

    pictures = np.random.default_rng(2).integers(0, 256, (1024, 32, 32)).astype(np.uint8)

    def same(rows: np.ndarray, others: np.ndarray, variants: np.ndarray) -> np.ndarray:
        thumbnails = pictures[others % len(pictures)]
        return are_same(thumbnails, thumbnails, "pandas")

    rows, second = hashes[:, None], SecondLook(64, same)
    limit = parse_bytes(memory)
    return lambda: shares(nearest_kept(rows, distance, memory=limit, look=second)[0], pairs)


def new(hashes: np.ndarray, pairs: int, distance: int, memory: str) -> Search:
    """The last 1 % of the rows beside the others, then with each other."""
    import _checkout  # noqa: F401
    from dask.utils import parse_bytes

    from dask_image_ingest.curate.near_hashes import nearest, nearest_kept

    limit = parse_bytes(memory)
    stop = len(hashes) - len(hashes) // 100
    rows = hashes[stop:, None]

    def search() -> list[float]:
        of, _ = nearest(rows, hashes[:stop], distance, limit)
        nearest_kept(rows, distance, of >= 0, limit)
        return shares(np.concatenate([np.full(stop, -1), of]), pairs)

    return search


def faiss_hash(kind: str) -> Callable[[np.ndarray, int, int, str], Search]:
    def prepare(hashes: np.ndarray, pairs: int, distance: int, memory: str) -> Search:
        import faiss

        faiss.omp_set_num_threads(1)
        data = hashes.view(np.uint8).reshape(len(hashes), 32)

        def search() -> list[float]:
            bits = int(np.log2(len(hashes)))
            if kind == "hash":
                index = faiss.IndexBinaryHash(256, bits)
                index.nflip = 2
            elif kind == "multi":
                index = faiss.IndexBinaryMultiHash(256, 256 // bits, bits)
                index.nflip = 1
            else:
                index = faiss.IndexBinaryFlat(256)
            index.add(data)
            # Of a pair the second row: the planted rows alone, not all.
            queries = data if kind != "flat" else data[-len(PLANTED) * pairs :]
            of = np.full(len(hashes), -1)
            first = len(hashes) - len(queries)
            for start in range(0, len(queries), 10_000):
                limits, _, near = index.range_search(queries[start : start + 10_000], distance + 1)
                query = (
                    np.repeat(np.arange(len(limits) - 1), np.diff(limits.astype(int)))
                    + first
                    + start
                )
                earlier = near < query
                of[query[earlier]] = near[earlier]
            return shares(of, pairs)

        return search

    return prepare


def imagededup(hashes: np.ndarray, pairs: int, distance: int, memory: str) -> Search:
    """imagededup's tree in Python: built of all hashes, asked for 100 planted rows."""
    from imagededup.handlers.search.bktree import BKTree

    few = 25
    names = {str(row): int.from_bytes(h.tobytes(), "little") for row, h in enumerate(hashes)}

    def search() -> list[float]:
        tree = BKTree(names, lambda one, other: (one ^ other).bit_count())
        of = np.full(len(hashes), -1)
        for number in range(len(PLANTED)):
            stop = len(hashes) - number * pairs
            for row in range(stop - pairs, stop - pairs + few):
                near = [int(name) for name, _ in tree.search(names[str(row)], tol=distance)]
                of[row] = min((other for other in near if other < row), default=-1)
        return [share * pairs / few for share in shares(of, pairs)]

    return search


def peak() -> float:
    """The most memory this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


WAYS: dict[str, Callable[[np.ndarray, int, int, str], Search]] = {
    "all": ours,
    "look": look,
    "new": new,
    "faiss IndexBinaryHash": faiss_hash("hash"),
    "faiss IndexBinaryMultiHash": faiss_hash("multi"),
    "faiss, planted rows x all": faiss_hash("flat"),
    "imagededup BKTree, 100 rows": imagededup,
}
PEERS = {
    "faiss IndexBinaryHash": "faiss",
    "faiss IndexBinaryMultiHash": "faiss",
    "faiss, planted rows x all": "faiss",
    "imagededup BKTree, 100 rows": "imagededup",
}

if __name__ == "__main__":
    main()
