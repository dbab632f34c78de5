"""``find_semantic_duplicates``: near-duplicates by a model's embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import dask
import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.curate.duplicates.find_duplicates import group_columns
from dask_image_ingest.curate.duplicates.ranking import (
    Ranked,
    RowsToRank,
    merge_ranked,
    parse_keep,
    ranking_columns,
    sort_keys,
)
from dask_image_ingest.curate.duplicates.verdicts import (
    resolve_identity,
    row_ids,
    sorted_verdicts,
    with_verdicts,
)
from dask_image_ingest.curate.embeddings.near_vectors import nearest_kept
from dask_image_ingest.curate.embeddings.vectors import check_vectors, unit, valid_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of


def find_semantic_duplicates(
    frame: Frame,
    threshold: float = 0.95,
    *,
    column: str = "embedding",
    keep: Literal["largest", "best", "first"] | str = "largest",
    identity: str | None = None,
) -> Frame:
    """Find images with near embeddings, and choose which of each group to keep.

    Computes at once: gathers the embeddings in this process, at 4 bytes a number and briefly twice
    that (a million of 768 numbers: 3 GB, then 6), then finds the groups, on this process's GPU for
    a cuDF frame. The result is lazy if the frame is, and looks each row up by its URL, key and
    offset. Embeddings that are not stored are then computed again, from images decoded again.

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
        Which image of a group to keep, and what identifies a row, as for :func:`find_duplicates`.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions are:

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
    # Written as a range, which rejects NaN.
    if not (isinstance(threshold, (int, float, np.number)) and 0 < threshold <= 1):
        raise ArgumentError(f"threshold={shown(threshold)}: pass a cosine, above 0 and up to 1")
    rank_by = parse_keep(keep, frame)
    ranked, vectors = _rank_vectors(frame, column, rank_by, id_columns)
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    keeper, similarity = nearest_kept(backend_of(meta).numpy.asarray(vectors), float(threshold))
    columns, grouped = group_columns(ranked, keeper, "semantic")
    columns["semantic.similarity"] = pa.array(similarity[grouped], mask=keeper[grouped] < 0)
    verdicts = sorted_verdicts(id_columns, ranked.ids[grouped], columns, {"semantic.keep": True})
    return with_verdicts(frame, verdicts)


def _rank_vectors(
    frame: Any, column: str, rank_by: tuple[str, ...], identity: tuple[str, ...]
) -> tuple[Ranked, np.ndarray]:
    """Rows that have a vector, best first, and their unit vectors, float32 (n, d)."""
    frame = frame[list(dict.fromkeys([*identity, column, *ranking_columns(rank_by)]))]
    columns = (column, rank_by, identity)
    if isinstance(frame, FrameBase):
        lazy = [dask.delayed(_rows_to_rank)(part, *columns) for part in frame.to_delayed()]
        parts = list(dask.compute(*lazy))
    else:
        parts = [_rows_to_rank(frame, *columns)]
    lengths = {vectors.shape[1] for _, vectors in parts if len(vectors)}
    if len(lengths) > 1:
        raise ArgumentError(
            f"the vectors of {column!r} differ in length from partition to partition: "
            f"{', '.join(map(str, sorted(lengths)))}"
        )
    starts = np.cumsum([0, *(len(vectors) for _, vectors in parts)])
    # There are no hashes here: their field carries each row's number before ranking.
    numbered = [
        replace(rows, hashes=np.arange(start, start + len(vectors)))
        for (rows, vectors), start in zip(parts, starts[:-1], strict=True)
    ]
    ranked = merge_ranked(numbered)
    rank = np.full(starts[-1], -1)  # by row number; -1 for a repetition of a row
    rank[ranked.hashes] = np.arange(len(ranked.hashes))
    ranked_vectors = np.empty((len(ranked.hashes), max(lengths, default=0)), np.float32)
    for number, start in enumerate(starts[:-1]):
        rows, vectors = parts[number]
        ranks = rank[start : start + len(vectors)]
        if len(vectors):  # an empty partition's vectors may have another length
            ranked_vectors[ranks[ranks >= 0]] = vectors[ranks >= 0]
        parts[number] = (rows, vectors[:0])  # free the memory
    for start in range(0, len(ranked_vectors), 4096):
        block = slice(start, start + 4096)
        ranked_vectors[block] = unit(ranked_vectors[block])
    return ranked, ranked_vectors


def _rows_to_rank(
    frame: Any, column: str, rank_by: tuple[str, ...], identity: tuple[str, ...]
) -> tuple[RowsToRank, np.ndarray]:
    rows, vectors = valid_vectors(frame, column)
    backend = backend_of(frame)
    table = backend.to_arrow(frame.drop(columns=column)).take(pa.array(rows))
    keys = sort_keys(table, rank_by, identity)
    no_hashes, is_exact = np.empty(0, np.int64), np.zeros(len(rows), bool)
    return RowsToRank(row_ids(table, identity), no_hashes, is_exact, keys), vectors
