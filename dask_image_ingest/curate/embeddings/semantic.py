"""``semantic_duplicates``: images that a model finds alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import dask
import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.curate.duplicates.duplicates import columns_of_groups
from dask_image_ingest.curate.duplicates.ranking import (
    Ranked,
    RowsToRank,
    columns_of_order,
    merge_ranked,
    order_of,
    parse_keep,
)
from dask_image_ingest.curate.duplicates.verdicts import (
    identities,
    identity_of,
    sorted_verdicts,
    with_verdicts,
)
from dask_image_ingest.curate.embeddings.near_vectors import near_to_first
from dask_image_ingest.curate.embeddings.vectors import check_vectors, unit, valid_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of


def semantic_duplicates(
    frame: Frame,
    threshold: float = 0.95,
    *,
    column: str = "embedding",
    keep: Literal["largest", "best", "first"] | str = "largest",
    identity: str | None = None,
) -> Frame:
    """Find images whose embeddings are near, and say which of each to keep.

    Computes at once: the embeddings, which are gathered in this process, 4 bytes a number and for a
    moment twice that (a million of 768 numbers: 3 GB, then 6), then the groups, on this process's
    GPU for a frame of cuDF. The result is lazy if the frame is, and looks each row up by its URL,
    key and offset; embeddings that are not stored are made again, from images that are decoded
    again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__url__``, ``__key__`` and ``offset`` of
        :func:`dask_image_ingest.read_webdataset_images`, and a column of vectors.
    threshold
        The least cosine of two vectors, x·y / (‖x‖ ‖y‖), that are near: above 0, up to 1.
    column
        The column of vectors, lists of d numbers, such as ``embed`` makes.
    keep, identity
        Which image of a group stays, and what rows are told apart by, as for :func:`duplicates`.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions are:

        ``semantic.keep``
            bool: whether to keep the row. Never null.
        ``semantic.group``
            int64: a number for the rows of a group, of which one is kept; null for a row that is
            like no other.
        ``semantic.of``
            string: the key of the row that is kept instead; null in rows that are kept.
        ``semantic.similarity``
            float32: the cosine with that one; null in rows that are kept.

    Raises
    ------
    ArgumentError
        For arguments out of range, if a column is missing, or the vectors differ in length.

    Notes
    -----
    Rows are taken in the order that ``keep`` says, and each stays unless one that stays is near:
    there are no chains. Each row that goes has a cosine of at least ``threshold`` (less 1e-6, for
    float32) with the one in ``semantic.of``.

    Up to 4,096 vectors are compared with all. More are divided into √n clusters by k-means of a
    sample, seeded; a vector is compared with those of its own cluster, and of others whose border
    is nearer than √(2 - 2 ``threshold``) / 2. Of the rows that a search of all pairs finds, at
    least 99 % are found, in the measurements of the guide. Rows without an embedding, or with one
    that is zero or not finite, are kept.

    Examples
    --------
    >>> found = curate.semantic_duplicates(frame, threshold=0.999)
    >>> found[found["semantic.keep"]].shape[0] < len(frame)
    True
    """
    check_vectors(frame, column)
    known_by = identity_of(frame, identity)
    # NaN is not in the range.
    if not (isinstance(threshold, (int, float, np.number)) and 0 < threshold <= 1):
        raise ArgumentError(f"threshold={shown(threshold)}: pass a cosine, above 0 and up to 1")
    largest = parse_keep(keep, frame)
    ranked, vectors = _rank_vectors(frame, column, largest, known_by)
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    of, similarity = near_to_first(backend_of(meta).numpy.asarray(vectors), float(threshold))
    columns, concerned = columns_of_groups(ranked, of, "semantic")
    gone = of[concerned] >= 0
    columns["semantic.similarity"] = pa.array(similarity[concerned], mask=~gone)
    verdicts = sorted_verdicts(known_by, ranked.rows[concerned], columns, {"semantic.keep": True})
    return with_verdicts(frame, verdicts)


def _rank_vectors(
    frame: Any, column: str, largest: tuple[str, ...], identity: tuple[str, ...]
) -> tuple[Ranked, np.ndarray]:
    """Rows that have a vector, best first, and their vectors at length one."""
    frame = frame[list(dict.fromkeys([*identity, column, *columns_of_order(largest)]))]
    told = (column, largest, identity)
    if isinstance(frame, FrameBase):
        lazy = [dask.delayed(_compact)(part, *told) for part in frame.to_delayed()]
        parts = list(dask.compute(*lazy))
    else:
        parts = [_compact(frame, *told)]
    lengths = {found.shape[1] for _, found in parts if len(found)}
    if len(lengths) > 1:
        raise ArgumentError(
            f"the vectors of {column!r} differ in length from partition to partition: "
            f"{', '.join(map(str, sorted(lengths)))}"
        )
    starts = np.cumsum([0, *(len(found) for _, found in parts)])
    # The number of each row among all of them takes the place of a hash.
    numbered = [
        replace(rows, hashes=np.arange(start, start + len(found)))
        for (rows, found), start in zip(parts, starts[:-1], strict=True)
    ]
    ranked = merge_ranked(numbered)
    place = np.full(starts[-1], -1)
    place[ranked.hashes] = np.arange(len(ranked.hashes))
    vectors = np.empty((len(ranked.hashes), max(lengths, default=0)), np.float32)
    for number, start in enumerate(starts[:-1]):
        found = parts[number][1]
        at = place[start : start + len(found)]
        if len(found):  # those of no rows have any length
            vectors[at[at >= 0]] = found[at >= 0]
        parts[number] = (parts[number][0], found[:0])  # large: let go of
    for start in range(0, len(vectors), 4096):
        vectors[start : start + 4096] = unit(vectors[start : start + 4096])
    return ranked, vectors


def _compact(
    frame: Any, column: str, largest: tuple[str, ...], identity: tuple[str, ...]
) -> tuple[RowsToRank, np.ndarray]:
    rows, vectors = valid_vectors(frame, column)
    backend = backend_of(frame)
    table = backend.to_arrow(frame.drop(columns=column)).take(pa.array(rows))
    order = order_of(table, largest, identity)
    numbers, exact = np.empty(0, np.int64), np.zeros(len(rows), bool)
    return RowsToRank(identities(table, identity), numbers, exact, order), vectors
