"""Tiles and pages as rows: a picture's row is repeated for each, and its reference gets the part.

As after ``explode``, the rows of a picture have its index label and its metadata. No pixel is
decoded: `Tiles` computes with the columns ``height`` and ``width``, and `Pages` reads the
directories of files that may have several.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_choice, check_storage_options, shown, whole_number
from dask_image_ingest.dataset.plan.columns import AppendsColumns
from dask_image_ingest.dataset.plan.operations import is_row_wise
from dask_image_ingest.dataset.plan.scan_node import datasets_of
from dask_image_ingest.dataset.references.fetch import (
    fetch_encoded,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.scan.rows import slices_by_size
from dask_image_ingest.dataset.schema.columns import PLACE, image_field, place_field
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    ImageReference,
    backend_of,
    image_columns,
    one_chunk,
    reference_columns,
    references_of_fields,
)
from dask_image_ingest.typedefs import AnyFrame, DataFrame

#: What becomes of tiles at the right and bottom edges of an image that is no multiple of a tile.
Edge: TypeAlias = Literal["clip", "shift", "drop"]

# Formats of files that may have several pages or frames.
_PAGED = ("tiff", "gif", "webp", "png")

# Encoded bytes of files that are opened together.
_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class Parts:
    """Parts of the pictures of some rows, int64 (n,); -1 for what is unknown, or stays as it is."""

    picture: np.ndarray  # number of the row before
    page: np.ndarray
    top: np.ndarray  # in that row's picture, which may be a part itself
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray
    is_whole: np.ndarray  # bool


@dataclass(frozen=True)
class ImageNames:
    """Names of the columns about one image."""

    image: str
    height: str
    width: str

    @property
    def made(self) -> list[str]:
        """The columns that tell the part."""
        return [*(place_field(self.image, name) for name in PLACE), self.height, self.width]


class CutRows(AppendsColumns):
    """Base of expressions that repeat each row for the parts of its picture."""

    _preserves_partitioning_information = True
    images: tuple[ImageNames, ...]

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.operation(self.frame._meta, *self.operands[1:])

    @property
    def added(self) -> frozenset[Any]:
        """The references, and the columns that tell their part."""
        return frozenset(name for names in self.images for name in (names.image, *names.made))

    def _place(self, mask: dx.Expr) -> tuple[list[dx.Expr], list[dx.Expr]]:
        # Others, such as a comparison with a mean, are about the rows of parts.
        row_wise = is_row_wise(mask, (self._name, self.frame._name))
        return super()._place(mask) if row_wise else ([], [])

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        # All images stay: the size of the first says how many rows there are.
        used = {image_field(names.image, "format") for names in self.images}
        wanted = wanted | self.added | used
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == list(self.frame.columns):
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])


def _tile_rows(
    frame: DataFrame,
    images: Sequence[ImageNames],
    size: tuple[int, int],
    overlap: tuple[int, int],
    edge: Edge,
) -> DataFrame:
    heights, widths = _sizes(frame, images[0])
    parts = tile_grid(heights, widths, size, overlap, edge)
    for names in images[1:]:
        other_heights, other_widths = _sizes(frame, names)
        if ((other_heights != heights) | (other_widths != widths)).any():
            raise ArgumentError(
                f"images.tiles: {names.image!r} has another height or width than "
                f"{images[0].image!r} in some row: cut one of them at a time, with image="
            )
    return _with_parts(frame, images, parts)


class Tiles(CutRows):
    """Repeats each row for the tiles of its picture."""

    _parameters: ClassVar = ["frame", "images", "size", "overlap", "edge"]
    step = "tiles"
    operation = staticmethod(_tile_rows)


def make_tiles(
    frame: AnyFrame,
    size: int | tuple[int, int],
    overlap: int | tuple[int, int],
    edge: Edge,
    image: str | Sequence[str] | None,
) -> AnyFrame:
    """Rows of tiles; lazy if ``frame`` is. See ``images.tiles``."""
    sizes, overlaps = _pair("size", size, 1), _pair("overlap", overlap, 0)
    if any(shared >= whole for shared, whole in zip(overlaps, sizes, strict=True)):
        raise ArgumentError(f"overlap={shown(overlap)}: pass less than size={shown(size)}")
    check_choice("edge", edge, ("clip", "shift", "drop"))
    names = [image] if isinstance(image, str) else image
    images = tuple(_names_of(frame, name) for name in _references(frame, names))
    missing = [n for of in images for n in (of.height, of.width) if n not in frame.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}: images.tiles needs the "
            "height and width of each image, as the read gives them. Select them, too"
        )
    if isinstance(frame, dx.FrameBase):
        return dx.new_collection(Tiles(frame.expr, images, sizes, overlaps, edge))
    return _tile_rows(frame, images, sizes, overlaps, edge)


def tile_grid(
    heights: np.ndarray,
    widths: np.ndarray,
    size: tuple[int, int],
    overlap: tuple[int, int],
    edge: Edge,
) -> Parts:
    """The tiles of pictures of these sizes, int64 (n,), line by line; -1 is an unknown size."""
    known = (heights > 0) & (widths > 0)
    down, across = (
        np.where(known, _count(lengths, whole, shared, edge), 1)
        for lengths, whole, shared in zip((heights, widths), size, overlap, strict=True)
    )
    picture = np.repeat(np.arange(len(heights)), down * across)
    number = np.arange(len(picture)) - np.repeat(
        np.cumsum(down * across) - down * across, down * across
    )
    ends = []
    for numbers, lengths, whole, shared in zip(
        np.divmod(number, across[picture]), (heights, widths), size, overlap, strict=True
    ):
        length = lengths[picture]
        start = numbers * (whole - shared)
        if edge == "shift":
            start = np.minimum(start, np.maximum(length - whole, 0))
        ends += [start, np.minimum(whole, length - start)]
    top, height, left, width = (np.where(known[picture], values, -1) for values in ends)
    is_whole = (height == heights[picture]) & (width == widths[picture])
    return Parts(picture, np.full(len(picture), -1), top, left, height, width, is_whole)


def _count(lengths: np.ndarray, whole: int, shared: int, edge: Edge) -> np.ndarray:
    """Tiles along one edge of pictures."""
    step = whole - shared
    if edge == "drop":
        return np.maximum((lengths - whole) // step + 1, 0)
    return np.maximum(-((shared - lengths) // step), 1)


def _page_rows(
    frame: DataFrame, images: Sequence[ImageNames], storage_options: dict[str, Any] | None
) -> DataFrame:
    shapes = _page_shapes(frame, images[0], storage_options)
    counts = np.array([max(1, len(of_picture)) for of_picture in shapes], np.int64)
    picture = np.repeat(np.arange(len(frame)), counts)
    number = np.arange(len(picture)) - np.repeat(np.cumsum(counts) - counts, counts)
    edges = [edge for of_picture in shapes for shape in of_picture or [(-1, -1)] for edge in shape]
    height, width = np.array(edges, np.int64).reshape(-1, 2).T
    # The reference to an image of one page stays as it is.
    page, corner = np.where(counts[picture] > 1, number, -1), np.zeros(len(picture), np.int64)
    parts = Parts(picture, page, corner, corner, height, width, np.ones(len(picture), np.bool_))
    return _with_parts(frame, images, parts)


class Pages(CutRows):
    """Repeats each row for the pages of its picture."""

    _parameters: ClassVar = ["frame", "images", "storage_options"]
    step = "pages"
    operation = staticmethod(_page_rows)


def make_pages(
    frame: AnyFrame, image: str | None, storage_options: dict[str, Any] | None
) -> AnyFrame:
    """Rows of pages; lazy if ``frame`` is. See ``images.pages``."""
    storage_options = check_storage_options(storage_options)
    names = (_names_of(frame, *_references(frame, None if image is None else [image])),)
    if {*names[0].made} <= {*frame.columns}:
        raise ArgumentError(
            "images.pages: the rows are parts already. Take pages, then their tiles"
        )
    if not isinstance(frame, dx.FrameBase):
        return _page_rows(frame, names, storage_options)
    if storage_options is None:
        options = (dataset.options.storage_options for dataset in datasets_of(frame.expr))
        storage_options = next(options, None)
    return dx.new_collection(Pages(frame.expr, names, storage_options))


def _page_shapes(
    frame: DataFrame, names: ImageNames, storage_options: dict[str, Any] | None
) -> list[list[tuple[int, int]]]:
    """Height and width of each page of each row's picture; empty if it can't be read."""
    rows = reference_rows(references_of(frame, names.image))
    known: dict[ImageReference | None, list[tuple[int, int]]] = {None: []}
    formats: list[str | None] = [None] * len(rows)
    if (format_ := image_field(names.image, "format")) in frame.columns:
        formats = backend_of(frame).to_arrow(frame[[format_]]).column(0).to_pylist()
    sizes = zip(*(edges.tolist() for edges in _sizes(frame, names)), strict=True)
    for row, name, size in zip(rows, formats, sizes, strict=True):
        if name is not None and name not in _PAGED and size[0] > 0:
            known[row] = [size]  # such a file need not be opened
    opened = [row for row in dict.fromkeys(rows) if row is not None and row not in known]
    nbytes = np.array([row.nbytes or 0 for row in opened], np.int64)
    for some in slices_by_size([nbytes], _AT_ONCE):
        fetched = fetch_encoded(opened[some], storage_options)
        for row, data in zip(opened[some], fetched, strict=True):
            known[row] = [] if isinstance(data, Header) else page_shapes(data)
    return [known[row] for row in rows]


def _with_parts(frame: DataFrame, images: Sequence[ImageNames], parts: Parts) -> DataFrame:
    """The row of each part, with its reference and the columns that tell it."""
    backend = backend_of(frame)
    frame = frame.take(parts.picture)
    unknown = pa.array(parts.height < 0)
    is_cut = pa.array((parts.height >= 0) & ~parts.is_whole)
    for names in images:
        references = one_chunk(references_of(frame, names.image))
        fields = dict(zip(references.type.names, references.flatten(), strict=True))
        for name in ("top", "left", "height", "width"):
            value = pa.array(getattr(parts, name).astype(np.float64))
            if name in PLACE:  # in that of the row before, if it was a part
                value = pc.add(value, pc.fill_null(fields[name], 0.0))
            fields[name] = pc.if_else(is_cut, value, fields[name])
        fields["in_shares"] = pc.if_else(is_cut, False, fields["in_shares"])
        has_page = pa.array(parts.page >= 0)
        fields["page"] = pc.if_else(has_page, pa.array(parts.page), fields["page"])
        cut = references_of_fields(len(frame), fields, references.is_null())
        frame = backend.with_references(frame, cut, names.image, None)
        values = [pc.fill_null(fields[name], 0) for name in PLACE]
        values += [pa.array(parts.height), pa.array(parts.width)]
        columns = {
            name: (pc.if_else(unknown, None, value).cast(pa.int32()), pa.int32())
            for name, value in zip(names.made, values, strict=True)
        }
        frame = backend.with_columns(frame, columns, range(len(frame)))
    return frame


def _sizes(frame: DataFrame, names: ImageNames) -> list[np.ndarray]:
    """Heights and widths by their columns, int64 (n,); -1 where unknown."""
    wanted = [name for name in (names.height, names.width) if name in frame.columns]
    if len(wanted) < 2:
        return [np.full(len(frame), -1)] * 2
    columns = backend_of(frame).to_arrow(frame[wanted]).columns
    return [pc.fill_null(column.cast(pa.int64()), -1).to_numpy() for column in columns]


def _references(frame: AnyFrame, names: Sequence[str] | None) -> list[str]:
    """The columns of references that are named; None: the only one, or ``image``."""
    references = reference_columns(frame)
    if names is None and (len(references) == 1 or "image" in references):
        return references if len(references) == 1 else ["image"]
    if names and {*names} <= {*references}:
        return list(names)
    decoded = image_columns(frame)
    raise ArgumentError(
        f"image={shown(names)}: the frame's columns of references are "
        f"{', '.join(map(repr, references)) or 'none'}"
        + ("; its images are decoded: read with decode=False, and decode the parts" * bool(decoded))
    )


def _names_of(frame: AnyFrame, image: str) -> ImageNames:
    """The columns about an image: those of the first of a read have no prefix."""
    height, width = (image_field(image, name) for name in ("height", "width"))
    if height not in frame.columns and reference_columns(frame)[0] == image:
        height, width = "height", "width"
    return ImageNames(image, height, width)


def _pair(argument: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """(height, width) of an argument that is one number or both."""
    both = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)
    advice = f"pass pixels, a whole number of at least {least}, or (height, width)"
    height, width = (whole_number(argument, edge, least, advice) for edge in both)
    return height, width


def page_shapes(data):  # stand-in
    import io

    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(bytes(data)))
        shapes = []
        for n in range(getattr(image, "n_frames", 1)):
            image.seek(n)
            size = image.size
            if image.getexif().get(274, 1) >= 5:
                size = size[::-1]
            shapes.append(size[::-1])
        return shapes
    except (OSError, UnidentifiedImageError):
        return []
