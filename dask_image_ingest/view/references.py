"""References in place of a frame's images, so that only the rows shown are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pandas as pd

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan import MapColumns, datasets_of, select_columns
from dask_image_ingest.dataset.references import (
    LOCATION_COLUMNS,
    Decode,
    add_references,
    decode_partition,
    point_to_images,
)
from dask_image_ingest.dataset.scan import ColumnDecode
from dask_image_ingest.decode import MAX_PIXELS, DecodeSpec, make_decode_spec
from dask_image_ingest.frames import backend_of, image_columns, pandas_type

#: The location columns, and the key, which identifies the image if its offset is null.
PLACE = (*LOCATION_COLUMNS, "__key__")

#: A frame (or expression) with references, and the decode of each reference column.
Referenced: TypeAlias = tuple[Any, Mapping[Any, ColumnDecode]]


def references_of_images(
    frame: Any, columns: Sequence[Any], storage_options: dict[str, Any] | None
) -> Referenced | None:
    """Select columns of a frame, with references in place of images.

    For a frame without images, references are made from its location columns. None if there are no
    references: images that are in memory, or were computed.
    """
    if not image_columns(frame):
        return _references_of_location_columns(frame, columns, storage_options)
    if not isinstance(frame, FrameBase):
        return None
    found = _below_decode(_decoded_last(select_columns(frame, columns)))
    if found is None:
        return None
    rows, images = found
    if storage_options is not None:
        images = {
            name: replace(image, storage_options=storage_options) for name, image in images.items()
        }
    return dx.new_collection(rows), images


def _references_of_location_columns(
    frame: Any, columns: Sequence[Any], storage_options: dict[str, Any] | None
) -> Referenced | None:
    if not {*LOCATION_COLUMNS} <= {*frame.columns}:
        return None
    names = [name for name in frame.columns if name in {*columns, *PLACE} - {"image", "error"}]
    options, max_pixels = _options_of_reads(frame)
    images = ColumnDecode(
        "image", "error", _rgb_decoding(max_pixels), storage_options=storage_options or options
    )
    if not isinstance(frame, FrameBase):
        return add_references(select_columns(frame, names), "image", "error"), {"image": images}
    rows = point_to_images(select_columns(frame, names).expr, "image", "error")
    return dx.new_collection(rows), {"image": images}


def _options_of_reads(frame: Any) -> tuple[dict[str, Any] | None, int | None]:
    """Storage options and ``max_pixels`` of the first read in a frame's query."""
    if not isinstance(frame, FrameBase):
        return None, MAX_PIXELS
    for dataset in datasets_of(frame.expr):
        return dataset.options.storage_options, dataset.options.images[0].decoding.max_pixels
    return None, MAX_PIXELS


def _decoded_last(frame: FrameBase) -> dx.Expr:
    """The query with its decode lifted above everything that needs no pixels.

    Optimising does so, except for functions of other columns (`MapColumns`): between a read and its
    decode, they would keep both from being one task.
    """
    while True:
        expr: dx.Expr = frame.simplify().expr
        lifted = None
        for step in expr.find_operations(MapColumns):
            decode = step.frame
            if isinstance(decode, Decode) and decode.added.isdisjoint(
                (*step.inputs, *step.outputs)
            ):
                references = decode.as_references()
                if references is not None:
                    rows, decodes = references
                    lifted = Decode(MapColumns(rows, *step.operands[1:]), decodes)
                    frame = dx.new_collection(expr.substitute(step, lifted[step.columns]))
                    break
        if lifted is None:
            return expr


def _below_decode(expr: dx.Expr) -> Referenced | None:
    """The expression below the decode at the top of a query, and the decodes; None if none is."""
    if isinstance(expr, Decode):
        references = expr.as_references()
        if references is None:
            return None
        rows, decodes = references
        return rows, {decode.image: decode for decode in decodes}
    if isinstance(expr, dx.Projection) and expr.ndim == 2:
        found = _below_decode(expr.frame)
        if found is None:
            return None
        rows, images = found
        return rows[[n for n in expr.columns if n in rows.columns]], images
    if isinstance(expr, dx.Repartition):
        found = _below_decode(expr.frame)
        return found and (expr.substitute(expr.frame, found[0]), found[1])
    if isinstance(expr, dx.Concat):
        frames = [frame for frame in expr._frames if image_columns(frame._meta)]
        parts = [part for frame in frames if (part := _below_decode(frame)) is not None]
        if len(parts) == len(frames) and all(part[1] == parts[0][1] for part in parts):
            for frame, part in zip(frames, parts, strict=True):
                expr = expr.substitute(frame, part[0])
            return expr, parts[0][1]
    return None


def decode_references(rows: Any, images: ColumnDecode) -> Any:
    """Decode one column of references; lazy if the frame is."""
    if isinstance(rows, FrameBase):
        return dx.new_collection(Decode(rows.expr, (images,)))
    return decode_partition(rows, (images,))


def decode_small(rows: Any, images: Sequence[ColumnDecode]) -> pd.DataFrame:
    """Decode a few rows of references to a pandas frame, on the CPU: a client may have no GPU."""
    frame = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
    decodes = [
        replace(image, decoding=replace(image.decoding, device="cpu"), errors="null")
        for image in images
    ]
    decoded: pd.DataFrame = decode_partition(frame, decodes)
    return decoded


def at_size(
    images: Mapping[Any, ColumnDecode], image: Any, longer: int, mask: Any | None = None
) -> list[ColumnDecode] | None:
    """Decodes of thumbnails of an image column, and of its masks at full size.

    None if the stored image would not look like the decoded one.
    """
    if image not in images or mask not in (None, *images):
        return None
    decoding = images[image].decoding
    # Raw values are scaled by the range of each image, which a resize would change.
    if decoding.is_random or decoding.mode == "raw":
        return None
    small = replace(
        images[image], error="error", decoding=_rgb_decoding(decoding.max_pixels, longer)
    )
    return [small] if mask is None else [small, replace(images[mask], error=None)]


def _rgb_decoding(max_pixels: int | None, longer: int | None = None) -> DecodeSpec:
    return make_decode_spec(
        device="cpu",
        size=longer,
        resize="stretch" if longer is None else "longer",
        mode="RGB",
        transform=None,
        max_pixels=max_pixels,
    )
