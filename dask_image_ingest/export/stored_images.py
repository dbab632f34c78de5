"""Stored images of a column: references from below its decode, and the files they refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import new_collection
from dask_image_ingest.dataset import Decode, fetch_encoded, reference_rows
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.query import operation_name
from dask_image_ingest.storage import SIGNATURE_BYTES, image_format
from dask_image_ingest.view import references_of_images

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

#: The extensions that `extension_of` gives.
STORED_EXTENSIONS: Final = (*_EXTENSIONS.values(), _OTHER)


def extension_of(file: bytes) -> str:
    """The extension of an image by its first bytes."""
    return _EXTENSIONS.get(image_format(file[:SIGNATURE_BYTES]) or "", _OTHER)


def stored_files(references: Any, storage_options: dict[str, Any] | None) -> list[bytes | None]:
    """The stored bytes of the referenced images; None for nulls and images that can't be read."""
    references_or_none = reference_rows(references)
    rows = [row for row, reference in enumerate(references_or_none) if reference is not None]
    wanted = [reference for reference in references_or_none if reference is not None]
    fetched = fetch_encoded(wanted, storage_options)
    files: list[bytes | None] = [None] * len(references_or_none)
    for row, file in zip(rows, fetched, strict=True):
        files[row] = None if isinstance(file, Header) else bytes(file)
    return files


def not_referenced(frame: Any, column: Any, more: str = "") -> ArgumentError:
    """The error for an image column whose decode can't be left out; ``more``: another way."""
    steps = frame[[column]].simplify().expr.find_operations(dx.Expr)
    above = (s for s in steps if any(isinstance(below, Decode) for below in s.dependencies()))
    step = next((operation_name(step) for step in above), "a step of the frame")
    return ArgumentError(
        f"the stored images of {column!r} cannot be written: {step} comes after their decode, "
        f"which can't be left out there. Read with decode=False and export the references{more}"
    )


def stored_name(column: Any) -> str:
    """The name of the column with the references of an image column."""
    return f"stored:{column}"


def with_stored(frame: Any, columns: Sequence[Any], with_errors: bool) -> Any:
    """Replace columns of pixels of a lazy frame by references, named by `stored_name`.

    These images are not decoded, except ``with_errors``.

    Raises
    ------
    ArgumentError
        If an operation after the decode depends on pixels or errors.
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
    # Decoded without pixels where only the errors are needed.
    decoded = tuple(replace(image, pixels=name not in names) for name, image in images.items())
    return new_collection(Decode(rows.expr, decoded)) if decoded else rows
