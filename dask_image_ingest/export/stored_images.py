"""Stored images of a column: the references below its decode, and the files that they refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from dask_image_ingest.dask_internals import new_collection
from dask_image_ingest.dataset import Decode, fetch_encoded, reference_rows
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage import SIGNATURE_BYTES, image_format
from dask_image_ingest.view import references_of_images

# Extensions of images by their format, and that of all others, which readers take for an image too.
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
    """The files that references refer to, as they are stored; None where there is none."""
    rows = reference_rows(references)
    there = [row for row, reference in enumerate(rows) if reference is not None]
    fetched = fetch_encoded([each for each in rows if each is not None], storage_options)
    files: list[bytes | None] = [None] * len(rows)
    for row, file in zip(there, fetched, strict=True):
        files[row] = None if isinstance(file, Header) else bytes(file)
    return files


def stored_name(column: Any) -> str:
    """The name of the references of an image column beside it."""
    return f"stored:{column}"


def with_stored(frame: Any, columns: Sequence[Any], with_errors: bool) -> Any:
    """A lazy frame with references, by `stored_name`, in place of some columns of pixels.

    Images that are only referred to are not decoded, unless for their errors.

    Raises
    ------
    ArgumentError
        If a step after the decode looks at what it makes.
    """
    found = references_of_images(frame, list(frame.columns), None)
    if found is None:
        raise ArgumentError(
            f"the stored images of {columns[0]!r} cannot be written: a step of the frame looks at "
            "pixels or errors after the decode. Read with decode=False and export the references, "
            f"or encode the pixels, members={{'png': {columns[0]!r}}}"
        )
    rows, images = found
    names = {column: stored_name(column) for column in columns}
    if with_errors:
        rows = rows.assign(**{names[column]: rows[column] for column in columns})
    else:
        rows = rows.rename(columns=names)
        images = {name: each for name, each in images.items() if name not in names}
    left = tuple(replace(each, pixels=name not in names) for name, each in images.items())
    return new_collection(Decode(rows.expr, left)) if left else rows
