"""Resizing and encoding of decoded images."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import pyarrow as pa
from PIL import Image

from dask_image_ingest.decode import DecodeSpec, Header, Pixels, make_decode_spec, resize_arrays
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import as_uint8, backend_of

# Numbers of channels: grey, grey and alpha, RGB, RGBA.
_CHANNELS: Final = {"jpeg": (1, 3), "png": (1, 2, 3, 4), "webp": (1, 2, 3, 4)}


def small_images(
    frame: Any,
    image: str,
    size: int | tuple[int, int],
    resize: str,
    *,
    smooth: bool = False,
) -> Any:
    """Resize the images of a pandas or cuDF frame, and convert them to uint8, for display.

    If all images have one channel, they may be labels, and the nearest pixel is taken, unless
    ``smooth``.
    """
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    nearest = not smooth and all(array is None or array.shape[2] == 1 for array in arrays)
    decoding = make_decode_spec(
        device=backend.device,
        size=size,
        resize=resize,
        mode="labels" if nearest else "RGB",
        transform=None,
        max_pixels=None,
    )
    errors = [_error(array, decoding) for array in arrays]
    present = [row for row, error in enumerate(errors) if error is None]
    shapes = np.zeros((len(arrays), 3), np.int32)
    buffer = backend.pixel_buffer(0)
    images = [as_uint8(backend.host(arrays[row])) for row in present]
    shapes[present] = resize_arrays(images, decoding, buffer)
    frame = backend.with_images(frame, Pixels(buffer.finish(), shapes, errors), image, None)
    too_large = [row for row, array in enumerate(arrays) if array is not None and errors[row]]
    return _update_errors(frame, errors, too_large) if too_large else frame


def _error(array: Any, decoding: DecodeSpec) -> str | None:
    if array is None:
        return "missing"
    height, width, channels = array.shape
    return decoding.validated(Header(None, height, width, channels, None, False)).error


def _update_errors(frame: Any, errors: list[str | None], rows: list[int]) -> Any:
    """Set the errors of some rows, if the frame has a column of them."""
    if "error" not in frame.columns:
        return frame
    backend = backend_of(frame)
    (column,) = backend.to_arrow(frame[["error"]]).columns
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return frame
    values = column.to_pylist()
    for row in rows:
        values[row] = errors[row]
    updated = backend.with_columns(frame[[]], {"error": (values, pa.string())}, range(len(values)))
    return frame.assign(error=updated["error"])


def encoded_images(frame: Any, image: str, format: str, quality: int, **options: Any) -> Any:
    """Encode the images of a pandas or cuDF frame: a series of bytes.

    ``options`` are Pillow's for the format.
    """
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    rows = [row for row, array in enumerate(arrays) if array is not None]
    values = [encode(backend.host(arrays[row]), format, quality, **options) for row in rows]
    return backend.with_columns(frame[[]], {image: (values, pa.binary())}, rows)[image]


def encode(array: np.ndarray, format: str, quality: int, **options: Any) -> bytes:
    """Encode one image (height, width, channels).

    Raises
    ------
    ArgumentError
        If the format does not support the image's dtype, channels or size.
    """
    is_16_bit_png = array.dtype == np.uint16 and format == "png" and array.shape[2] == 1
    if array.dtype != np.uint8 and not is_16_bit_png:
        raise ArgumentError(
            f"encode: an image is of {array.dtype} with {array.shape[2]} channels, and {format} "
            "takes uint8; png takes uint16 of one channel too. Make such images first with "
            "map_batches, or write them as parquet, which keeps any"
        )
    channels, supported = array.shape[2], _CHANNELS[format]
    if channels not in supported:
        instead = ", or encode('png')" if channels in _CHANNELS["png"] else ""
        raise ArgumentError(
            f"encode: an image has {channels} channels, and {format} takes "
            f"{', '.join(map(str, supported[:-1]))} or {supported[-1]}: make such images first, as "
            "map_batches(lambda images: [image[..., :3] for image in images], {'image': 'image'}) "
            f"does{instead}"
        )
    if format == "webp" and channels != 3:
        # Lossless: grey values and alpha are often data, such as labels or masks.
        options = {"lossless": True, "exact": True}
    file = io.BytesIO()
    pixels = array[:, :, 0] if array.shape[2] == 1 else array
    try:
        Image.fromarray(pixels).save(file, format, quality=quality, **options)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"encode: an image of {array.shape[0]} × {array.shape[1]} pixels can't be a {format}: "
            f"{error}"
        ) from error
    return file.getvalue()
