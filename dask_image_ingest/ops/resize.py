"""Decoded images made small, and made files again."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from dask_image_ingest.decode import Pixels, decoders_for, make_decoding
from dask_image_ingest.frames import backend_of

# DALI has a copy of each image that it is to resize.
_BATCH_SIZE = 64


def small_images(frame: Any, image: str, size: int | tuple[int, int], resize: str) -> Any:
    """A pandas or cuDF frame with its images resized, by DALI."""
    backend = backend_of(frame)
    decoding = make_decoding(
        device=backend.device, size=size, resize=resize, mode="RGB", transform=None, max_pixels=None
    )
    arrays = backend.arrays(frame[image])
    present = [row for row, array in enumerate(arrays) if array is not None]
    batches = (
        [backend.host(arrays[row]) for row in present[start : start + _BATCH_SIZE]]
        for start in range(0, len(present), _BATCH_SIZE)
    )
    shapes = np.zeros((len(arrays), 3), np.int32)
    buffer = backend.pixel_buffer(0)
    done = 0
    dali = decoders_for(decoding)
    with dali.lock:
        try:
            dali.clear()
            for images in dali.pixels.run(batches):
                shapes[present[done : done + len(images)]] = images.shape()
                buffer.append(images)
                done += len(images)
        finally:
            dali.clear()
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
    """One image (height, width, channels) as a file."""
    file = io.BytesIO()
    pixels = array[:, :, 0] if array.shape[2] == 1 else array
    Image.fromarray(pixels).save(file, format, quality=quality)
    return file.getvalue()
