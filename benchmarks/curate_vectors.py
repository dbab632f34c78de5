"""Semantic duplicates beside a comparison of all with all: which rows go, and how long it takes.

    python benchmarks/curate_vectors.py --count 100000 --threshold 0.95
    python benchmarks/curate_vectors.py --scale --count 5000000

Two collections: topics with planted neighbours (512 numbers), and patches of photographs of
scikit-image (768 numbers), many of which overlap. Rows are judged in their order.

With ``--scale`` a collection of topics (256 numbers), stored as parquet, goes through
``find_semantic_duplicates``, ``find_clusters`` and ``find_nearest`` on two workers of one thread;
1,000 rows of the result are compared with all others.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dask_image_ingest.curate.near_vectors import (
    StoredVectors,
    invert,
    nearest_kept_vectors,
    scratch_folder,
)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def topics(count: int, random: np.random.Generator, length: int = 512) -> np.ndarray:
    """300 topics of 32 dimensions each; three of ten vectors are near another one: 0.9 to 1."""
    mean, centers = random.standard_normal(length), random.standard_normal((300, length))
    which = random.integers(300, size=count)
    basis = random.standard_normal((300, 32, length)) / np.sqrt(32)
    vectors = np.empty((count, length), np.float32)
    for topic in range(300):
        rows = np.flatnonzero(which == topic)
        inside = 0.8 * random.standard_normal((len(rows), 32)) @ basis[topic]
        outside = 0.2 * random.standard_normal((len(rows), length))
        vectors[rows] = mean + 0.7 * centers[topic] + inside + outside
    vectors = unit(vectors)
    some = int(0.3 * count)
    source = vectors[random.integers(some, count, size=some)]
    cosine = random.uniform(0.9, 1, size=some)[:, None]
    away = random.standard_normal(source.shape)
    away = unit(away - (away * source).sum(axis=1, keepdims=True) * source)
    vectors[:some] = cosine * source + np.sqrt(1 - cosine**2) * away
    return unit(vectors[random.permutation(count)])


def patches(count: int, random: np.random.Generator, side: int = 16) -> np.ndarray:
    """Patches of four photographs, less their mean, with a little noise."""
    from skimage import data

    found = []
    for photo in (data.astronaut(), data.coffee(), data.chelsea(), data.rocket()):
        height, width, _ = photo.shape
        rows = random.integers(0, height - side, count // 4)
        columns = random.integers(0, width - side, count // 4)
        windows = sliding_window_view(photo, (side, side, 3))[rows, columns, 0]
        found.append(windows.reshape(count // 4, -1).astype(np.float32))
    vectors = np.concatenate(found)
    vectors -= vectors.mean(axis=1, keepdims=True)
    vectors += 2 * random.standard_normal(vectors.shape).astype(np.float32)
    return unit(vectors[random.permutation(len(vectors))])


def all_with_all(vectors: np.ndarray, threshold: float) -> np.ndarray:
    """Which rows go, if each that stays takes away the near ones after it."""
    gone = np.zeros(len(vectors), bool)
    kept = np.empty_like(vectors)
    count, least = 0, np.float32(threshold - 1e-6)
    for start in range(0, len(vectors), 1000):
        block = vectors[start : start + 1000]
        near = np.zeros(len(block), bool)
        for first in range(0, count, 20_000):
            near |= (block @ kept[first : min(count, first + 20_000)].T >= least).any(axis=1)
        among = block @ block.T >= least
        for row in np.flatnonzero(~near):
            near[row] = (among[row, :row] & ~near[:row]).any()
        gone[start : start + 1000] = near
        new = block[~near]
        kept[count : count + len(new)] = new
        count += len(new)
    return gone


_PART = 100_000  # rows of a file, for --scale


def write_parts(folder: Path, count: int, seed: int) -> None:
    """Vectors of one collection of topics, as parquet: 3 of 10 are near one of another part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts, length = -(-count // _PART), 256
    shared = np.random.default_rng(seed)
    mean, centers = shared.standard_normal(length), shared.standard_normal((300, length))
    basis = (shared.standard_normal((300, 32, length)) / np.sqrt(32)).astype(np.float32)
    before = np.empty((0, length), np.float32)
    for part in range(parts):
        random = np.random.default_rng([seed, part])
        which = np.sort(random.integers(300, size=min(_PART, count - part * _PART)))
        vectors = 0.2 * random.standard_normal((len(which), length), np.float32)
        for topic in range(300):
            of_topic = slice(*np.searchsorted(which, [topic, topic + 1]))
            inside = random.standard_normal((len(which[of_topic]), 32), np.float32)
            vectors[of_topic] += mean + 0.7 * centers[topic] + 0.8 * inside @ basis[topic]
        vectors = unit(vectors[random.permutation(len(vectors))])
        some = int(0.3 * len(vectors)) if len(before) else 0
        source = before[random.integers(len(before), size=some)] if some else before
        cosine = random.uniform(0.9, 1, size=some)[:, None]
        away = random.standard_normal(source.shape, np.float32)
        away = unit(away - (away * source).sum(axis=1, keepdims=True) * source)
        vectors[:some] = cosine * source + np.sqrt(1 - cosine**2) * away
        before = vectors[random.permutation(len(vectors))]
        keys = [f"{part * _PART + row:09d}" for row in range(len(vectors))]
        lists = pa.FixedSizeListArray.from_arrays(pa.array(before.ravel()), length)
        table = pa.table({"__key__": keys, "__url__": ["a.tar"] * len(keys), "embedding": lists})
        pq.write_table(table, folder / f"{part:04d}.parquet", compression="none")


class PeakMemory:
    """The most memory of this process and its children together, in bytes, by the kernel's PSS."""

    def __init__(self) -> None:
        self.peak, self._ended = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import psutil

        this = psutil.Process()
        while not self._ended.wait(0.5):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)

    def take(self) -> int:
        """The peak since the last call."""
        peak, self.peak = self.peak, 0
        return peak


