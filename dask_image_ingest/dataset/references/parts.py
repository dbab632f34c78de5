"""Parts of pictures: boxes of a column that references take on, and the pixels that they mean."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import is_real, shown
from dask_image_ingest.dataset.plan.columns import MapColumns
from dask_image_ingest.dataset.schema.annotations import BoxFormat, Coordinates
from dask_image_ingest.decode import DecodeSpec, Header, Part, Region, too_large
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    ImageReference,
    as_references,
    backend_of,
    fields_of,
    is_any_list,
    is_number,
    nesting,
    one_chunk,
    references_of_fields,
)
from dask_image_ingest.typedefs import DataFrame

# Decimals of a pixel to which the edges of shares are exact: 0.1 + 0.7 is not 0.8.
_DECIMALS = 9

# Boxes reach no further, in pixels or shares: no picture does, and bytes are counted in int64.
_FARTHEST = 2**28

_RECTANGLE = ("top", "left", "height", "width")


def check_box(meta: DataFrame, box: Hashable | None, margin: float) -> None:
    """Raise `ArgumentError` unless the column exists and has four numbers in each row."""
    if not is_real(margin) or not 0 <= margin < np.inf:
        raise ArgumentError(
            f"margin={shown(margin)}: pass the share of its width and height by which a box grows "
            "on each side, such as 0.1"
        )
    if box is None:
        if margin:
            raise ArgumentError("margin= makes boxes larger: pass box=, the column that has them")
        return
    if box not in meta.columns:
        raise ArgumentError(f"box={box!r}: the frame has {', '.join(map(repr, meta.columns))}")
    type_ = backend_of(meta).to_arrow(meta[[box]]).schema.field(0).type
    levels, value = nesting(type_)
    if levels > 1:
        raise ArgumentError(
            f"box={box!r} has lists of boxes, and a row is one image: make a row of each box, "
            f"frame.explode({box!r}), and decode these rows"
        )
    # Of an empty frame, the type of Python objects is not known.
    if not pa.types.is_null(type_) and (levels != 1 or not is_number(value)):
        raise ArgumentError(
            f"box={box!r} is of type {type_}: pass a column with four numbers in each row, such as "
            "'list<float32>'"
        )


def with_boxes(
    frame: DataFrame,
    images: Sequence[str],
    box: Hashable,
    box_format: BoxFormat,
    margin: float,
    coordinates: Coordinates,
) -> DataFrame:
    """Let the references of a pandas or cuDF frame refer to the box of their row.

    A box of a part is relative to it. Boxes that are none set the error of their references.
    """
    table = backend_of(frame).to_arrow(frame[[box, *images]])
    boxes, errors = _boxes(one_chunk(table.column(0)), box_format, margin, coordinates)
    for place, image in enumerate(images, 1):
        references = one_chunk(as_references(table.column(place)))
        cut = _cut(references, boxes, errors, coordinates == "shares")
        frame = backend_of(frame).with_references(frame, cut, image, None)
    return frame


def cut_boxes(rows: dx.Expr, images: tuple[str, ...], box: Hashable, *options: object) -> dx.Expr:
    """Lazy `with_boxes`."""
    return MapColumns(rows, with_boxes, images, (*images, box), images, box, *options)


def cuts_boxes(expr: dx.Expr) -> bool:
    """True for the expression of `cut_boxes`."""
    return isinstance(expr, MapColumns) and expr.function is with_boxes


def _boxes(
    column: pa.Array, box_format: BoxFormat, margin: float, coordinates: Coordinates
) -> tuple[np.ndarray, np.ndarray]:
    """Top, left, height and width of each row's box, float64 (n, 4), and its error or None.

    Edges in pixels are whole.
    """
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    numbers = np.full((len(column), 4), np.nan)
    if is_any_list(column.type):
        four = pc.fill_null(pc.equal(pc.list_value_length(column), 4), False)
        values = column.filter(four).flatten().cast(pa.float64(), safe=False)
        numbers[_numpy(four)] = _numpy(values).reshape(-1, 4)
    with np.errstate(over="ignore", invalid="ignore"):
        starts, ends = numbers[:, 1::-1], numbers[:, 3:1:-1]
        ends = starts + ends if box_format == "xywh" else ends
        sides = ends - starts
        starts, ends = starts - margin * sides, ends + margin * sides
        starts, ends = np.clip([starts, ends], -_FARTHEST, _FARTHEST)
        if coordinates == "pixels":
            starts, ends = _rounded(starts, ends)
        found = np.concatenate([starts, ends - starts], axis=1)
        errors = np.full(len(column), None, object)
        for row in np.flatnonzero(~(sides > 0).all(axis=1)).tolist():
            errors[row] = f"box: it is empty, {sides[row, 1]:g} wide and {sides[row, 0]:g} high"
        finite = np.isfinite([numbers, found]).all(axis=(0, 2))
        errors[~finite] = "box: it is not four finite numbers"
        errors[_numpy(column.is_null())] = "box: the row has none"
    return found, errors


def _rounded(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges in whole pixels as Pillow's ``crop`` rounds them, of a pixel at least."""
    thin = np.rint(starts) == np.rint(ends)
    starts = np.where(thin, np.floor(starts), np.rint(starts))
    return starts, np.where(thin, starts + 1, np.rint(ends))


