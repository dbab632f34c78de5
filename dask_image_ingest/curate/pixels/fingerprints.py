"""``compute_fingerprints``: hashes of encoded bytes and of pixels, and perceptual ones (PDQ)."""

from __future__ import annotations

from collections.abc import Sequence
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
from dask_image_ingest.curate.pixels.batches import in_batches
from dask_image_ingest.curate.pixels.pdq import VARIANTS, pdq
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import (
    LOCATION_COLUMNS,
    Decode,
    Frame,
    MapColumns,
    fetch_encoded,
    references_of,
    references_of_locations,
)
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import source_options_of
from dask_image_ingest.frames import Backend, ImageReference, backend_of
from dask_image_ingest.view import references_of_images

Kind = Literal["bytes", "pixels", "pdq"]
Variant = Literal[
    "mirrored", "flipped", "rotated180", "transposed", "rotated90", "rotated270", "transversed"
]

KINDS: tuple[Kind, ...] = ("bytes", "pixels", "pdq")
PDQ_QUALITY = "fingerprint.pdq_quality"


def column_of(kind: str, variant: str | None = None) -> str:
    """The name of a fingerprint's column."""
    return f"fingerprint.{kind}" if variant is None else f"fingerprint.{kind}_{variant}"


def compute_fingerprints(
    frame: Frame,
    kinds: Sequence[Kind] = KINDS,
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
    variants
        Add PDQ of the image mirrored or turned, too: ``"mirrored"`` (left and right), ``"flipped"``
        (top and bottom), ``"rotated90"`` and ``"rotated270"`` (counter-clockwise),
        ``"rotated180"``, ``"transposed"``, ``"transversed"``.
    storage_options
        For ``"bytes"`` of remote shards; by default those of the read.

    Returns
    -------
    dataframe
        ``frame`` with columns of strings, added or replaced: ``fingerprint.bytes`` and
        ``fingerprint.pixels`` of 32 hexadecimal digits, ``fingerprint.pdq`` and
        ``fingerprint.pdq_mirrored`` ... of 64; and ``fingerprint.pdq_quality``, uint8: 0 to 100,
        below 50 too little detail to compare. Null where there is no image. Lazy if ``frame`` is:
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
    image of that size. The library does not enlarge smaller images, where both differ by 8 bits on
    average. Reading large photographs with ``size=512, resize="longer"`` makes PDQ faster.

    Examples
    --------
    >>> hashed = curate.compute_fingerprints(ddf, ["bytes", "pdq"])
    >>> hashed[["fingerprint.bytes", "fingerprint.pdq_quality"]].head(2)
                      fingerprint.bytes  fingerprint.pdq_quality
    0  ...                                                   100
    1  ...                                                   100
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    check_frame(meta)
    chosen = list_of_names("kinds", kinds, "kinds of fingerprints")
    for kind in chosen:
        check_choice("kinds", kind, KINDS)
    variants = check_variants(variants)
    if variants and "pdq" not in chosen:
        raise ArgumentError("variants= are those of PDQ: have 'pdq' among kinds=")
    storage_options = check_storage_options(storage_options)
    outputs = {column_of("pixels"): "string"} if "pixels" in chosen else {}
    if "pdq" in chosen:
        outputs |= {column_of("pdq"): "string", PDQ_QUALITY: "uint8"}
        outputs |= {column_of("pdq", variant): "string" for variant in variants}
    if "bytes" in chosen:
        frame = _with_bytes(frame, storage_options)
    if not outputs:
        return frame
    return in_batches(frame, _pixel_hashes, outputs, kinds=tuple(chosen), variants=variants)


def check_variants(variants: Any) -> tuple[Variant, ...]:
    """Check that the argument is a list of variants.

    Raises
    ------
    ArgumentError
    """
    names: list[Any] = list_of_names("variants", variants, "variants of images")
    for name in names:
        check_choice("variants", name, tuple(VARIANTS))
    return tuple(names)


def _pixel_hashes(
    groups: Sequence[Any], backend: Backend, kinds: tuple[str, ...], variants: tuple[str, ...]
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if "pixels" in kinds:
        images = [image for group in groups for image in backend.host(group)]
        columns[column_of("pixels")] = [
            _digest(np.array(image.shape, "<i4").tobytes(), image) for image in images
        ]
    if "pdq" in kinds:
        (hashes, *of_variants), columns[PDQ_QUALITY] = pdq(groups, backend.numpy, variants)
        columns[column_of("pdq")] = _hexadecimal(hashes, backend)
        for variant, hashes in zip(variants, of_variants, strict=True):
            columns[column_of("pdq", variant)] = _hexadecimal(hashes, backend)
    return columns


def _digest(*parts: Any) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _hexadecimal(hashes: Any, backend: Backend) -> list[str]:
    return [row.tobytes().hex() for row in backend.host(hashes)]


def _with_bytes(frame: Any, storage_options: dict[str, Any] | None) -> Any:
    """Add hashes of the encoded images, found by references, location columns or the scan."""
    name = column_of("bytes")
    frame = frame.drop(columns=name) if name in frame.columns else frame
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    lazy = isinstance(frame, FrameBase)
    if lazy and storage_options is None:
        storage_options = source_options_of(frame)
    backend = backend_of(meta)
    references = [name for name, dtype in meta.dtypes.items() if backend.is_references(dtype)]
    if not references and {*LOCATION_COLUMNS} <= {*meta.columns}:
        if not lazy:
            return _hash_bytes(frame, None, storage_options)
        inputs = (*LOCATION_COLUMNS, "__key__")
        return _hashed(frame.expr, inputs, None, storage_options)
    if references:
        if not lazy:
            return _hash_bytes(frame, references[0], storage_options)
        return _hashed(frame.expr, (references[0],), references[0], storage_options)
    referenced = references_of_images(frame, list(frame.columns), storage_options) if lazy else None
    if referenced is None:
        raise ArgumentError(
            f"the frame has neither the columns {', '.join(LOCATION_COLUMNS)}, which say where "
            "each image is, nor references, nor images that a read has just decoded: the "
            "fingerprint of bytes needs one of these"
        )
    rows, images = referenced
    image = next(iter(images))
    hashed = _hashed(rows.expr, (image,), image, storage_options)
    decoded = new_collection(Decode(hashed.expr, tuple(images.values())))
    return decoded[[*frame.columns, name]]


def _hashed(expr: Any, inputs: tuple[str, ...], reference: str | None, storage_options: Any) -> Any:
    outputs = (column_of("bytes"),)
    return new_collection(
        MapColumns(expr, _hash_bytes, outputs, inputs, reference, storage_options)
    )


def _hash_bytes(frame: Any, reference: str | None, storage_options: dict[str, Any] | None) -> Any:
    """A partition with hashes of the images of its reference column, or of its location columns."""
    backend = backend_of(frame)
    if reference is None:
        structs = references_of_locations(frame)
    else:
        structs = references_of(frame, reference)
    references = [
        ImageReference(None) if row is None else ImageReference(**row)
        for row in structs.to_pylist()
    ]
    encoded = fetch_encoded(references, storage_options)
    # Files of no bytes are equal, and no images.
    rows = [row for row, data in enumerate(encoded) if not isinstance(data, Header) and len(data)]
    hashes = [_digest(encoded[row]) for row in rows]
    return backend.with_columns(frame, {column_of("bytes"): (hashes, pa.string())}, rows)
