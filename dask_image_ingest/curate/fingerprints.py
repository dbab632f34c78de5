"""``compute_fingerprints``: hashes of bytes and of pixels, perceptual ones (PDQ), thumbnails.

PDQ is the perceptual hash of ThreatExchange, here on NumPy and CuPy arrays alike. It follows the
published algorithm (Facebook, "The TMK+PDQF Video-Hashing Algorithm and the PDQ Image-Hashing
Algorithm", 2019). Its two box-filter passes and the subsampling to 64 × 64 pixels are linear and
separable: here they are one filter for each axis. The reference implementation shrinks larger
images to 512 × 512, but does not enlarge smaller ones. Here every image is resized to 512 × 512, by
area means or bilinearly. So an image and its copy at half or twice the size have nearly the same
hash.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from dask_image_ingest.arguments import (
    check_choice,
    check_frame,
    check_storage_options,
    list_of_names,
)
from dask_image_ingest.curate.pixels import (
    Taps,
    area_weights,
    in_batches,
    luma_of_reduced_rows,
    make_taps,
    reduced_columns,
)
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import Frame
from dask_image_ingest.dataset.plan import MapColumns
from dask_image_ingest.dataset.references import (
    LOCATION_COLUMNS,
    Decode,
    fetch_encoded,
    location_columns,
    reference_rows,
    references_of,
    references_of_locations,
)
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import source_options_of
from dask_image_ingest.frames import (
    Backend,
    ImageReference,
    backend_of,
    reference_columns,
    without,
)
from dask_image_ingest.typedefs import AnyFrame, Array, ArrayModule, DataFrame
from dask_image_ingest.view import references_of_images

_SIDE = 64
SIDE_OF_THUMBNAIL = 32
_LENGTH = 512
_FREQUENCIES = 16

# Names as in Pillow's Transpose, rotations counter-clockwise. Each: reverse rows, reverse columns,
# then swap both axes.
VARIANTS: dict[str, tuple[bool, bool, bool]] = {
    "mirrored": (False, True, False),
    "flipped": (True, False, False),
    "rotated180": (True, True, False),
    "transposed": (False, False, True),
    "rotated90": (False, True, True),
    "rotated270": (True, False, True),
    "transversed": (True, True, True),
}


def pdq(
    groups: Sequence[Array], xp: ArrayModule, variants: tuple[str, ...] = ()
) -> tuple[list[Any], Any]:
    """Hashes of images, then of each variant, uint8 (n, 32), and the quality, uint8 (n,).

    ``groups`` are images of one shape each, uint8 (n, height, width, 1 or 3). The quality, 0 to
    100, is by the gradients of the 64 × 64 pixels.
    """
    return _pdq_of_reduced(_reduced(groups, variants, xp), xp, variants)


def _pdq_of_reduced(
    small: dict[tuple[bool, bool], Array], xp: ArrayModule, variants: tuple[str, ...]
) -> tuple[list[Any], Any]:
    hashes = []
    for down, across, swap in ((False, False, False), *(VARIANTS[name] for name in variants)):
        turned = small[down, across]
        hashes.append(_hash(xp.swapaxes(turned, 1, 2) if swap else turned, xp))
    return hashes, _quality(small[False, False], xp)


def _reduced(
    groups: Sequence[Array], variants: tuple[str, ...], xp: ArrayModule
) -> dict[tuple[bool, bool], Any]:
    """Luma (n, 64, 64) of images, with rows or columns reversed as each of ``variants`` needs."""
    # Reversals are filtered again: the subsampling is not symmetric, so that flipping signs of the
    # frequencies, as the reference does, would be some bits off.
    reversals = {(False, False), *(VARIANTS[name][:2] for name in variants)}
    parts: dict[tuple[bool, bool], list[Any]] = {reversal: [] for reversal in reversals}
    for images in groups:
        height, width = images.shape[1:3]
        # All of the image's pixels are filtered once for each direction of its rows.
        for down in sorted({down for down, _ in reversals}):
            rows = _subsampled_boxes(height, xp)
            narrow = luma_of_reduced_rows(images, rows.reverse(height) if down else rows, xp)
            for across in (across for way, across in reversals if way == down):
                columns = _subsampled_boxes(width, xp)
                columns = columns.reverse(width) if across else columns
                parts[down, across].append(reduced_columns(narrow, columns, xp))
    return {reversal: xp.concatenate(small) for reversal, small in parts.items()}


def _thumbnails(small: Array, xp: ArrayModule) -> Array:
    """Luma (n, 64, 64) → means of 2 × 2 pixels: uint8 (n, 1024)."""
    means = small.reshape(len(small), SIDE_OF_THUMBNAIL, 2, SIDE_OF_THUMBNAIL, 2).mean(axis=(2, 4))
    return xp.clip(means + 0.5, 0, 255).astype(xp.uint8).reshape(len(small), -1)


def _hash(small: Array, xp: ArrayModule) -> Array:
    """Hash (n, 32): whether each of the 256 lowest frequencies, but DC, exceeds their median."""
    transform = _cosines(xp)
    flat = (transform @ small @ transform.T).reshape(len(small), -1)
    # The reference's median of 256 values is the lower of the two in the middle.
    median = xp.partition(flat, 127, axis=1)[:, 127:128]
    bits = (flat > median)[:, ::-1]
    return xp.packbits(bits.reshape(-1)).reshape(len(flat), 32)  # CuPy's packbits has no axis=


def _quality(small: Array, xp: ArrayModule) -> Array:
    """Quality, 0 to 100: the sum of absolute gradients, in whole percents of the range, over 90."""
    gradients = sum(
        xp.abs(xp.trunc(xp.diff(small, axis=axis) * (100 / 255))).sum(axis=(1, 2))
        for axis in (1, 2)
    )
    return xp.minimum(gradients // 90, 100).astype(xp.uint8)


@functools.lru_cache(maxsize=1)
def _cosines(xp: ArrayModule) -> Array:
    """Lowest frequencies of the DCT-II, without the constant term: (16, 64)."""
    frequency = np.arange(1, _FREQUENCIES + 1)[:, None]
    position = 2 * np.arange(_SIDE) + 1
    return xp.asarray(np.sqrt(2 / _SIDE) * np.cos(np.pi / 2 / _SIDE * frequency * position), "f4")


@functools.lru_cache(maxsize=1024)
def _subsampled_boxes(length: int, xp: ArrayModule) -> Taps:
    """Resize an axis to 512, filter it by a box twice, and take 64 of the pixels: one filter."""
    weights = np.zeros((_LENGTH, _SIDE))
    sampled = ((np.arange(_SIDE) + 0.5) * _LENGTH / _SIDE).astype(int)
    weights[sampled, np.arange(_SIDE)] = 1
    for _ in range(2):
        weights = _spread(weights, _LENGTH // (2 * _SIDE))
    weights = weights.T @ (area_weights if length > _LENGTH else _bilinear)(length, _LENGTH)
    # Rounding of the cumulative sums leaves tiny weights where there should be zeros.
    return make_taps(np.where(weights > 1e-9, weights, 0), xp)


def _bilinear(length: int, longer: int) -> np.ndarray:
    """Bilinear enlargement as a matrix (longer, length)."""
    position = ((np.arange(longer) + 0.5) * (length / longer) - 0.5).clip(0, length - 1)
    weights: np.ndarray = np.maximum(1 - np.abs(position[:, None] - np.arange(length)), 0)
    return weights


def _spread(weights: np.ndarray, window: int) -> np.ndarray:
    """Transpose of a box filter: weights (length, 64) of its results → weights of its inputs."""
    pixels = np.arange(len(weights))
    stop = pixels + (window + 2) // 2
    start = np.maximum(stop - window, 0)
    stop = np.minimum(stop, len(weights))
    share = weights / (stop - start)[:, None]
    total = np.concatenate([np.zeros((1, _SIDE)), share.cumsum(axis=0)])
    # The results that a pixel contributes to are consecutive.
    first = np.searchsorted(stop, pixels, "right")
    last = np.searchsorted(start, pixels, "right")
    return total[last] - total[first]


Kind = Literal["bytes", "pixels", "pdq"]
Variant = Literal[
    "mirrored", "flipped", "rotated180", "transposed", "rotated90", "rotated270", "transversed"
]

KINDS: tuple[Kind, ...] = ("bytes", "pixels", "pdq")
PDQ_QUALITY = "fingerprint.pdq_quality"
THUMBNAIL = "fingerprint.thumbnail"
_AREA = "quality.area"


def column_of(kind: str, variant: str | None = None) -> str:
    """The name of a fingerprint's column."""
    return f"fingerprint.{kind}" if variant is None else f"fingerprint.{kind}_{variant}"