def _cut(
    references: pa.StructArray, boxes: np.ndarray, errors: np.ndarray, in_shares: bool
) -> pa.StructArray:
    """References to boxes of the images, or parts, that they refer to."""
    fields = fields_of(references)
    part = np.stack([_numpy(fields[name]).astype(float) for name in _RECTANGLE], axis=1)
    of_part = ~np.isnan(part[:, 0])
    of_shares = _numpy(pc.fill_null(fields["in_shares"], False))
    part[~of_part] = 0, 0, 1, 1
    boxes = boxes * (np.tile(part[:, 2:], 2) if in_shares else 1)
    if in_shares:
        # Rounded in the part, as boxes in pixels are: equal parts have equal boxes.
        whole = of_part & ~of_shares
        starts, ends = boxes[whole, :2], boxes[whole, :2] + boxes[whole, 2:]
        starts, ends = _rounded(np.round(starts, _DECIMALS), np.round(ends, _DECIMALS))
        boxes[whole] = np.concatenate([starts, ends - starts], axis=1)
    boxes[:, :2] += part[:, :2]
    unknown = "box: in pixels of a part in shares, whose size is not known before its decode"
    errors = np.where(of_shares & (not in_shares), unknown, errors)
    bad = np.array([error is not None for error in errors], np.bool_)
    for name, values in zip(_RECTANGLE, boxes.T, strict=True):
        fields[name] = pa.array(values, mask=bad)
    fields["in_shares"] = pa.array(in_shares & (~of_part | of_shares), mask=bad)
    # The error of the image itself comes first.
    fields["error"] = pc.coalesce(fields["error"], pa.array(errors, pa.string()))
    return references_of_fields(len(references), fields, references.is_null())


def _numpy(values: pa.Array) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False)


def resolve(
    reference: ImageReference, picture: int, header: Header, decoding: DecodeSpec
) -> tuple[Header, Part | None]:
    """The header of the part of an image that a reference means, and its pixels.

    ``header`` is that of the page of the image, ``picture`` its number among others. For a part
    that can't be cut out, the header has an error.
    """
    if header.error is not None or header.height is None or header.width is None:
        return header, None
    shape = header.height, header.width
    region = _region(reference, shape)
    inside, error = region.inside(shape), None
    disjoint = any(
        start >= edge or start + length <= 0
        for start, length, edge in zip(region[:2], region[2:4], shape, strict=True)
    )
    if disjoint or (decoding.outside == "error" and inside != region):
        error = (
            f"box: {region.width} x {region.height} at {region.left}, {region.top} "
            f"{'lies outside' if disjoint else 'reaches beyond'} the image, which is "
            f"{header.width} x {header.height}"
        )
    elif decoding.outside == "clip":
        region = inside
    if error is None and region.height * region.width > decoding.max_pixels:
        error = too_large(region.height, region.width, decoding.max_pixels)
    header = header._replace(height=region.height, width=region.width, error=error)
    return decoding.validated(header), Part(picture, reference.page or 0, shape, region)


def _region(reference: ImageReference, shape: tuple[int, int]) -> Region:
    """The rectangle of a reference in whole pixels of an image of this height and width."""
    if reference.top is None:
        return Region(0, 0, *shape)
    edges = []
    for axis, start, length in (
        (0, reference.top, reference.height),
        (1, reference.left or 0, reference.width),
    ):
        unit = shape[axis] if reference.in_shares else 1
        ends = [start * unit, (start + (length or 0)) * unit]
        ends = [min(max(end, -_FARTHEST), _FARTHEST) for end in ends]
        first, last = (round(round(end, _DECIMALS)) for end in ends)
        first = first if first < last else int(ends[0] // 1)
        edges.append((first, max(1, last - first)))
    (top, height), (left, width) = edges
    return Region(top, left, height, width)
