"""``find_duplicates`` and ``find_overlaps``: images that a collection has more than once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import (
    check_choice,
    check_frame,
    whole_number,
)
from dask_image_ingest.curate.fingerprints import KINDS, Kind, Variant, check_variants
from dask_image_ingest.curate.hamming import (
    Nearest,
    first_equal,
    nearest,
    nearest_kept,
)
from dask_image_ingest.curate.ranking import (
    Ranked,
    columns_to_join,
    join_columns,
    parse_keep,
    rank_rows,
    resolve_identity,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError

# ThreatExchange's own limit for a match. The search by bands still finds nine of ten pairs there.
_MAX_DISTANCE = 31


def find_duplicates(
    frame: Frame,
    by: Kind = "pdq",
    distance: int = 24,
    *,
    variants: Sequence[Variant] = (),
    keep: Literal["largest", "best", "first"] | str = "largest",
    identity: str | None = None,
) -> Frame:
    """Find duplicate images, and choose which of each group to keep.

    Computes at once: fingerprints that the frame lacks, for which each image is decoded once, then
    the groups, in the memory of this process (about 0.3 kB a row). The result is lazy if the frame
    is, and looks each row up by its URL, key and offset; using its pixels decodes them again. To
    use a frame's hashes several times, store them first:
    ``checkpoint(compute_fingerprints(ddf)...)``.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__url__``, ``__key__`` and, optionally,
        ``offset`` of :func:`~dask_image_ingest.read_webdataset_images`, and the fingerprint ``by``
        or what :func:`compute_fingerprints` computes it from.
    by
        ``"bytes"`` and ``"pixels"`` find equal images, without and with a decode; ``"pdq"`` finds
        near ones too: encoded again, resized, slightly changed.
    distance
        For ``"pdq"``: the most bits, of 256, in which two near images may differ, 0 to 31.
    variants
        For ``"pdq"``: how a near image may also be mirrored or turned, by the names in
        :func:`compute_fingerprints`: ``["mirrored"]``, ``["mirrored", "rotated90"]``.
    keep
        Which image of a group to keep: the ``"largest"`` by height × width; the ``"best"``, which
        is the largest, with ties to the most encoded bytes; the ``"first"``; or the one with the
        largest value in a column of this name, such as ``"quality.blur"``. Remaining ties go by
        key, URL and offset.
    identity
        A column of unique values that identifies rows, for frames without ``__url__`` and
        ``__key__``.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions are:

        ``duplicate.keep``
            bool: whether to keep the row. Never null.
        ``duplicate.group``
            int64: the number of the row's group, of which one row is kept; null if the row has no
            duplicate.
        ``duplicate.of``
            string: the key of the row that is kept instead; null in rows that are kept.
        ``duplicate.distance``
            int32: Hamming distance to that row, in bits; null in rows that are kept.

    Raises
    ------
    ArgumentError
        For arguments out of range, and if a column is missing.

    Notes
    -----
    Deduplication is greedy, in the order of ``keep``: a row is kept unless a kept row before it is
    near. So chains of near rows never join rows far from each other. Each row that is not kept is
    within ``distance`` of the one in ``duplicate.of``, the nearest kept row.

    Near hashes are found by 16 bands of 16 bits, of which two must have one in common: all pairs up
    to 15 bits, of random pairs 99.1 % at 24 and 91.3 % at 31 bits. Rows that have no fingerprint
    are kept.

    Drop bad images before, not after: one of them may be the row that is kept.

    PDQ hashes of pictures without detail are near by chance. Rows with a
    ``fingerprint.pdq_quality`` below 50 are duplicates only if ``fingerprint.pixels`` is equal; if
    the frame has PDQ hashes but none of pixels, they are kept.

    Examples
    --------
    >>> found = curate.find_duplicates(ddf)
    >>> unique = found[found["duplicate.keep"]]
    >>> len(unique)
    52
    """
    variants = _check(by, distance, variants)
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    id_columns = resolve_identity(frame, identity)
    rank_by = parse_keep(keep, frame)
    ranked = rank_rows(frame, by, variants, rank_by, id_columns)
    keeper, bits = _keepers(ranked, distance)
    columns, grouped = group_columns(ranked, keeper, "duplicate")
    is_kept = keeper[grouped] < 0
    columns["duplicate.distance"] = pa.array(bits[grouped].astype(np.int32), mask=is_kept)
    verdicts = columns_to_join(id_columns, ranked.ids[grouped], columns, {"duplicate.keep": True})
    return join_columns(frame, verdicts)


def find_overlaps(
    train: Frame,
    test: Any,
    by: Kind = "pdq",
    distance: int = 24,
    *,
    variants: Sequence[Variant] = (),
    identity: str | None = None,
) -> Frame:
    """Find the images of one collection that another one has too, such as its test set.

    Computes at once, as :func:`find_duplicates`. The result looks rows up lazily; using its pixels
    decodes them again.

    Parameters
    ----------
    train
        The frame that gets the columns, as for :func:`find_duplicates`.
    test
        The frame whose images ``train`` should not have.
    by, distance, variants, identity
        As for :func:`find_duplicates`.

    Returns
    -------
    dataframe
        ``train`` with these columns, the same whatever the partitions are:

        ``overlap.found``
            bool: whether ``test`` has the image. Never null.
        ``overlap.of``
            string: the key of the nearest row of ``test``, with ties to the first by key, URL and
            offset; null where none is found.
        ``overlap.distance``
            int32: Hamming distance to that row, in bits; null where none is found.

    Raises
    ------
    ArgumentError
        For arguments out of range, and if a column is missing.

    Examples
    --------
    >>> train, test = ddf[ddf.cls < 10], ddf[ddf.cls >= 9]
    >>> found = curate.find_overlaps(train, test)
    >>> clean = found[~found["overlap.found"]]
    >>> len(train) - len(clean)
    4
    """
    variants = _check(by, distance, variants)
    for argument, frame in (("train", train), ("test", test)):
        check_frame(frame._meta if isinstance(frame, FrameBase) else frame, argument)
    id_columns = resolve_identity(train, identity, "train")
    test_id_columns = resolve_identity(test, identity, "test")
    ranked = rank_rows(train, by, variants, (), id_columns)
    others = rank_rows(test, by, (), (), test_id_columns)
    match, bits = _matches(ranked, others, distance)
    found = np.flatnonzero(match >= 0)
    columns = {
        "overlap.found": pa.array(np.ones(len(found), bool)),
        "overlap.of": _text(others.keys.take(pa.array(match[found]))),
        "overlap.distance": pa.array(bits[found].astype(np.int32)),
    }
    return join_columns(
        train, columns_to_join(id_columns, ranked.ids[found], columns, {"overlap.found": False})
    )


def _check(by: Any, distance: Any, variants: Any) -> tuple[Variant, ...]:
    """Check arguments; return the variants as a tuple."""
    check_choice("by", by, KINDS)
    advice = f"pass 0 to {_MAX_DISTANCE}: bits that PDQ hashes may differ in"
    whole_number("distance", distance, 0, advice, _MAX_DISTANCE)
    variants = check_variants(variants)
    if variants and by != "pdq":
        raise ArgumentError(f"variants= are those of PDQ: by={by!r} finds equal images alone")
    return variants


def _keepers(ranked: Ranked, distance: int) -> Nearest:
    """The row that is kept instead of each row (-1: it is kept), and their distance in bits."""
    keeper = np.full(len(ranked.ids), -1, np.int64)
    bits = np.zeros(len(keeper), np.int64)
    for rows, is_exact in _by_comparison(ranked):
        # Avoid a copy of all hashes where all are compared in one way.
        hashes = ranked.hashes if len(rows) == len(keeper) else ranked.hashes[rows]
        if is_exact:
            first = first_equal(hashes[:, 0])
        else:
            first, bits[rows] = nearest_kept(hashes, distance)
        keeper[rows] = np.where(first < 0, -1, rows[first])
    return keeper, bits


def _matches(ranked: Ranked, others: Ranked, distance: int) -> Nearest:
    """The nearest of ``others`` for each row (-1: none), and their distance in bits."""
    match = np.full(len(ranked.ids), -1, np.int64)
    bits = np.zeros(len(match), np.int64)
    for (rows, is_exact), (other_rows, _) in zip(
        _by_comparison(ranked), _by_comparison(others), strict=True
    ):
        if not len(other_rows):
            continue
        hashes, other_hashes = ranked.hashes[rows], others.hashes[other_rows, 0]
        if is_exact:
            first = _equal(hashes[:, 0], other_hashes)
        else:
            first, bits[rows] = nearest(hashes, other_hashes, distance)
        match[rows] = np.where(first < 0, -1, other_rows[first])
    return match, bits


def _by_comparison(ranked: Ranked) -> list[tuple[np.ndarray, bool]]:
    """Rows compared for equality, with True; rows compared by Hamming distance, with False."""
    return [(np.flatnonzero(ranked.is_exact), True), (np.flatnonzero(~ranked.is_exact), False)]


def group_columns(
    ranked: Ranked, keeper: np.ndarray, prefix: str
) -> tuple[dict[str, pa.Array], np.ndarray]:
    """Columns of the rows that are in a group, and the numbers of these rows.

    ``keeper``, int64 (n,), is the row that is kept instead of each row; -1 for one that is kept.
    """
    is_dropped = keeper >= 0
    keepers = np.unique(keeper[is_dropped])  # ascending, so that groups are numbered best first
    grouped = np.flatnonzero(is_dropped | np.isin(np.arange(len(keeper)), keepers))
    is_kept = ~is_dropped[grouped]
    group_keeper = np.where(is_kept, grouped, keeper[grouped])
    keys = _text(ranked.keys.take(pa.array(group_keeper)))
    columns = {
        f"{prefix}.keep": pa.array(is_kept),
        f"{prefix}.group": pa.array(np.searchsorted(keepers, group_keeper)),
        f"{prefix}.of": pa.array(keys.to_pylist(), pa.string(), mask=is_kept),
    }
    return columns, grouped


def _equal(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The first of ``others`` that equals each hash, both uint64 (n, words); -1: none does."""
    first = first_equal(np.concatenate([others, hashes]))[len(others) :]
    return np.where(first < len(others), first, -1)


def _text(values: pa.ChunkedArray) -> pa.Array:
    chunks = values.combine_chunks()
    return chunks if isinstance(chunks, pa.Array) else pa.array(chunks.to_pylist(), pa.string())
