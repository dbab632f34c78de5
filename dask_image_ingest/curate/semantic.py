"""``find_semantic_duplicates`` and ``find_clusters``, by k-means of a model's embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash
from dask import delayed

from dask_image_ingest.arguments import memory_limit, shown, whole_number
from dask_image_ingest.computing import compute, on_workers
from dask_image_ingest.curate.near_hashes import MEMORY
from dask_image_ingest.curate.near_vectors import (
    SAMPLED,
    Scratch,
    StoredVectors,
    invert,
    k_means,
    nearest_kept_vectors,
    scratch_folder,
)
from dask_image_ingest.curate.ranking import (
    Ranked,
    RowsToRank,
    columns_to_join,
    group_columns,
    join_columns,
    merge_ranked,
    of_partitions,
    partition_table,
    resolve_identity,
    row_ids,
    sort_keys,
    with_ranking_columns,
)
from dask_image_ingest.curate.vectors import (
    check_vectors,
    map_vectors,
    on_host,
    to_device_of,
    unit,
    valid_vectors,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, without
from dask_image_ingest.image_counts import reduce_partitions
from dask_image_ingest.typedefs import AnyFrame, Array, DataFrame

_Sample = tuple[np.ndarray, np.ndarray]  # hashes, uint64 (n,), and vectors, float32 (n, d)


def find_semantic_duplicates(
    frame: Frame,
    threshold: float = 0.95,
    *,
    column: str = "embedding",
    keep: Literal["best", "largest", "first"] | str = "best",
    identity: str | None = None,
    memory: str | int = MEMORY,
) -> Frame:
    """Find images with near embeddings, and choose which of each group to keep.

    Computes at once, with the current scheduler, so on the workers of a cluster: one pass over the
    frame, then the search, for a cuDF frame on the workers' GPUs. Vectors that are too many for
    ``memory`` go to files in Dask's ``temporary-directory``, twice 4 bytes a number; this process
    gathers keys, about 0.15 kB a row. The result is lazy if the frame is, and looks each row up by
    its URL, key and offset. Embeddings that are not stored are then computed again, from images
    decoded again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__url__``, ``__key__`` and ``offset`` of
        :func:`dask_image_ingest.read_webdataset_images`, and a column of vectors.
    threshold
        The least cosine of two near vectors, x·y / (‖x‖ ‖y‖): above 0, up to 1.
    column
        The column of vectors, lists of d numbers, as from ``embed``.
    keep, identity
        Which image of a group to keep, and what identifies a row, as for :func:`find_duplicates`;
        ``"best"`` asks the signals of quality that the frame has.
    memory
        The most memory of the search in each process: bytes, or a text such as ``"2 GiB"``.
        Default: 4 GiB.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions and the memory are:

        ``semantic.keep``
            bool: whether to keep the row. Never null.
        ``semantic.group``
            int64: the number of the row's group, of which one row is kept; null if the row has no
            duplicate.
        ``semantic.of``
            string: the key of the row that is kept instead; null in rows that are kept.
        ``semantic.similarity``
            float32: the cosine with that row; null in rows that are kept.

    Raises
    ------
    ArgumentError
        For arguments out of range, if a column is missing, or the vectors differ in length.
    ClusterError
        If a worker can't see the files of another one.

    Notes
    -----
    Deduplication is greedy, in the order of ``keep``: a row is kept unless a kept row before it is
    near; there are no chains. Each row that is not kept has a cosine of at least ``threshold``
    (less 1e-6, for float32) with the one in ``semantic.of``.

    Up to 4,096 vectors are compared in all pairs. More are divided into √n clusters by k-means of a
    sample with a fixed seed; a vector is compared with those of its own cluster, and of others
    whose border is nearer than √(2 - 2 ``threshold``) / 2. Of the rows that a search of all pairs
    finds, at least 99 % are found, in the measurements of the guide. Rows without an embedding, or
    with one that is zero or not finite, are kept.

    Examples
    --------
    >>> found = curate.find_semantic_duplicates(frame, threshold=0.999)
    >>> found[found["semantic.keep"]].shape[0] < len(frame)
    True
    """
    check_vectors(frame, column)
    id_columns = resolve_identity(frame, identity)
    check_threshold(threshold)
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    asarray = backend_of(meta).numpy.asarray
    with scratch_folder(memory_limit(memory)) as scratch:
        ranked, vectors = rank_vectors(frame, column, keep, id_columns, scratch)
        lists = invert(vectors, ranked.hashes, float(threshold), scratch, asarray)
        del vectors
        keeper, similarity = nearest_kept_vectors(lists)
    columns, grouped = group_columns(ranked, keeper, "semantic")
    columns["semantic.similarity"] = pa.array(similarity[grouped], mask=keeper[grouped] < 0)
    verdicts = columns_to_join(id_columns, ranked.ids[grouped], columns, {"semantic.keep": True})
    return join_columns(frame, verdicts)


def find_clusters(frame: Frame, k: int, *, column: str = "embedding", seed: int = 0) -> Frame:
    """Add a column with the number of each vector's cluster.

    Computes the centers at once, by k-means of a sample of 64 vectors for each; the column is lazy
    if the frame is. Vectors that are not stored are computed twice, from images decoded again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    k
        Number of clusters.
    column
        The column of vectors, as from ``embed``.
    seed
        Seed of the sample and the initial centers.

    Returns
    -------
    dataframe
        ``frame`` with a column ``cluster``, int32, added or replaced: the number, 0 to ``k`` - 1,
        of the center with which the vector has the largest cosine; null where there is no vector,
        or one that is zero or not finite.
        It does not depend on the partitions.

    Raises
    ------
    ArgumentError
        If a column is missing, there are fewer than ``k`` vectors, or they differ in length.

    Notes
    -----
    Centers are of length one (spherical k-means), and found in 8 rounds from vectors of the sample
    that are far from each other (greedy k-means++).
    The sample consists of the vectors with the smallest hashes, without those that are zero or not
    finite.

    Examples
    --------
    >>> found = curate.find_clusters(frame, 3)
    >>> found["cluster"].nunique() <= 3
    True
    """
    check_vectors(frame, column)
    k = whole_number("k", k, 1, "pass a positive number of clusters")
    seed = whole_number("seed", seed, 0, "pass a whole number")
    count = SAMPLED * k
    sample = functools.partial(_sample, column=column, count=count, seed=seed)
    merge = functools.partial(_merge, count=count)
    _, sampled = reduce_partitions(select_columns(frame, [column]), sample, merge)
    if len(sampled) < k:
        raise ArgumentError(f"k={k}: the column {column!r} has {len(sampled)} vectors")
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    asarray = backend_of(meta).numpy.asarray
    (centers,) = compute(delayed(_centers)(on_workers(sampled), k, seed, asarray))
    nearest = functools.partial(_nearest, centers=centers)
    return map_vectors(
        frame, [column], {"cluster": "int32"}, nearest,
        length=centers.shape[1], directed=True, called_by="find_clusters", writes=False,
    )  # fmt: skip


def _centers(
    sampled: np.ndarray, k: int, seed: int, asarray: Callable[[np.ndarray], Array]
) -> np.ndarray:
    return on_host(k_means(asarray(sampled), k, np.random.default_rng(seed), spread=True))


def _sample(frame: DataFrame, column: str, count: int, seed: int) -> _Sample:
    """Bottom-k sample of a partition: the vectors with the ``count`` smallest hashes."""
    _, vectors = valid_vectors(frame, column)
    vectors = unit(vectors)
    hashes = [xxhash.xxh3_64_intdigest(vector, seed) for vector in vectors]
    return _smallest(np.array(hashes, np.uint64), vectors, count)


def _merge(samples: list[_Sample], count: int) -> _Sample:
    """Bottom-k sample of several samples."""
    nonempty = [sample for sample in samples if len(sample[0])] or samples[:1]
    lengths = {vectors.shape[1] for _, vectors in nonempty}
    if len(lengths) > 1:
        raise ArgumentError(f"the vectors differ in length: {', '.join(map(str, sorted(lengths)))}")
    hashes, vectors = (np.concatenate(parts) for parts in zip(*nonempty, strict=True))
    return _smallest(hashes, vectors, count)


def _smallest(hashes: np.ndarray, vectors: np.ndarray, count: int) -> _Sample:
    order = np.argsort(hashes, kind="stable")[:count]
    return hashes[order], vectors[order]


def _nearest(vectors: Array, centers: np.ndarray) -> Array:
    # In float64, so that the result of a row does not depend on its partition.
    products = vectors.astype(np.float64) @ to_device_of(centers.astype(np.float64), vectors).T
    return products.argmax(axis=1)


def check_threshold(threshold: object) -> None:
    """Raise ``ArgumentError`` if this is no cosine, above 0 and up to 1."""
    # Written as a range, which rejects NaN.
    if not (isinstance(threshold, (int, float, np.number)) and 0 < threshold <= 1):
        raise ArgumentError(f"threshold={shown(threshold)}: pass a cosine, above 0 and up to 1")


def rank_vectors(
    frame: AnyFrame, column: str, keep: str, identity: tuple[str, ...], scratch: Scratch
) -> tuple[Ranked, StoredVectors]:
    """Rows that have a vector, best first, and the unit vectors, in the order of partitions.

    There are no hashes here: their field has the number of each row's vector.
    """
    frame, rank_by = with_ranking_columns(frame, keep, None)
    frame = select_columns(frame, dict.fromkeys([*identity, column, *rank_by]))
    partitions = frame.npartitions if isinstance(frame, FrameBase) else 1
    to = scratch.for_tasks(partitions)
    found = of_partitions(frame, _rows_to_rank, column, keep, identity, to)
    ranks, parts, lengths = (list(of_all) for of_all in zip(*found, strict=True))
    counts = [len(rows.ids) for rows in ranks]
    of_length = {length for length, rows in zip(lengths, counts, strict=True) if rows}
    if len(of_length) > 1:
        raise ArgumentError(
            f"the vectors of {column!r} differ in length from partition to partition: "
            f"{', '.join(map(str, sorted(of_length)))}"
        )
    starts = np.cumsum([0, *counts])
    numbered = [
        replace(rows, hashes=np.arange(start, stop))
        for rows, (start, stop) in zip(ranks, pairwise(starts), strict=True)
    ]
    return merge_ranked(numbered), StoredVectors(parts, starts, max(of_length, default=0))


def _rows_to_rank(
    frame: DataFrame, column: str, keep: str, identity: tuple[str, ...], scratch: Scratch
) -> tuple[RowsToRank, np.ndarray | str, int]:
    """A partition's rows to rank, their unit vectors, and the length of these."""
    rows, vectors = valid_vectors(frame, column)
    table = partition_table(without(frame, [column])).take(pa.array(rows))
    keys = sort_keys(table, keep, identity)
    ids, none = row_ids(table, identity), np.empty(0, np.int64)
    to_rank = RowsToRank(ids, none, np.zeros(len(rows), bool), keys)
    return to_rank, scratch.put(unit(vectors)), vectors.shape[1]
