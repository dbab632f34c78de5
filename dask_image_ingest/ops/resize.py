"""Decoded images made small, and made files again."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import pyarrow as pa
from PIL import Image

from dask_image_ingest.decode import DecodeSpec, Header, Pixels, make_decode_spec, resize_arrays
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import as_uint8, backend_of

# Grey, grey and alpha, RGB, RGBA.
_CHANNELS: Final = {"jpeg": (1, 3), "png": (1, 2, 3, 4), "webp": (1, 2, 3, 4)}


def small_images(
    frame: Any,
    image: str,
    size: int | tuple[int, int],
    resize: str,
    *,
    smooth: bool = False,
) -> Any:
    """A pandas or cuDF frame with its images resized, of uint8 to be looked at.

    Where all images have one channel they may be labels: by the nearest pixel, unless ``smooth``.
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
    given = [as_uint8(backend.host(arrays[row])) for row in present]
    shapes[present] = resize_arrays(given, decoding, buffer)
    frame = backend.with_images(frame, Pixels(buffer.finish(), shapes, errors), image, None)
    too_large = [row for row, array in enumerate(arrays) if array is not None and errors[row]]
    return _with_errors(frame, errors, too_large) if too_large else frame


def _error(array: Any, decoding: DecodeSpec) -> str | None:
    if array is None:
        return "missing"
    height, width, channels = array.shape
    return decoding.validated(Header(None, height, width, channels, None, False)).error


def _with_errors(frame: Any, errors: list[str | None], rows: list[int]) -> Any:
    """``frame`` with the errors of some rows, where it has a column for them."""
    if "error" not in frame.columns:
        return frame
    backend = backend_of(frame)
    (known,) = backend.to_arrow(frame[["error"]]).columns
    if not pa.types.is_string(known.type) and not pa.types.is_large_string(known.type):
        return frame
    told = known.to_pylist()
    for row in rows:
        told[row] = errors[row]
    column = backend.with_columns(frame[[]], {"error": (told, pa.string())}, range(len(told)))
    return frame.assign(error=column["error"])


def encoded_images(frame: Any, image: str, format: str, quality: int, **options: Any) -> Any:
    """The images of a pandas or cuDF frame as a series of encoded bytes, by Pillow.

    It takes further ``options`` of its own for the format.
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
        If files of this format have no such number of channels or values, or are not that large.
    """
    deep = array.dtype == np.uint16 and format == "png" and array.shape[2] == 1
    if array.dtype != np.uint8 and not deep:
        raise ArgumentError(
            f"encode: an image is of {array.dtype} with {array.shape[2]} channels, and {format} "
            "takes uint8; png takes uint16 of one channel too. Make such images first with "
            "map_batches, or write them as parquet, which keeps any"
        )
    channels, takes = array.shape[2], _CHANNELS[format]
    if channels not in takes:
        instead = ", or encode('png')" if channels in _CHANNELS["png"] else ""
        raise ArgumentError(
            f"encode: an image has {channels} channels, and {format} takes "
            f"{', '.join(map(str, takes[:-1]))} or {takes[-1]}: make such images first, as "
            "map_batches(lambda images: [image[..., :3] for image in images], {'image': 'image'}) "
            f"does{instead}"
        )
    if format == "webp" and channels != 3:
        # Grey values and alpha often stand for more than what is seen: labels, masks.
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