def compute_fingerprints(
    frame: Frame,
    kinds: Sequence[Kind | Literal["thumbnail"]] = KINDS,
    *,
    variants: Sequence[Variant] = (),
    storage_options: dict[str, Any] | None = None,
) -> Frame:
    """Add hashes that find equal or similar images.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe of :func:`~dask_image_ingest.read_webdataset_images`, with
        a column of images. For ``"bytes"`` alone, references or the columns ``__url__``, ``offset``
        and ``nbytes`` are enough.
    kinds
        Which to add.

        ``"bytes"``
            xxh3-128 of the encoded image, null if it has no bytes. Nothing is decoded: the bytes
            are read from the shard.
        ``"pixels"``
            xxh3-128 of the shape and the decoded pixels: the same for one picture in two lossless
            formats.
        ``"pdq"``
            PDQ, a perceptual hash of 256 bits, and its quality: differs in few bits after encoding
            again or resizing.
        ``"thumbnail"``
            The luma at 32 × 32, with which :func:`find_duplicates` takes a second look at pairs
            whose PDQ is not near. Costs nothing beside ``"pdq"``, and 1 kB a row.
    variants
        Add PDQ of the image mirrored or turned, too: ``"mirrored"`` (left and right), ``"flipped"``
        (top and bottom), ``"rotated90"`` and ``"rotated270"`` (counter-clockwise; a quarter turn
        is found with both), ``"rotated180"``, ``"transposed"``, ``"transversed"``.
    storage_options
        For ``"bytes"`` of remote shards; by default those of the read.

    Returns
    -------
    dataframe
        ``frame`` with columns of strings, added or replaced: ``fingerprint.bytes`` and
        ``fingerprint.pixels`` of 32 hexadecimal digits, ``fingerprint.pdq`` and
        ``fingerprint.pdq_mirrored`` ... of 64; and ``fingerprint.pdq_quality``, uint8: 0 to 100,
        below 50 too little detail to compare; and ``fingerprint.thumbnail``, ``list<uint8>`` of
        1,024 pixels, row by row. Null where there is no image. With ``"pdq"``, a frame without the
        columns ``height`` and ``width`` also gets ``quality.area``, the pixels of each image, by
        which :func:`find_duplicates` chooses what stays. Lazy if ``frame`` is:
        hashes that a query does not use are not computed, and filters on other columns run before
        any image is decoded.

    Raises
    ------
    ArgumentError
        For unknown kinds, and if a column is missing.
    FunctionError
        When computed, for images of other than 1 or 3 channels.

    Notes
    -----
    xxh3 is not a cryptographic hash: an attacker can craft two images with the same one. PDQ is
    that of ThreatExchange, of the image resized to 512 × 512: within 2 bits of its library's for an
    image of that size. The library does not enlarge smaller images, where both differ by 10 bits in
    the median and 26 at most. Of large photographs, reading with ``size=512, resize="stretch",
    scaled_decode=True`` makes PDQ faster, and at most 2 bits different.

    Examples
    --------
    >>> hashed = curate.compute_fingerprints(ddf, ["bytes", "pdq"])
    >>> hashed[["fingerprint.bytes", "fingerprint.pdq_quality"]].head(2).reset_index(drop=True)
                      fingerprint.bytes  fingerprint.pdq_quality
    0  ...                                                   100
    1  ...                                                   100
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    check_frame(meta)
    chosen = list_of_names("kinds", kinds, "kinds of fingerprints")
    for kind in chosen:
        check_choice("kinds", kind, (*KINDS, "thumbnail"))
    variants = check_variants(variants)
    if variants and "pdq" not in chosen:
        raise ArgumentError("variants= are those of PDQ: have 'pdq' among kinds=")
    storage_options = check_storage_options(storage_options)
    outputs = {column_of("pixels"): "string"} if "pixels" in chosen else {}
    if "pdq" in chosen:
        outputs |= {column_of("pdq"): "string", PDQ_QUALITY: "uint8"}
        outputs |= {column_of("pdq", variant): "string" for variant in variants}
    if "thumbnail" in chosen:
        outputs[THUMBNAIL] = "list<uint8>"
    if "pdq" in chosen and not (
        {"height", "width"} <= set(frame.columns) or _AREA in frame.columns
    ):
        outputs[_AREA] = "float64"
    if "bytes" in chosen:
        frame = _with_bytes(frame, storage_options)
    if not outputs:
        return frame
    return in_batches(
        frame,
        "compute_fingerprints",
        _pixel_hashes,
        outputs,
        kinds=(*chosen, *({_AREA} & set(outputs))),
        variants=variants,
    )


def check_variants(variants: Iterable[Any]) -> tuple[Variant, ...]:
    """The variants as a tuple; an error if one has another name."""
    names: list[Any] = list_of_names("variants", variants, "variants of images")
    for name in names:
        check_choice("variants", name, tuple(VARIANTS))
    return tuple(names)


def _pixel_hashes(
    groups: Sequence[Array], backend: Backend, kinds: tuple[str, ...], variants: tuple[str, ...]
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if _AREA in kinds:
        areas = np.array([group.shape[1] * group.shape[2] for group in groups for _ in group])
        columns[_AREA] = backend.numpy.asarray(areas, np.float64)
    if "pixels" in kinds:
        images = [image for group in groups for image in backend.host(group)]
        columns[column_of("pixels")] = [
            _digest(np.array(image.shape, "<i4").tobytes(), image) for image in images
        ]
    if "pdq" in kinds or "thumbnail" in kinds:
        small = _reduced(groups, variants, backend.numpy)
    if "thumbnail" in kinds:
        columns[THUMBNAIL] = _thumbnails(small[False, False], backend.numpy)
    if "pdq" in kinds:
        hashes, columns[PDQ_QUALITY] = _pdq_of_reduced(small, backend.numpy, variants)
        for variant, of_variant in zip((None, *variants), hashes, strict=True):
            columns[column_of("pdq", variant)] = _hexadecimal(of_variant, backend)
    return columns


def _digest(*parts: Any) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _part_digest(digest: str, reference: ImageReference) -> str:
    """The digest of a part of an image, by that of its bytes; of all of it, that one."""
    is_whole = not reference.page and reference.top is None
    return digest if is_whole else _digest(repr((digest, reference.part)).encode())


def _hexadecimal(hashes: Array, backend: Backend) -> list[str]:
    return [row.tobytes().hex() for row in backend.host(hashes)]


def _with_bytes(frame: AnyFrame, storage_options: dict[str, Any] | None) -> AnyFrame:
    """Add hashes of the encoded images, found by references, location columns or the scan."""
    name = column_of("bytes")
    frame = without(frame, [name])
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    lazy = isinstance(frame, FrameBase)
    if lazy and storage_options is None:
        storage_options = source_options_of(frame)
    references = reference_columns(meta)
    if references or {*LOCATION_COLUMNS} <= {*meta.columns}:
        reference = references[0] if references else None
        if not lazy:
            return _hash_bytes(frame, reference, storage_options)
        inputs = (reference,) if reference is not None else tuple(location_columns(meta.columns))
        return new_collection(
            MapColumns(frame.expr, _hash_bytes, (name,), inputs, reference, storage_options)
        )
    referenced = references_of_images(frame, list(frame.columns), storage_options) if lazy else None
    if referenced is None:
        raise ArgumentError(
            f"the frame has neither the columns {', '.join(LOCATION_COLUMNS)}, which say where "
            "each image is, nor references, nor images that a read has just decoded: the "
            "fingerprint of bytes needs one of these"
        )
    rows, images = referenced
    image = next(iter(images))
    hashed = MapColumns(rows.expr, _hash_bytes, (name,), (image,), image, storage_options)
    decoded = new_collection(Decode(hashed, tuple(images.values())))
    return decoded[[*frame.columns, name]]


def _hash_bytes(
    frame: DataFrame, reference: str | None, storage_options: dict[str, Any] | None
) -> DataFrame:
    """A partition with hashes of the images of its reference column, or of its location columns."""
    backend = backend_of(frame)
    if reference is None:
        column = pa.chunked_array([references_of_locations(frame)])
    else:
        column = references_of(frame, reference)
    references = [one or ImageReference(None) for one in reference_rows(column)]
    pictures = list(dict.fromkeys(reference.picture for reference in references))
    encoded = fetch_encoded(pictures, storage_options)
    # Files of no bytes are equal, and no images.
    digests = {
        picture: _digest(data[:])
        for picture, data in zip(pictures, encoded, strict=True)
        if not isinstance(data, Header) and len(data)
    }
    rows = [row for row, reference in enumerate(references) if reference.picture in digests]
    hashes = [_part_digest(digests[references[row].picture], references[row]) for row in rows]
    return backend.with_columns(frame, {column_of("bytes"): (hashes, pa.string())}, rows)
