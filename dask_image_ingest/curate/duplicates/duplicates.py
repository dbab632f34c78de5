"""``duplicates`` and ``overlaps``: images that a collection has more than once."""

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
from dask_image_ingest.curate.duplicates.hamming import (
    Nearest,
    equal_to_first,
    near_to_first,
    nearest,
)
from dask_image_ingest.curate.duplicates.ranking import Ranked, parse_keep, rank_rows
from dask_image_ingest.curate.duplicates.verdicts import (
    identity_of,
    sorted_verdicts,
    with_verdicts,
)
from dask_image_ingest.curate.pixels.fingerprints import KINDS, Kind, Variant, check_variants
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError

# ThreatExchange's own limit for a match; the search by bands finds nine of ten there.
_FARTHEST = 31


def duplicates(
    frame: Frame,
    by: Kind = "pdq",
    distance: int = 24,
    *,
    variants: Sequence[Variant] = (),
    keep: Literal["largest", "best", "first"] | str = "largest",
    identity: str | None = None,
) -> Frame:
    """Find images that are there more than once, and say which of each to keep.

    Computes at once: fingerprints that the frame lacks, so that each image is decoded once, then
    the groups, in the memory of this process (about 0.3 kB a row). The result is lazy if the frame
    is, and looks each row up by its URL, key and offset; its pixels are decoded again. Store
    hashes before, if you want more than this of a frame: ``checkpoint(fingerprints(ddf)...)``.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__url__``, ``__key__`` and ``offset`` of
        :func:`~dask_image_ingest.read_webdataset_images`, of which the last may be missing, and the
        fingerprint ``by`` or what :func:`fingerprints` makes it of.
    by
        ``"bytes"`` and ``"pixels"`` find equal images, without and with a decode; ``"pdq"`` finds
        near ones too: encoded again, resized, slightly changed.
    distance
        For ``"pdq"``: the most bits, of 256, that two images may differ in, 0 to 31.
    variants
        For ``"pdq"``: the ways in which an image may be mirrored or turned and be near still, by
        their names in :func:`fingerprints`: ``["mirrored"]``, ``["mirrored", "rotated90"]``.
    keep
        Which image of a group stays: the ``"largest"`` by height × width; the ``"best"``, which is
        the largest, and of equally large ones that of the most encoded bytes; the ``"first"``; or
        the one with the largest value in a column of this name, such as ``"quality.blur"``. Equal
        ones go by key, URL and offset.
    identity
        A column of unique values by which rows are told apart, for frames without ``__url__`` and
        ``__key__``.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions are:

        ``duplicate.keep``
            bool: whether to keep the row. Never null.
        ``duplicate.group``
            int64: a number for the rows of a group, of which one is kept; null for a row that is
            like no other.
        ``duplicate.of``
            string: the key of the row that is kept instead; null in rows that are kept.
        ``duplicate.distance``
            int32: in how many bits it differs from that one; null in rows that are kept.

    Raises
    ------
    ArgumentError
        For arguments out of range, and if a column is missing.

    Notes
    -----
    Rows are taken in the order that ``keep`` says, and each stays unless one that stays is near:
    there are no chains by which rows far from each other become one group. Each row that goes is
    within ``distance`` of the one in ``duplicate.of``, the nearest that stays.

    Near hashes are found by 16 bands of 16 bits, of which two must have one in common: all pairs up
    to 15 bits, of random pairs 99.1 % at 24 and 91.3 % at 31 bits. Rows that have no fingerprint
    are kept.

    PDQ hashes of pictures without detail are near by chance. Rows of a ``fingerprint.pdq_quality``
    below 50 are alike only if ``fingerprint.pixels`` is the same, and kept where the frame has PDQ
    hashes and not those of pixels.

    Examples
    --------
    >>> found = curate.duplicates(ddf)
    >>> unique = found[found["duplicate.keep"]]
    >>> len(unique)
    52
    """
    turned = _check(by, distance, variants)
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    known_by = identity_of(frame, identity)
    largest = parse_keep(keep, frame)
    ranked = rank_rows(frame, by, turned, largest, known_by)
    of, apart = _first_alike(ranked, distance)
    columns, concerned = columns_of_groups(ranked, of, "duplicate")
    gone = of[concerned] >= 0
    columns["duplicate.distance"] = pa.array(apart[concerned].astype(np.int32), mask=~gone)
    verdicts = sorted_verdicts(known_by, ranked.rows[concerned], columns, {"duplicate.keep": True})
    return with_verdicts(frame, verdicts)


