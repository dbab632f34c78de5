"""Images that a user's function makes: checked, and made a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_image_ingest.decode import Pixels
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend
from dask_image_ingest.ops.given_array import given_array

__all__ = ["checked_images", "with_image_column"]


def checked_images(name: str, values: Any, count: int, backend: Backend) -> list[Any]:
    """The images of a batch, one array (height, width, channels) for each.

    Raises
    ------
    ArgumentError
    """
    if isinstance(values, (list, tuple)):
        told = f"a list of {len(values)}"
        images = [given_array(value, backend) for value in values]
        fits = len(values) == count
    else:
        batch = given_array(values, backend)
        told, fits = f"an array of shape {batch.shape}", batch.ndim == 4 and len(batch) == count
        images = list(batch) if fits else []
    if not fits:
        raise ArgumentError(
            f"map_batches: the function gave {told} as the images {name!r} of a batch of {count}: "
            "give an array (n, height, width, channels), or a list of arrays (height, width, "
            "channels)"
        )
    for image in images:
        if image.ndim != 3 or image.dtype != np.uint8 or not image.size:
            raise ArgumentError(
                f"map_batches: the function gave an image of shape {image.shape} and type "
                f"{image.dtype} in {name!r}: images are (height, width, channels) of uint8, with a "
                "pixel at least; .clip(0, 255).astype('uint8') makes them of floats"
            )
    return images


def with_image_column(
    frame: Any, name: str, images: Sequence[Any], rows: Sequence[int], backend: Backend
) -> Any:
    """``frame`` with a column of images, which belong to ``rows`` of it; null in the others."""
    shapes = np.zeros((len(frame), 3), np.int32)
    errors: list[str | None] = ["missing"] * len(frame)
    for row, image in zip(rows, images, strict=True):
        shapes[row], errors[row] = image.shape, None
    # Of a frame of no rows no GPU is asked: a client plans with one, and may have none.
    flat = (backend.numpy if len(frame) else np).empty(0, np.uint8)
    if images:
        flat = backend.numpy.concatenate([image.reshape(-1) for image in images])
    return backend.with_images(frame, Pixels(flat, shapes, errors), name, None)
