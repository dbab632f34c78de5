"""``find_duplicates`` and ``find_overlaps``: images that a collection, or two, have twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import (
    check_choice,
    check_frame,
    memory_limit,
    shown,
    whole_number,
)
from dask_image_ingest.curate.fingerprints import KINDS, Kind, Variant, check_variants
from dask_image_ingest.curate.hash_store import StoredHashes, read_hashes
from dask_image_ingest.curate.near_hashes import (
    MEMORY,
    Nearest,
    SecondLook,
    first_equal,
    nearest,
    nearest_kept,
)
from dask_image_ingest.curate.near_vectors import invert, nearest_of, scratch_folder
from dask_image_ingest.curate.ranking import (
    Keys,
    Ranked,
    columns_to_join,
    group_columns,
    join_columns,
    rank_rows,
    resolve_identity,
)
from dask_image_ingest.curate.second_look import are_same, turned
from dask_image_ingest.curate.semantic import check_threshold, rank_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import BackendName, backend_of
from dask_image_ingest.typedefs import AnyFrame

# Twice ThreatExchange's own limit for a match. Unrelated photographs are never as near.
_MAX_DISTANCE = 64

# Unrelated photographs are hardly ever as near.
_MAX_LOOK = 80

_PAIRS_AT_ONCE = 1 << 17  # of a second look: their thumbnails take 0.3 GB here


def find_duplicates(
    frame: Frame,
    by: Kind = "pdq",
    distance: int = 24,
    *,
    variants: Sequence[Variant] = (),
    keep: Literal["best", "largest", "first"] | str = "best",
    identity: str | None = None,
    against: Frame | str | PathLike[str] | None = None,
    second_look: int = 64,
    memory: str | int = MEMORY,
    storage_options: dict[str, Any] | None = None,
) -> Frame:
    """Find duplicate images, and choose which of each group to keep.

    Computes at once: fingerprints that the frame lacks, for which each image is decoded once, then
    the groups. Hashes and keys are gathered in this process (about 0.15 kB a row); near hashes are
    searched with the current scheduler, so on the workers of a cluster. The result is lazy if the
    frame is, and looks each row up by its URL, key and offset; using its pixels decodes them again.
    To use a frame's hashes several times, store them first:
    ``checkpoint(compute_fingerprints(ddf, ["pdq", "pixels", "thumbnail"])...)``.

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
        For ``"pdq"``: the most bits, of 256, in which two near images may differ, 0 to 64. Above 31
        unrelated forms and pages of text are near, and the search takes many times as long.
    variants
        For ``"pdq"``: how a near image may also be mirrored or turned, by the names in
        :func:`compute_fingerprints`: ``["mirrored"]``, ``["mirrored", "rotated90"]``.
    keep
        Which image of a group to keep: the ``"best"`` (see the notes); the ``"largest"`` by height
        × width; the ``"first"``; or the one with the largest value in a column of this name, such
        as ``"quality.sharpness"``, which is computed if it is a missing signal of
        :func:`measure_quality`. Remaining ties go by key, URL and offset.
    identity
        A column of unique values that identifies rows, for frames without ``__url__`` and
        ``__key__``.
    against
        Rows that are kept already, and come before those of ``frame``: their hashes as stored by
        :func:`write_hashes`, a folder, local or remote, or another frame. Those are not compared
        with each other, so that the search costs little more than the new rows do.
    second_look
        For ``"pdq"``: pairs that differ in more bits than ``distance``, and at most in so many, are
        compared once more by thumbnails (see the notes), 0 to 80; 0: none. Only if the frame has
        ``fingerprint.thumbnail``, or has images and no ``fingerprint.pdq``.
    memory
        The most memory of the search, beside the hashes: bytes, or a text such as ``"2 GiB"``.
        Default: 4 GiB.
    storage_options
        For the file system of a remote folder that ``against`` names.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions and the memory are:

        ``duplicate.keep``
            bool: whether to keep the row. Never null.
        ``duplicate.group``
            int64: the number of the row's group, of which one row is kept; null if the row has no
            duplicate.
        ``duplicate.of``
            string: the key of the row that is kept instead; null in rows that are kept.
        ``duplicate.distance``
            int32: Hamming distance to that row, in bits, beyond ``distance`` after a second look;
            null in rows that are kept.

    Raises
    ------
    ArgumentError
        For arguments out of range, if a column is missing, and if stored hashes are damaged.

    Notes
    -----
    Deduplication is greedy, in the order of ``keep``: a row is kept unless a kept row before it is
    near. So chains of near rows never join rows far from each other. Each row that is not kept is
    within ``distance`` of the one in ``duplicate.of``, the nearest kept row, or was found to be the
    same by a second look at both.

    The second look finds pictures that were cropped, turned by a degree, framed or written on. A
    grey thumbnail of 32 × 32 pixels is compared with crops of the other one at five scales, 1 to
    0.86, and nine places, and the other way round; of the best three alignments the quarter of the
    pixels that differ most is left out; two pictures are the same if the others correlate by 0.94.
    A row is compared with at most 16 rows before it. Pages and drawings, two fifths of which are
    one ground, white or within four grey levels, get none. Pictures that differ in less than a
    quarter of their pixels, such as frames of one scene, may be found the same: pass 0 for these.
    Thumbnails that are computed here take 1 kB a row of memory, on the workers of a cluster; for
    millions of rows store them first, by ``compute_fingerprints(ddf, ["pdq", "pixels",
    "thumbnail"])`` and ``checkpoint``.

    Up to 131,072 different hashes, all near pairs are found. Of more, 99.9 % of random pairs at
    ``distance`` are, and more of nearer ones; hashes that are alike in crowds may lose as many
    again. All rows that are connected by near pairs are then compared with each other. Rows that
    have no fingerprint are kept; a warning in the log counts them.

    The ``"best"`` image is the larger that was not enlarged; of one size, colour before grey, RGB
    before CMYK, PNG before JPEG; then the one with more encoded bytes. An image counts as enlarged,
    and so as a tenth of its area, if ``quality.fine_detail`` is below 0.12, and as grey if
    ``quality.grayscale`` is above 0.96; both are computed in the decode of the fingerprints. For
    ``"bytes"`` and ``"pixels"``, and in frames without images, only signals that the frame has are
    asked. Noise, text over a picture and a higher quality of encoding are more bytes: pass
    ``"first"`` or a column where you know which one is the original.

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
    nbytes = memory_limit(memory)
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    id_columns = resolve_identity(frame, identity)
    wide = _check_look(second_look, by, distance)
    before = None
    if against is not None:
        before = _rows_before(against, by, identity, "against", storage_options, wide > 0)
    ranked = rank_rows(frame, by, variants, keep, id_columns, wide > 0)
    backend = _backend_name(frame)
    look = _look(wide, ranked, ranked, variants, backend)
    if before is None:
        keeper, bits = nearest_kept(
            ranked.hashes,
            distance,
            memory=nbytes,
            is_exact=ranked.is_exact,
            overwrite_hashes=True,
            look=look,
        )
    else:
        look_before = _look(wide, ranked, before, variants, backend)
        ranked, keeper, bits = _keepers_against(
            ranked, before, distance, nbytes, (look, look_before)
        )
    columns, grouped = group_columns(ranked, keeper, "duplicate")
    is_kept = keeper[grouped] < 0
    columns["duplicate.distance"] = pa.array(bits[grouped].astype(np.int32), mask=is_kept)
    if before is not None:
        old = len(keeper) - len(ranked.ids)
        is_new = grouped >= old
        columns = {name: values.filter(pa.array(is_new)) for name, values in columns.items()}
        grouped = grouped[is_new] - old
    verdicts = columns_to_join(id_columns, ranked.ids[grouped], columns, {"duplicate.keep": True})
    return join_columns(frame, verdicts)


