"""Vectors near and far from each other, tables of them, and a comparison of all with all."""

import numpy as np
import pandas as pd
import pyarrow as pa


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def near(random, vectors, cosines):
    """Vectors that have these cosines with the ones given, in random directions."""
    away = random.standard_normal(vectors.shape)
    away = unit(away - (away * vectors).sum(axis=1, keepdims=True) * vectors)
    cosines = np.broadcast_to(cosines, len(vectors))[:, None]
    return unit(cosines * vectors + np.sqrt(1 - cosines**2) * away)


def topics(random, count, length=64, planted=0.3):
    """Vectors of 40 topics, in any order; some are near to another one, others nearly so."""
    centers = random.standard_normal((40, length)) + random.standard_normal(length)
    vectors = unit(
        centers[random.integers(40, size=count)] + random.standard_normal((count, length))
    )
    some = int(count * planted)
    vectors[:some] = near(
        random, vectors[random.integers(some, count, some)], random.uniform(0.9, 1, some)
    )
    return vectors[random.permutation(count)]


def column_of(vectors):
    """A column of lists as ``map_batches`` makes it; None where a vector is."""
    lists = [None if vector is None else [float(x) for x in vector] for vector in vectors]
    return pd.array(lists, dtype=pd.ArrowDtype(pa.list_(pa.float32())))


def table_of(vectors, **columns):
    """Rows as a read gives them, with a vector each and no image."""
    count = len(vectors)
    return pd.DataFrame(
        {
            "__key__": [f"{number:07d}" for number in range(count)],
            "__url__": [f"/data/{number % 7}.tar" for number in range(count)],
            "offset": np.arange(count) * 512,
            "height": 100,
            "width": 100,
            "embedding": column_of(vectors),
            **columns,
        }
    )


def brute(vectors, threshold):
    """Greedy, all with all: for each row that goes the nearest of those that stay, -1 for these."""
    cosines = unit(vectors).astype(np.float64) @ unit(vectors).T.astype(np.float64)
    kept = []
    for row in range(len(vectors)):
        if not kept or cosines[row, kept].max() < threshold:
            kept.append(row)
    of = np.array(kept)[cosines[:, kept].argmax(axis=1)]
    similarity = cosines[:, kept].max(axis=1)
    of[kept], similarity[kept] = -1, 0
    return of, similarity