def scale(options: argparse.Namespace) -> None:
    """Seconds, memory and recall of a collection that one process should not hold."""
    import dask.dataframe as dd
    import psutil
    from distributed import Client, LocalCluster

    import dask_image_ingest as dii

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_parts(Path(folder), options.count, options.seed)
        print(f"{options.count:,} vectors of 256 written in {time.perf_counter() - start:.0f} s")
        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="2.5 GiB", dashboard_address=None
        )
        memory = PeakMemory()
        with cluster, Client(cluster):
            frame = dd.read_parquet(folder, dtype_backend="pyarrow")

            def told(name: str, compute: object) -> object:
                memory.take()
                before = _processor_seconds(psutil.Process())
                start = time.perf_counter()
                with dii.progress():
                    result = compute()
                seconds = time.perf_counter() - start
                cores = _processor_seconds(psutil.Process()) - before
                print(
                    f"{name}: {seconds:.0f} s, {cores:.0f} s of cores, peak "
                    f"{memory.take() / 2**30:.2f} GiB of all processes",
                    flush=True,
                )
                return result

            found = told(
                "find_semantic_duplicates",
                lambda: dii.curate.find_semantic_duplicates(
                    frame, options.threshold, keep="first", memory=options.memory
                ),
            )
            columns = ["__key__", "semantic.of", "semantic.similarity"]
            verdicts = told("verdicts joined", lambda: found[columns].compute())
            query = frame["embedding"].head(1).iloc[0]
            told("find_nearest", lambda: dii.curate.find_nearest(frame, query, 10))
            told(
                "find_clusters, k=100",
                lambda: dii.curate.find_clusters(frame, 100)["cluster"].value_counts().compute(),
            )
        verdicts = verdicts.sort_values("__key__")
        of = verdicts["semantic.of"].fillna("-1").astype("int64").to_numpy()
        similarity = verdicts["semantic.similarity"].fillna(0).to_numpy(np.float32)
        _compare_sample(Path(folder), of, similarity, options)


def _processor_seconds(process: object) -> float:
    times = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def _compare_sample(
    folder: Path, of: np.ndarray, similarity: np.ndarray, options: argparse.Namespace
) -> None:
    """Compare 1,000 rows with all that stay: who goes needs one before it, who stays has none."""
    import pyarrow.parquet as pq

    rows = np.sort(np.random.default_rng(0).permutation(len(of))[:1000])
    paths = sorted(folder.glob("*.parquet"))

    def vectors_of(path: Path) -> np.ndarray:
        column = pq.read_table(path, columns=["embedding"])["embedding"].combine_chunks()
        return column.flatten().to_numpy().reshape(-1, 256)

    wanted = [
        rows[(rows >= n * _PART) & (rows < (n + 1) * _PART)] - n * _PART for n in range(len(paths))
    ]
    sample = np.concatenate([vectors_of(p)[some] for p, some in zip(paths, wanted, strict=True)])
    best, first = np.full(len(rows), -1, np.float32), np.zeros(len(rows), bool)
    for number, path in enumerate(paths):
        kept = np.flatnonzero(of[number * _PART : (number + 1) * _PART] < 0)
        cosines = sample @ vectors_of(path)[kept].T
        kept += number * _PART
        cosines[kept == rows[:, None]] = -1
        best = np.maximum(best, cosines.max(axis=1))
        is_near = (cosines >= options.threshold - 1e-6) & (kept < rows[:, None])
        first |= is_near.any(axis=1)
    gone = of[rows] >= 0
    print(
        f"{(of >= 0).sum():,} of {len(of):,} go; of {len(rows)} rows compared with all that stay, "
        f"{first.sum()} should go and {(gone & first).sum()} of these do, {(gone & ~first).sum()} "
        f"others; the nearest is found for {(similarity[rows] >= best - 1e-5)[gone].sum()} of "
        f"{gone.sum()}; chains: {(of[of[of >= 0]] >= 0).sum()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--memory", default="2 GiB", help="memory= of the search, for --scale")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    if options.scale:
        scale(options)
        return
    for make in (topics, patches):
        vectors = make(options.count, np.random.default_rng(options.seed))
        start = time.perf_counter()
        stored = StoredVectors([vectors], np.array([0, len(vectors)]), vectors.shape[1])
        with scratch_folder(4 << 30) as scratch:
            rows = np.arange(len(vectors))
            lists = invert(stored, rows, options.threshold, scratch)
            of, similarity = nearest_kept_vectors(lists)
        seconds, gone = time.perf_counter() - start, of >= 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        start = time.perf_counter()
        wanted = all_with_all(vectors, options.threshold)
        brute = time.perf_counter() - start
        print(
            f"{make.__name__} {vectors.shape}: {gone.sum():,} go in {seconds:.1f} s, peak {peak:,} "
            f"MiB; all with all: {wanted.sum():,} in {brute:.1f} s, of which "
            f"{(gone & wanted).sum() / max(wanted.sum(), 1):.4%} go here; chains: "
            f"{gone[of[gone]].sum()}; least cosine {similarity[gone].min():.6f}"
        )


if __name__ == "__main__":
    main()
