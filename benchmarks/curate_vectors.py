"""Semantic duplicates beside a comparison of all with all: which rows go, and how long it takes.

    python benchmarks/curate_vectors.py --count 100000 --threshold 0.95

Two collections: topics with planted neighbours (512 numbers), and patches of photographs of
scikit-image (768 numbers), many of which overlap. Rows are judged in their order.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dask_image_ingest.curate.semantic import nearest_kept_vectors


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    for make in (topics, patches):
        vectors = make(options.count, np.random.default_rng(options.seed))
        start = time.perf_counter()
        of, similarity = nearest_kept_vectors(vectors, options.threshold)
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