def find_overlaps(
    train: Frame,
    test: Frame | str | PathLike[str],
    by: Kind | str = "pdq",
    distance: int = 24,
    *,
    threshold: float = 0.95,
    variants: Sequence[Variant] = (),
    identity: str | None = None,
    second_look: int = 64,
    memory: str | int = MEMORY,
    storage_options: dict[str, Any] | None = None,
) -> Frame:
    """Find the images of one collection that another one has too, such as its test set.

    Computes at once, as :func:`find_duplicates`. The result looks rows up lazily; using its pixels
    decodes them again.

    Parameters
    ----------
    train
        The frame that gets the columns, as for :func:`find_duplicates`.
    test
        The frame whose images ``train`` should not have, or its hashes as stored by
        :func:`write_hashes`.
    by
        A fingerprint, as for :func:`find_duplicates`; or a column of vectors of both frames, as
        from :func:`embed`, which finds images with near embeddings.
    distance
        For fingerprints, as for :func:`find_duplicates`.
    threshold
        For vectors: the least cosine, as for :func:`find_semantic_duplicates`.
    variants
        For fingerprints, as for :func:`find_duplicates`.
    identity
        As for :func:`find_duplicates`.
    second_look
        For ``"pdq"``, as for :func:`find_duplicates`, if both sides have thumbnails.
    memory
        As for :func:`find_duplicates`.
    storage_options
        For the file system of a remote folder that ``test`` names.

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
            int32: Hamming distance to that row, in bits; null where none is found. Not for vectors.
        ``overlap.similarity``
            float32: the cosine with that row; null where none is found. For vectors only.

    Raises
    ------
    ArgumentError
        For arguments out of range, if a column is missing, or the vectors differ in length.

    Notes
    -----
    Vectors are gathered and searched as by :func:`find_semantic_duplicates`: up to 4,096 of both
    frames in all pairs, more of them in clusters, by which nearly all near pairs are found. Rows
    without a direction have no overlap.

    Examples
    --------
    >>> train, test = ddf[ddf.cls < 10], ddf[ddf.cls >= 9]
    >>> found = curate.find_overlaps(train, test)
    >>> clean = found[~found["overlap.found"]]
    >>> len(train) - len(clean)
    4
    """
    check_frame(train._meta if isinstance(train, FrameBase) else train, "train")
    id_columns = resolve_identity(train, identity, "train")
    nbytes = memory_limit(memory)
    if not isinstance(by, str) or by not in KINDS:
        if by not in train.columns:
            kinds = ", ".join(map(repr, KINDS))
            raise ArgumentError(
                f"by={shown(by)}: choose {kinds}, or a column of vectors of train= and test="
            )
        if variants:
            raise ArgumentError(f"variants= are those of PDQ: by={by!r} compares vectors")
        return _overlaps_of_vectors(train, test, by, threshold, id_columns, identity, nbytes)
    variants = _check(by, distance, variants)
    wide = _check_look(second_look, by, distance)
    others = _rows_before(test, by, identity, "test", storage_options, wide > 0)
    ranked = rank_rows(train, by, variants, "first", id_columns, wide > 0)
    look = _look(wide, ranked, others, variants, _backend_name(train))
    match, bits = _matches(ranked, others, distance, nbytes, look)
    columns = {"overlap.distance": pa.array(bits.astype(np.int32))}
    return _join_overlaps(train, id_columns, ranked, others.keys, match, columns)


