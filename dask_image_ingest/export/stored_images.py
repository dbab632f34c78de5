"""Stored images of a column: references from below its decode, and the files they refer to.

The origin of a column's pixels says whether they are those of its references.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset.plan import (
    AppendsColumns,
    Change,
    KeepsResults,
    MapColumns,
    Scan,
    ScanFiles,
    ScanShards,
    backtrack,
    value_sources,
)
from dask_image_ingest.dataset.references import (
    CutRows,
    Decode,
    adds_references,
    cuts_boxes,
    fetch_encoded,
    field_of,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.schema import part_columns
from dask_image_ingest.decode import DecodeSpec, Header, Mode
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.query import operation_name
from dask_image_ingest.frames import backend_of
from dask_image_ingest.ops import ENCODED_FORMATS
from dask_image_ingest.storage import SIGNATURE_BYTES, image_format
from dask_image_ingest.typedefs import AnyFrame, DataFrame
from dask_image_ingest.view import references_of_images

#: Last part of a member's extension → format of encoded pixels.
FORMAT_OF_EXTENSION: Final = {"jpg": "jpeg", **{name: name for name in ENCODED_FORMATS}}

# What has made references to parts in a frame whose query is unknown.
_PARTS: Final = "images.tiles or images.pages"


@dataclass(frozen=True)
class ImageOrigin:
    """Origin of an image column."""

    #: The public name of the operation that changed its pixels; None if they are the stored ones.
    changed_by: str | None
    #: Which image of the row's sample it is; None if it belongs to no such sample, as images of
    #: another read that were merged.
    member: Literal["image", "other"] | None
    #: Extensions of the member if it is another image of the sample; empty if unknown.
    extensions: tuple[str, ...] = ()
    #: The modes that it was decoded in.
    modes: frozenset[Mode] = frozenset()

    @property
    def is_exact(self) -> bool:
        """True for labels and raw values, which need a lossless format."""
        return not self.modes.isdisjoint(("labels", "raw"))

    def extension(self, column: str) -> str:
        """An extension under which the column can be encoded without replacing another image."""
        lossless = self.is_exact or "RGBA" in self.modes
        if self.member == "image" or column == "image":
            return "png" if lossless else "jpg"
        first = self.extensions[0] if self.extensions else f"{column}.png".lower()
        stem, _, kind = first.rpartition(".")
        kept = kind == "png" or (not lossless and kind in FORMAT_OF_EXTENSION)
        return first if kept else f"{stem or column.lower()}.png"


def image_origin(frame: AnyFrame, column: str) -> ImageOrigin:
    """The origin of a column of images or references, as far as it is known."""
    if not isinstance(frame, FrameBase):
        return _computed_origin(frame, column)
    sample_reads = _sample_reads(frame.expr)
    traced = backtrack(frame.expr, (column,))
    origins = [_origin(changes, sample_reads) for changes in traced]
    changed_by = next((origin.changed_by for origin in origins if origin.changed_by), None)
    members = {origin.member for origin in origins}
    return ImageOrigin(
        changed_by,
        origins[0].member if len(members) == 1 else None,
        origins[0].extensions,
        frozenset().union(*(origin.modes for origin in origins)),
    )


def _computed_origin(frame: DataFrame, column: str) -> ImageOrigin:
    if backend_of(frame).is_images(frame[column].dtype):
        is_image = column == "image"
        return ImageOrigin(
            "a computed frame, whose query is unknown", "image" if is_image else None
        )
    if "__url__" not in frame.columns:
        return ImageOrigin(None, None)
    references = references_of(frame, column)
    sample_urls = backend_of(frame).to_arrow(frame[["__url__"]]).column(0)
    same = pc.fill_null(pc.equal(field_of(references, "url"), sample_urls), False)
    is_own = pc.all(pc.or_(same, references.is_null())).as_py() is not False
    changed_by = _PARTS if _has_parts(references) else None
    return ImageOrigin(changed_by, ("image" if column == "image" else "other") if is_own else None)


def _origin(changes: list[Change], sample_reads: set[str]) -> ImageOrigin:
    """The origin of images by what made and changed them, down to their references."""
    changed_by, modes = None, set()
    for expr, (name,) in changes:
        if isinstance(expr, KeepsResults):
            continue
        if isinstance(expr, CutRows):
            changed_by = changed_by or operation_name(expr)
            continue
        if cuts_boxes(expr):
            changed_by = changed_by or "decode_images with box="
            continue
        meta = expr._meta if expr.ndim == 1 else expr._meta[name]
        if backend_of(meta).is_references(meta.dtype):
            origin = _reference_origin(expr, name, sample_reads)
            if changed_by is None and name in part_columns(expr.columns):
                changed_by = _PARTS
            break
        if isinstance(expr, Decode):
            decoding = next(image.decoding for image in expr.images if image.image == name)
            changed_by = changed_by or _changed_by(expr, decoding)
            modes.add(decoding.mode)
        else:
            changed_by = changed_by or operation_name(expr)
    else:
        origin = ImageOrigin(None, "image" if name == "image" else None)
    return replace(origin, changed_by=changed_by, modes=frozenset(modes))


def _reference_origin(source: dx.Expr, name: Hashable, sample_reads: set[str]) -> ImageOrigin:
    """The origin of references that the expression ``source`` makes."""
    reads = {source._name}
    if adds_references(source):
        reads = _sample_reads(source.frame)
    if not reads <= sample_reads:
        return ImageOrigin(None, None)
    if isinstance(source, ScanFiles) and name != "image":
        return ImageOrigin(None, None)  # a file of its own
    others = source.dataset.options.images[1:] if isinstance(source, ScanShards) else ()
    extensions = next((other.extensions for other in others if other.column == name), ())
    return ImageOrigin(None, "image" if name == "image" else "other", extensions)


def _sample_reads(expr: dx.Expr) -> set[str]:
    """Names of the expressions that may make the columns ``__url__`` and ``offset``."""
    names = set()
    for source, _ in value_sources(expr, ("__url__", "offset")):
        reads = source.find_operations((ScanShards, ScanFiles))
        names |= {source._name, *(read._name for read in reads)}
    return names


def _changed_by(decode: Decode, decoding: DecodeSpec) -> str | None:
    """Name and options of a decode that changes pixels; None if it gives the stored ones."""
    options = [
        *["size="] * (decoding.size is not None),
        *["mode="] * (decoding.mode == "L"),
        *["augment="] * decoding.is_augmented,
        *["transform="] * (decoding.transform is not None),
    ]
    return f"{operation_name(decode)} with {', '.join(options)}" if options else None


# Extensions by format; others get a generic one, which readers take for an image, too.
_EXTENSIONS: Final = {
    "jpeg": "jpg",
    "png": "png",
    "webp": "webp",
    "gif": "gif",
    "bmp": "bmp",
    "tiff": "tif",
}
_OTHER: Final = "img"

#: The extensions that `stored_extension` gives.
STORED_EXTENSIONS: Final = (*_EXTENSIONS.values(), _OTHER)


def stored_extension(file: bytes) -> str:
    """The extension of an image by its first bytes."""
    return _EXTENSIONS.get(image_format(file[:SIGNATURE_BYTES]) or "", _OTHER)


def stored_files(
    references: pa.ChunkedArray, storage_options: dict[str, Any] | None
) -> list[bytes | None]:
    """The stored bytes of the referenced images; None for nulls and images that can't be read."""
    references_or_none = reference_rows(references)
    rows = [row for row, reference in enumerate(references_or_none) if reference is not None]
    wanted = [reference for reference in references_or_none if reference is not None]
    _refuse_parts(references)
    fetched = fetch_encoded(wanted, storage_options)
    files: list[bytes | None] = [None] * len(references_or_none)
    for row, file in zip(rows, fetched, strict=True):
        files[row] = None if isinstance(file, Header) else bytes(file[:])
    return files


