"""Decoded images made small, and made files again."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from dask_image_ingest.decode import Pixels, make_decoding, resize_arrays
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of

# Grey, grey and alpha, RGB, RGBA.
_CHANNELS = {"jpeg": (1, 3), "png": (1, 2, 3, 4), "webp": (1, 2, 3, 4)}


def small_images(frame: Any, image: str, size: int | tuple[int, int], resize: str) -> Any:
    """A pandas or cuDF frame with its images resized."""
    backend = backend_of(frame)
    decoding = make_decoding(
        device=backend.device, size=size, resize=resize, mode="RGB", transform=None, max_pixels=None
    )
    arrays = backend.arrays(frame[image])
    present = [row for row, array in enumerate(arrays) if array is not None]
    shapes = np.zeros((len(arrays), 3), np.int32)
    buffer = backend.pixel_buffer(0)
    given = [backend.host(arrays[row]) for row in present]
    shapes[present] = resize_arrays(given, decoding, buffer)
    errors = [None if array is not None else "missing" for array in arrays]
    column = backend.with_images(frame[[]], Pixels(buffer.finish(), shapes, errors))["image"]
    return frame.assign(**{image: column})


def encoded_images(frame: Any, image: str, format: str, quality: int) -> Any:
    """The images of a pandas or cuDF frame as a series of encoded bytes, by Pillow."""
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    rows = [row for row, array in enumerate(arrays) if array is not None]
    values = [encode(backend.host(arrays[row]), format, quality) for row in rows]
    return backend.with_columns(frame[[]], {image: (values, pa.binary())}, rows)[image]


def encode(array: np.ndarray, format: str, quality: int) -> bytes:
    """One image (height, width, channels) as a file.

    Raises
    ------
    ArgumentError
        If files of this format have no such number of channels, or are not that large.
    """
    channels, takes = array.shape[2], _CHANNELS[format]
    if channels not in takes:
        instead = ", or encode('png')" if channels in _CHANNELS["png"] else ""
        raise ArgumentError(
            f"encode: an image has {channels} channels, and {format} takes "
            f"{', '.join(map(str, takes[:-1]))} or {takes[-1]}: make such images first, as "
            "map_batches(lambda images: [image[..., :3] for image in images], {'image': 'image'}) "
            f"does{instead}"
        )
    file = io.BytesIO()
    pixels = array[:, :, 0] if array.shape[2] == 1 else array
    try:
        Image.fromarray(pixels).save(file, format, quality=quality)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"encode: an image of {array.shape[0]} × {array.shape[1]} pixels can't be a {format}: "
            f"{error}"
        ) from error
    return file.getvalue()