def _overlaps_of_vectors(
    train: AnyFrame,
    test: AnyFrame | str | PathLike[str],
    column: str,
    threshold: float,
    id_columns: tuple[str, ...],
    identity: str | None,
    memory: int,
) -> AnyFrame:
    if isinstance(test, (str, PathLike)):
        raise ArgumentError(
            f"test={shown(str(test))}: write_hashes() stores no vectors; pass a frame with the "
            f"column {column!r}, or by= of the hashes that are stored"
        )
    check_frame(test._meta if isinstance(test, FrameBase) else test, "test")
    if column not in test.columns:
        raise ArgumentError(f"by={column!r}: test= has no such column; pass one of both frames")
    check_threshold(threshold)
    meta = train._meta if isinstance(train, FrameBase) else train
    asarray = backend_of(meta).numpy.asarray
    other_columns = resolve_identity(test, identity, "test")
    with scratch_folder(memory // 2) as scratch:  # for each frame
        others, other_vectors = rank_vectors(test, column, "first", other_columns, scratch)
        ranked, vectors = rank_vectors(train, column, "first", id_columns, scratch)
        lengths = vectors.length, other_vectors.length
        if all(lengths) and lengths[0] != lengths[1]:
            raise ArgumentError(
                f"by={column!r}: vectors of train= have {lengths[0]} numbers, those of test= "
                f"{lengths[1]}; pass vectors of one model"
            )
        rows = np.concatenate([others.hashes, ranked.hashes + other_vectors.starts[-1]])
        both = other_vectors.joined(vectors)
        lists = invert(both, rows, float(threshold), scratch, asarray)
        match, similarity = nearest_of(lists, len(others.ids))
    columns = {"overlap.similarity": pa.array(similarity)}
    return _join_overlaps(train, id_columns, ranked, others.keys, match, columns)


def _join_overlaps(
    train: AnyFrame,
    id_columns: tuple[str, ...],
    ranked: Ranked,
    keys: Keys,
    match: np.ndarray,
    columns: dict[str, pa.Array],
) -> AnyFrame:
    """``train`` with the row of ``keys`` that matches each row (-1: none), and more columns."""
    found = np.flatnonzero(match >= 0)
    columns = {
        "overlap.found": pa.array(np.ones(len(found), bool)),
        "overlap.of": keys.take(match[found]),
        **{name: values.take(pa.array(found)) for name, values in columns.items()},
    }
    return join_columns(
        train, columns_to_join(id_columns, ranked.ids[found], columns, {"overlap.found": False})
    )


def _check(by: object, distance: object, variants: Iterable[Any]) -> tuple[Variant, ...]:
    """Check arguments; return the variants as a tuple."""
    check_choice("by", by, KINDS)
    advice = f"pass 0 to {_MAX_DISTANCE}: bits that PDQ hashes may differ in"
    whole_number("distance", distance, 0, advice, _MAX_DISTANCE)
    variants = check_variants(variants)
    if variants and by != "pdq":
        raise ArgumentError(f"variants= are those of PDQ: by={by!r} finds equal images alone")
    return variants


def _check_look(second_look: object, by: str, distance: int) -> int:
    """Bits up to which pairs are looked at twice; 0: none are."""
    advice = f"pass 0 to {_MAX_LOOK}: bits up to which pairs are looked at twice; 0: none are"
    wide = whole_number("second_look", second_look, 0, advice, _MAX_LOOK)
    return wide if by == "pdq" and wide > distance else 0


def _backend_name(frame: AnyFrame) -> BackendName:
    return backend_of(frame._meta if isinstance(frame, FrameBase) else frame).name


def _look(
    wide: int,
    ranked: Ranked,
    others: Ranked | StoredHashes,
    variants: tuple[Variant, ...],
    backend: BackendName,
) -> SecondLook | None:
    """The second look at rows beside others; None: not all have thumbnails."""
    thumbnails, other_thumbnails = ranked.thumbnails, others.thumbnails
    if not wide or thumbnails is None or other_thumbnails is None:
        return None

    def same(rows: np.ndarray, other_rows: np.ndarray, variant: np.ndarray) -> np.ndarray:
        found = np.zeros(len(rows), bool)
        for start in range(0, len(rows), _PAIRS_AT_ONCE):
            some = slice(start, start + _PAIRS_AT_ONCE)
            ones, twos = thumbnails(rows[some]), other_thumbnails(other_rows[some])
            for number, name in enumerate(variants, 1):
                is_turned = variant[some] == number
                ones[is_turned] = turned(ones[is_turned], name)
            found[some] = are_same(ones, twos, backend)
        return found

    return SecondLook(wide, same)


def _rows_before(
    rows: AnyFrame | str | PathLike[str],
    by: Kind,
    identity: str | None,
    argument: str,
    storage_options: dict[str, Any] | None,
    with_thumbnails: bool,
) -> Ranked | StoredHashes:
    """Hashes and keys of other rows: those of a folder, or of a frame."""
    if isinstance(rows, (str, PathLike)):
        return read_hashes(rows, by, argument, storage_options)
    check_frame(rows._meta if isinstance(rows, FrameBase) else rows, argument)
    id_columns = resolve_identity(rows, identity, argument)
    return rank_rows(rows, by, (), "first", id_columns, with_thumbnails)


def _keepers_against(
    ranked: Ranked,
    before: Ranked | StoredHashes,
    distance: int,
    memory: int,
    looks: tuple[SecondLook | None, SecondLook | None],
) -> tuple[Ranked, np.ndarray, np.ndarray]:
    """`nearest_kept` if the rows ``before`` come first, and none of them goes.

    Returns the rows before that are near any, by their keys alone, then the new ones; the keeper of
    all these, and the bits. Overwrites the hashes. ``looks`` are those at pairs of new rows, and at
    pairs with the rows before.
    """
    look, look_before = looks
    match, match_bits = _matches(ranked, before, distance, memory, look_before)
    found = match >= 0
    keeper, bits = nearest_kept(
        ranked.hashes,
        distance,
        found,
        memory,
        is_exact=ranked.is_exact,
        overwrite_hashes=True,
        look=look,
    )
    taken = np.unique(match[found])
    # Ties go to the rows before.
    nearer = found & ((keeper < 0) | (match_bits <= bits))
    keeper = np.where(keeper < 0, -1, keeper + len(taken))
    keeper[nearer] = np.searchsorted(taken, match[nearer])
    every = np.arange(len(keeper))
    keys = [before.keys.take(taken), ranked.keys.take(every)]
    none = np.zeros(len(taken), np.int64)
    return (
        replace(ranked, keys=Keys(pa.chunked_array(keys))),
        np.concatenate([none - 1, keeper]),
        np.concatenate([none, np.where(nearer, match_bits, bits)]),
    )


def _matches(
    ranked: Ranked,
    others: Ranked | StoredHashes,
    distance: int,
    memory: int,
    look: SecondLook | None,
) -> Nearest:
    """The nearest of ``others`` for each row (-1: none), and their distance in bits."""
    match = np.full(len(ranked.ids), -1, np.int64)
    bits = np.zeros(len(match), np.int64)
    for is_exact in (True, False):
        rows = np.flatnonzero(ranked.is_exact == is_exact)
        other_rows = np.flatnonzero(others.is_exact == is_exact)
        if not len(other_rows) or not len(rows):
            continue
        hashes, other_hashes = ranked.hashes[rows], others.hashes[:, 0]
        if len(other_rows) < len(other_hashes):
            other_hashes = other_hashes[other_rows]
        if is_exact:
            first = _equal(hashes[:, 0], other_hashes)
        else:
            of_pairs = None if look is None else look.of_rows(rows, other_rows)
            first, bits[rows] = nearest(hashes, other_hashes, distance, memory, of_pairs)
        match[rows] = np.where(first < 0, -1, other_rows[first])
    return match, bits


def _equal(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The first of ``others`` that equals each hash, both uint64 (n, words); -1: none does."""
    # Sort the hashes, which may be few, and look the others up: few have a word in common.
    words = np.unique(hashes[:, 0])
    place = np.searchsorted(words, others[:, 0]).clip(max=max(len(words) - 1, 0))
    likely = np.flatnonzero(words[place] == others[:, 0])
    first = first_equal(np.concatenate([others[likely], hashes]))[len(likely) :]
    is_found = (first >= 0) & (first < len(likely))
    found = np.full(len(hashes), -1, np.int64)
    found[is_found] = likely[first[is_found]]
    return found