def _refuse_parts(references: pa.ChunkedArray) -> None:
    if _has_parts(references):
        raise ArgumentError(
            "parts of pictures, such as tiles, are not stored by themselves: decode_images decodes "
            "them, and to_webdataset(members={'jpg': Encode('image')}) encodes them"
        )


def _has_parts(references: pa.ChunkedArray) -> bool:
    fields = (field_of(references, name) for name in ("page", "top"))
    return any(field.null_count < len(field) for field in fields)


def refusing_parts(frame: AnyFrame, columns: Collection[Hashable]) -> AnyFrame:
    """A frame whose computation raises if image columns are parts, and their references alone say.

    Those of a table that another program made may lack the columns of a part.
    """
    if not isinstance(frame, FrameBase):
        return frame  # `image_origin` has looked
    expr = frame.expr
    for column in columns:
        for *_, (source, (name,)) in backtrack(frame.expr, (column,)):
            known = isinstance(source, (Scan, AppendsColumns)) or "__key__" not in source.columns
            if not known and backend_of(source._meta).is_references(source._meta[name].dtype):
                # Made of the key, which every export needs.
                inputs = "__key__", name
                checked = MapColumns(source, _checked_for_parts, inputs[:1], inputs, name)
                expr = expr.substitute(source, checked)
    return new_collection(expr)


def _checked_for_parts(frame: DataFrame, image: Hashable) -> DataFrame:
    _refuse_parts(references_of(frame, image))
    return frame


def not_referenced(frame: AnyFrame, column: Hashable, more: str = "") -> ArgumentError:
    """The error for an image column whose decode can't be left out; ``more``: another way."""
    steps = frame[[column]].simplify().expr.find_operations(dx.Expr)
    above = (s for s in steps if any(isinstance(below, Decode) for below in s.dependencies()))
    step = next((operation_name(step) for step in above), "a step of the frame")
    return ArgumentError(
        f"the stored images of {column!r} cannot be written: {step} comes after their decode, "
        f"which can't be left out there. Read with decode=False and export the references{more}"
    )


def stored_name(column: Hashable) -> str:
    """The name of the column with the references of an image column."""
    return f"stored:{column}"


def with_stored(frame: AnyFrame, columns: Sequence[Hashable], with_errors: bool) -> AnyFrame:
    """Replace columns of pixels of a lazy frame by references, named by `stored_name`.

    These images are not decoded, except ``with_errors``.
    """
    rows, images = references_of_images(frame, list(frame.columns), None) or (frame, {})
    for column in columns:
        if column not in images:
            raise not_referenced(
                frame, column, f", or encode the pixels, members={{'png': {column!r}}}"
            )
    names = {column: stored_name(column) for column in columns}
    if with_errors:
        rows = rows.assign(**{names[column]: rows[column] for column in columns})
    else:
        rows = rows.rename(columns=names)
        images = {name: image for name, image in images.items() if name not in names}
    # Decoded without pixels where only the errors are needed; boxes are those of the stored image.
    decoded = tuple(
        replace(image, pixels=False, region=None, annotations=None) if name in names else image
        for name, image in images.items()
    )
    return new_collection(Decode(rows.expr, decoded)) if decoded else rows
