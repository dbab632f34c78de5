"""One decoded image: what a row of an image column is outside of the column."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from dask_image_ingest.errors import OperandError

# The longer edge of what a notebook shows.
_THUMBNAIL = 256


class DecodedImage:
    """One decoded image: an array (height, width, channels) of uint8, and a picture in a notebook.

    ``np.asarray(image)`` is a view of its pixels, which can't be written to. Images are equal where
    their shapes and pixels are; compared with an array they are that array.

    Parameters
    ----------
    pixels
        The array.
    """

    __slots__ = ("_pixels",)

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels.view()
        self._pixels.flags.writeable = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and channels."""
        return self._pixels.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of a pixel's channel, uint8."""
        return self._pixels.dtype

    @property
    def ndim(self) -> int:
        """Three."""
        return self._pixels.ndim

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self._pixels.size

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return self._pixels.nbytes

    def digest(self) -> bytes:
        """What tells it from any other image."""
        digest = hashlib.blake2b(np.array(self.shape, np.int64).tobytes(), digest_size=16)
        digest.update(np.ascontiguousarray(self._pixels).data)
        return digest.digest()

    def tobytes(self) -> bytes:
        """A copy of its pixels, row by row."""
        return self._pixels.tobytes()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # What NumPy, Pillow and others make an array of. Not __array__, for which pandas takes one
        # image for many values wherever it is asked whether that is null.
        # With strides, since Pillow then asks for bytes, which it can't take from here itself.
        return self._pixels.__array_interface__ | {"strides": self._pixels.strides}

    def __getitem__(self, item: Any) -> Any:
        return self._pixels[item]

    # Nor is it a list of rows.
    __iter__ = None

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, DecodedImage):
            return NotImplemented
        return self.shape == other.shape and bool((self._pixels == other._pixels).all())

    def _no_order(self, other: object) -> Any:
        if not isinstance(other, DecodedImage):
            return NotImplemented
        raise OperandError("images have no order: sort by another column")

    __lt__ = __le__ = __gt__ = __ge__ = _no_order

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[type[DecodedImage], tuple[np.ndarray]]:
        return DecodedImage, (np.ascontiguousarray(self._pixels),)

    def __repr__(self) -> str:
        return f"<image {'×'.join(map(str, self.shape))}>"

    def _repr_png_(self) -> bytes | None:
        if self.shape[2] not in (1, 3, 4) or not self.size:
            return None
        picture = Image.fromarray(self._pixels[:, :, 0] if self.shape[2] == 1 else self._pixels)
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()


def as_pixels(value: Any) -> np.ndarray | None:
    """The pixels of an image, an array, or a row of the Arrow struct; None for a null.

    Raises
    ------
    OperandError
        For anything else.
    """
    if isinstance(value, DecodedImage):
        return np.asarray(value)
    if isinstance(value, Mapping):
        return _from_struct(value)
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        if array.dtype == np.uint8 and array.ndim in (2, 3):
            return array if array.ndim == 3 else array[:, :, None]
        value = f"an array of {array.dtype} with the shape {array.shape}"
    elif pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    raise OperandError(
        f"{value if isinstance(value, str) else repr(value)} is no image: an image column takes "
        "arrays (height, width) or (height, width, channels) of uint8, and None"
    )


def _from_struct(row: Mapping[str, Any]) -> np.ndarray:
    try:
        data, shape = row["data"], (row["height"], row["width"], row["channels"])
        flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.array(data, "uint8")
        return flat.reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise OperandError(
            "this dict is no image: it needs data, height, width and channels that fit each other"
        ) from None


__all__ = ["DecodedImage", "as_pixels"]