def overlaps(
    train: Frame,
    test: Any,
    by: Kind = "pdq",
    distance: int = 24,
    *,
    variants: Sequence[Variant] = (),
    identity: str | None = None,
) -> Frame:
    """Find the images of one collection that are in another one too.

    Computes at once, as :func:`duplicates`, and looks rows up lazily; their pixels are decoded
    again.

    Parameters
    ----------
    train
        The frame that gets the columns, as for :func:`duplicates`.
    test
        The frame that they should not be in.
    by, distance, variants, identity
        As for :func:`duplicates`.

    Returns
    -------
    dataframe
        ``train`` with these columns, the same whatever the partitions are:

        ``overlap.found``
            bool: whether ``test`` has the image. Never null.
        ``overlap.of``
            string: the key of the nearest row of ``test``; of equally near ones the first by key,
            URL and offset. Null where none is found.
        ``overlap.distance``
            int32: in how many bits it differs from that one; null where none is found.

    Raises
    ------
    ArgumentError
        For arguments out of range, and if a column is missing.

    Examples
    --------
    >>> train, test = ddf[ddf.cls < 10], ddf[ddf.cls >= 9]
    >>> found = curate.overlaps(train, test)
    >>> clean = found[~found["overlap.found"]]
    >>> len(train) - len(clean)
    4
    """
    turned = _check(by, distance, variants)
    for argument, frame in (("train", train), ("test", test)):
        check_frame(frame._meta if isinstance(frame, FrameBase) else frame, argument)
    known_by = identity_of(train, identity, "train")
    found_by = identity_of(test, identity, "test")
    ranked = rank_rows(train, by, turned, (), known_by)
    others = rank_rows(test, by, (), (), found_by)
    of, apart = _nearest_of(ranked, others, distance)
    found = np.flatnonzero(of >= 0)
    columns = {
        "overlap.found": pa.array(np.ones(len(found), bool)),
        "overlap.of": _text(others.keys.take(pa.array(of[found]))),
        "overlap.distance": pa.array(apart[found].astype(np.int32)),
    }
    return with_verdicts(
        train, sorted_verdicts(known_by, ranked.rows[found], columns, {"overlap.found": False})
    )


def _check(by: Any, distance: Any, variants: Any) -> tuple[Variant, ...]:
    """The variants, if all of these make sense."""
    check_choice("by", by, KINDS)
    advice = f"pass 0 to {_FARTHEST}: bits that PDQ hashes may differ in"
    whole_number("distance", distance, 0, advice, _FARTHEST)
    turned = check_variants(variants)
    if turned and by != "pdq":
        raise ArgumentError(f"variants= are those of PDQ: by={by!r} finds equal images alone")
    return turned


def _first_alike(ranked: Ranked, distance: int) -> Nearest:
    """For each row the row that stays in its place, or -1, and their distance."""
    of = np.full(len(ranked.rows), -1, np.int64)
    apart = np.zeros(len(of), np.int64)
    for rows, is_exact in _kinds(ranked):
        hashes = ranked.hashes if len(rows) == len(of) else ranked.hashes[rows]
        if is_exact:
            first = equal_to_first(hashes[:, 0])
        else:
            first, apart[rows] = near_to_first(hashes, distance)
        of[rows] = np.where(first < 0, -1, rows[first])
    return of, apart


def _nearest_of(ranked: Ranked, others: Ranked, distance: int) -> Nearest:
    """For each row the nearest of ``others``, or -1, and their distance."""
    of = np.full(len(ranked.rows), -1, np.int64)
    apart = np.zeros(len(of), np.int64)
    for (rows, is_exact), (places, _) in zip(_kinds(ranked), _kinds(others), strict=True):
        if not len(places):
            continue
        hashes, known = ranked.hashes[rows], others.hashes[places, 0]
        if is_exact:
            first = _equal(hashes[:, 0], known)
        else:
            first, apart[rows] = nearest(hashes, known, distance)
        of[rows] = np.where(first < 0, -1, places[first])
    return of, apart


def _kinds(ranked: Ranked) -> list[tuple[np.ndarray, bool]]:
    """Rows that are compared for equality, and those that are compared by bits."""
    return [(np.flatnonzero(ranked.is_exact), True), (np.flatnonzero(~ranked.is_exact), False)]


def columns_of_groups(
    ranked: Ranked, of: np.ndarray, prefix: str
) -> tuple[dict[str, pa.Array], np.ndarray]:
    """The columns of all rows that are in a group, and which rows these are."""
    gone = of >= 0
    kept = np.unique(of[gone])  # those that stand for others, best first
    concerned = np.flatnonzero(gone | np.isin(np.arange(len(of)), kept))
    stays = ~gone[concerned]
    of_each = np.where(stays, concerned, of[concerned])
    keys = _text(ranked.keys.take(pa.array(of_each)))
    columns = {
        f"{prefix}.keep": pa.array(stays),
        f"{prefix}.group": pa.array(np.searchsorted(kept, of_each)),
        f"{prefix}.of": pa.array(keys.to_pylist(), pa.string(), mask=stays),
    }
    return columns, concerned


def _equal(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The first of ``others`` that equals each hash, uint64 (n, words); -1 where none does."""
    first = equal_to_first(np.concatenate([others, hashes]))[len(others) :]
    return np.where(first < len(others), first, -1)


def _text(values: pa.ChunkedArray) -> pa.Array:
    chunks = values.combine_chunks()
    return chunks if isinstance(chunks, pa.Array) else pa.array(chunks.to_pylist(), pa.string())
