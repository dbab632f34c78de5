"""Tiles and pages as rows: a picture's row is repeated for each, and its reference gets the part.

As after ``explode``, the rows of a picture have its index label and its metadata. No pixel is
decoded: `Tiles` computes with the columns ``height`` and ``width``; `Pages` opens files that may
have several.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_choice, check_storage_options, shown, whole_number
from dask_image_ingest.dataset.plan.columns import AppendsColumns
from dask_image_ingest.dataset.plan.operations import is_row_wise
from dask_image_ingest.dataset.plan.scan_node import datasets_of
from dask_image_ingest.dataset.references.fetch import fetch_encoded, reference_rows, references_of
from dask_image_ingest.dataset.scan.rows import slices_by_size
from dask_image_ingest.dataset.schema.columns import EDGES, PLACE, image_field, part_names
from dask_image_ingest.decode import BadImage, Header, page_shapes
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    ImageReference,
    backend_of,
    fields_of,
    one_chunk,
    reference_columns,
    references_of_fields,
)
from dask_image_ingest.typedefs import AnyFrame, DataFrame

#: What becomes of tiles at the right and bottom edges of an image that is no multiple of a tile.
Edge: TypeAlias = Literal["clip", "shift", "drop"]

#: Image column → its `part_names`, of each image that is cut.
Images: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]

# Formats of files that may have several pages or frames.
_PAGED = ("tiff", "gif", "webp", "png")

# Edge of a tile that is larger than every image, for a larger one.
_LONGEST = 2**31 - 1

# Encoded bytes of files that are opened together.
_AT_ONCE = 64 << 20


class CutRows(AppendsColumns):
    """Base of expressions that repeat each row for the parts of its picture."""

    _preserves_partitioning_information = True
    images: Images

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.operation(self.frame._meta, *self.operands[1:])

    @property
    def added(self) -> frozenset[Any]:
        """The references, and the columns that tell their part."""
        return frozenset(name for image, names in self.images for name in (image, *names))

    def _place(self, mask: dx.Expr) -> tuple[list[dx.Expr], list[dx.Expr]]:
        # Others, such as a comparison with a mean, are about the rows of parts.
        row_wise = is_row_wise(mask, (self._name, self.frame._name))
        return super()._place(mask) if row_wise else ([], [])

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        # All images stay: the size of the first says how many rows there are.
        wanted = wanted.union(
            self.added, (image_field(image, "format") for image, _ in self.images)
        )
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == list(self.frame.columns):
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])


def _tile_rows(
    frame: DataFrame, images: Images, size: tuple[int, int], overlap: tuple[int, int], edge: Edge
) -> DataFrame:
    sizes = [_sizes(frame, names) for _, names in images]
    for (other, _), of_other in zip(images[1:], sizes[1:], strict=True):
        if (of_other != sizes[0]).any():
            raise ArgumentError(
                f"images.tiles: {other!r} and {images[0][0]!r} differ in height or width in some "
                "row: cut them one after the other, with image="
            )
    picture, tiles = tile_grid(sizes[0], size, overlap, edge)
    is_cut = (tiles[:, 2:] != sizes[0][picture]).any(axis=1)
    return _with_parts(frame, images, picture, np.full(len(tiles), -1), tiles, is_cut)


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
    images = _images(frame, [image] if isinstance(image, str) else image)
    missing = [name for _, names in images for name in names[-2:] if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}: images.tiles needs the "
            "height and width of each image, as the read gives them. Select them, too"
        )
    if isinstance(frame, dx.FrameBase):
        return dx.new_collection(Tiles(frame.expr, images, sizes, overlaps, edge))
    return _tile_rows(frame, images, sizes, overlaps, edge)


def tile_grid(
    sizes: np.ndarray, size: tuple[int, int], overlap: tuple[int, int], edge: Edge
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of pictures, line by line: the picture's number, int64 (n,), and the tiles, (n, 4).

    ``sizes`` are heights and widths, int64 (pictures, 2). A tile is top, left, height and width; a
    picture of unknown size, -1, has one of -1.
    """
    known = np.asarray((sizes > 0).all(axis=1))
    whole, shared = np.array(size), np.array(overlap)
    step = whole - shared
    if edge == "drop":
        counts = np.maximum((sizes - whole) // step + 1, 0)
    else:
        counts = np.maximum(-((shared - sizes) // step), 1)
    counts[~known] = 1
    picture, number = _numbered(counts.prod(axis=1))
    starts = np.stack(np.divmod(number, counts[picture, 1]), axis=1) * step
    lengths = sizes[picture]
    if edge == "shift":
        starts = np.minimum(starts, np.maximum(lengths - whole, 0))
    tiles = np.concatenate([starts, np.minimum(whole, lengths - starts)], axis=1)
    tiles[~known[picture]] = -1
    return picture, tiles


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The picture of each part, and the part's number in it, from how many parts each has."""
    picture = np.repeat(np.arange(len(counts)), counts)
    return picture, np.arange(len(picture)) - np.repeat(np.cumsum(counts) - counts, counts)


def _page_rows(
    frame: DataFrame, images: Images, storage_options: dict[str, Any] | None
) -> DataFrame:
    ((image, names),) = images
    shapes, errors = _page_shapes(frame, image, names, storage_options)
    if any(errors):
        references = one_chunk(references_of(frame, image))
        fields = fields_of(references)
        fields["error"] = pc.coalesce(fields["error"], pa.array(errors, pa.string()))
        made = references_of_fields(len(frame), fields, references.is_null())
        frame = backend_of(frame).with_references(frame, made, image, None)
    counts = np.array([len(of_picture) for of_picture in shapes], np.int64)
    picture, number = _numbered(counts)
    # The reference to an image of one page stays as it is.
    page = np.where(counts[picture] > 1, number, -1)
    parts = np.zeros((len(page), 4), np.int64)
    parts[:, 2:] = np.array([shape for of in shapes for shape in of], np.int64).reshape(-1, 2)
    return _with_parts(frame, images, picture, page, parts, np.zeros(len(page), np.bool_))


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
    images = _images(frame, None if image is None else [image])
    if {*images[0][1]} <= {*frame.columns}:
        raise ArgumentError("images.pages: rows are parts already. Take pages, then their tiles")
    if not isinstance(frame, dx.FrameBase):
        return _page_rows(frame, images, storage_options)
    if storage_options is None:
        options = (dataset.options.storage_options for dataset in datasets_of(frame.expr))
        storage_options = next(options, None)
    return dx.new_collection(Pages(frame.expr, images, storage_options))


def _page_shapes(
    frame: DataFrame, image: str, names: Sequence[str], storage_options: dict[str, Any] | None
) -> tuple[list[list[tuple[int, int]]], list[str | None]]:
    """Height and width of each page of each row's image, and the error of one that has none.

    Such an image has one page, of -1 x -1.
    """
    references = reference_rows(references_of(frame, image))
    known: dict[ImageReference | None, list[tuple[int, int]]] = {None: []}
    errors: dict[ImageReference | None, str] = {}
    if {format_ := image_field(image, "format"), *names[-2:]} <= {*frame.columns}:
        formats = backend_of(frame).to_arrow(frame[[format_]]).column(0).to_pylist()
        for reference, name, size in zip(references, formats, _sizes(frame, names), strict=True):
            if name is not None and name not in _PAGED:
                known[reference] = [tuple(size.tolist())]  # such a file need not be opened
    opened = [one for one in dict.fromkeys(references) if one is not None and one not in known]
    nbytes = np.array([one.nbytes or 0 for one in opened], np.int64)
    for some in slices_by_size([nbytes], _AT_ONCE):
        # As a page, of which no more than the directories is read.
        wanted = [replace(one, page=0) for one in opened[some]]
        for reference, data in zip(
            opened[some], fetch_encoded(wanted, storage_options), strict=True
        ):
            known[reference] = []
            try:
                known[reference] = [] if isinstance(data, Header) else page_shapes(data)
            except BadImage as bad:
                errors[reference] = str(bad)
    return [known[one] or [(-1, -1)] for one in references], [*map(errors.get, references)]


def _with_parts(
    frame: DataFrame,
    images: Images,
    picture: np.ndarray,
    page: np.ndarray,
    parts: np.ndarray,
    is_cut: np.ndarray,
) -> DataFrame:
    """The row of each part, with its reference and the columns that tell it.

    ``picture`` is the number of its row in ``frame``, ``page`` its page, -1 for that of this row,
    int64 (n,); ``parts`` are rectangles in this row's image as of `tile_grid`; all of it, if not
    ``is_cut``.
    """
    backend = backend_of(frame)
    frame = frame.take(picture)
    cut, has_page, unknown = map(pa.array, (is_cut, page >= 0, parts[:, 2] < 0))
    for image, names in images:
        references = one_chunk(references_of(frame, image))
        fields = fields_of(references)
        values = {}
        for name, numbers in zip((*PLACE[1:], *EDGES), parts.T, strict=True):
            value = pa.array(numbers.astype(np.float64))
            if name in PLACE:  # in that of the row before, if it was a part
                value = pc.add(value, pc.fill_null(fields[name], 0.0))
            fields[name] = pc.if_else(cut, value, fields[name])
            values[name] = value
        fields["in_shares"] = pc.if_else(cut, False, fields["in_shares"])
        fields["page"] = pc.if_else(has_page, pa.array(page, pa.int32()), fields["page"])
        values = {"page": pc.fill_null(fields["page"], 0), **values}
        made = references_of_fields(len(frame), fields, references.is_null())
        frame = backend.with_references(frame, made, image, None)
        columns = {
            name: (pc.if_else(unknown, None, value).cast(pa.int32()), pa.int32())
            for name, value in zip(names, values.values(), strict=True)
        }
        frame = backend.with_columns(frame, columns, range(len(frame)))
    return frame


def _sizes(frame: DataFrame, names: Sequence[str]) -> np.ndarray:
    """Height and width of each row's image by its `part_names`, int64 (n, 2); -1 if unknown."""
    columns = backend_of(frame).to_arrow(frame[[*names[-2:]]]).columns
    edges = [pc.fill_null(column.cast(pa.int64()), -1).to_numpy() for column in columns]
    return np.stack(edges, axis=1)


def _images(frame: AnyFrame, names: Sequence[str] | None) -> Images:
    """The columns of references that are named; None: the only one, or ``image``."""
    references = reference_columns(frame)
    if names is None:
        names = references if len(references) == 1 else ["image"]
    if not references:
        raise ArgumentError(
            "the frame has no column of references, of which tiles and pages are made: read with "
            "decode=False, and keep the column 'image' (filters, joins and parquet files keep it, "
            "too; __url__, offset and nbytes are no references). decode_images decodes the parts"
        )
    if not names or not {*names} <= {*references}:
        raise ArgumentError(
            f"image={shown(names)}: the frame's columns of references are "
            f"{', '.join(map(repr, references))}"
        )
    return tuple((n, part_names(n, frame.columns, n == references[0])) for n in names)


def _pair(argument: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    both = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)
    advice = f"pass pixels, a whole number of at least {least}, or (height, width)"
    height, width = (whole_number(argument, edge, least, advice) for edge in both)
    return min(height, _LONGEST), min(width, _LONGEST)
