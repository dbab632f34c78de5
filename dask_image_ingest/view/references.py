"""Rows with references in place of the images that they show: only those shown are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pandas as pd

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import (
    POINTER,
    Decode,
    ImageDecode,
    MapColumns,
    ReadImageFiles,
    datasets_of,
    decode_partition,
    point_to_images,
    with_pointed,
)
from dask_image_ingest.decode import MAX_PIXELS, DecodeSpec, make_decode_spec
from dask_image_ingest.frames import backend_of, image_columns, pandas_type

#: The columns by which images are found; those that no place tells, by their key.
PLACE = (*POINTER, "__key__")

#: A frame of references, or its expression, and how they are decoded, by the names of the columns.
Referenced: TypeAlias = tuple[Any, Mapping[Any, ImageDecode]]


def references_of_images(
    frame: Any, columns: Sequence[Any], storage_options: dict[str, Any] | None
) -> Referenced | None:
    """Some columns of a frame, with references in place of images.

    A frame without images gets those that its rows point to. None where the images are not simply
    decoded, or are there.
    """
    if not image_columns(frame):
        return _pointed(frame, columns, storage_options)
    if not isinstance(frame, FrameBase):
        return None
    found = _below_decode(_decoded_last(frame[list(columns)]))
    if found is None:
        return None
    rows, images = found
    if storage_options is not None:
        images = {n: replace(i, storage_options=storage_options) for n, i in images.items()}
    return dx.new_collection(rows), images


def _pointed(
    frame: Any, columns: Sequence[Any], storage_options: dict[str, Any] | None
) -> Referenced | None:
    if not {*POINTER} <= {*frame.columns}:
        return None
    names = [name for name in frame.columns if name in {*columns, *PLACE} - {"image", "error"}]
    options, max_pixels = _options_of_reads(frame)
    images = ImageDecode(
        "image", "error", _decoding(max_pixels), storage_options=storage_options or options
    )
    if not isinstance(frame, FrameBase):
        return with_pointed(frame[names], "image", "error"), {"image": images}
    rows = point_to_images(frame[names].expr, "image", "error")
    return dx.new_collection(rows), {"image": images}


def _options_of_reads(frame: Any) -> tuple[dict[str, Any] | None, int | None]:
    """The storage options of the first read that a frame is made of, and its ``max_pixels``."""
    if not isinstance(frame, FrameBase):
        return None, MAX_PIXELS
    for dataset in datasets_of(frame.expr):
        return dataset.options.storage_options, dataset.options.decoding.max_pixels
    for read in frame.expr.find_operations(ReadImageFiles):
        return read.files.images.storage_options, read.files.images.decoding.max_pixels
    return None, MAX_PIXELS


def _decoded_last(frame: FrameBase) -> dx.Expr:
    """A query with the decode at its top, past all that does not need it.

    Dask's optimiser does this, except for functions of other columns: if they were below, a read
    and its decode would not be one task.
    """
    while True:
        expr: dx.Expr = frame.simplify().expr
        moved = None
        for step in expr.find_operations(MapColumns):
            decode = step.frame
            if isinstance(decode, Decode) and decode.added.isdisjoint(
                (*step.inputs, *step.outputs)
            ):
                below = decode.as_references()
                if below is not None:
                    moved = Decode(MapColumns(below[0], *step.operands[1:]), below[1])
                    frame = dx.new_collection(expr.substitute(step, moved[step.columns]))
                    break
        if moved is None:
            return expr


def _below_decode(expr: dx.Expr) -> Referenced | None:
    if isinstance(expr, Decode):
        moved = expr.as_references()
        return None if moved is None else (moved[0], {each.image: each for each in moved[1]})
    if isinstance(expr, dx.Projection) and expr.ndim == 2:
        found = _below_decode(expr.frame)
        if found is None:
            return None
        rows, images = found
        return rows[[n for n in expr.columns if n in rows.columns]], images
    if isinstance(expr, dx.Concat):
        frames = [frame for frame in expr._frames if image_columns(frame._meta)]
        parts = [part for frame in frames if (part := _below_decode(frame)) is not None]
        if len(parts) == len(frames) and all(part[1] == parts[0][1] for part in parts):
            for frame, part in zip(frames, parts, strict=True):
                expr = expr.substitute(frame, part[0])
            return expr, parts[0][1]
    return None


def decoded(rows: Any, images: ImageDecode) -> Any:
    """A frame with images in place of references; lazy if it is."""
    if isinstance(rows, FrameBase):
        return dx.new_collection(Decode(rows.expr, (images,)))
    return decode_partition(rows, (images,))


def decode_small(rows: Any, images: Sequence[ImageDecode]) -> pd.DataFrame:
    """Rows of references as a pandas frame with images.

    They are decoded on the CPU, since they are few and a client may have no GPU.
    """
    frame = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
    here = [replace(i, decoding=replace(i.decoding, device="cpu"), errors="null") for i in images]
    decoded: pd.DataFrame = decode_partition(frame, here)
    return decoded


def at_size(
    images: Mapping[Any, ImageDecode], image: Any, longer: int, mask: Any | None = None
) -> list[ImageDecode] | None:
    """The decode of small pictures of a column, and of masks as they are.

    None where a picture does not show the image as it is stored.
    """
    if image not in images or mask not in (None, *images):
        return None
    decoding = images[image].decoding
    if decoding.transform is not None or decoding.mode == "raw":  # scaled by their own range
        return None
    small = replace(images[image], error="error", decoding=_decoding(decoding.max_pixels, longer))
    return [small] if mask is None else [small, replace(images[mask], error=None)]


def _decoding(max_pixels: int | None, longer: int | None = None) -> DecodeSpec:
    return make_decode_spec(
        device="cpu",
        size=longer,
        resize="stretch" if longer is None else "longer",
        mode="RGB",
        transform=None,
        max_pixels=max_pixels,
    )
