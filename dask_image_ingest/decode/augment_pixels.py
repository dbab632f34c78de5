"""The steps of random augmentations, applied to decoded images by Pillow.

The pixels are those of torchvision's functions of PIL images. Those that a GPU has decoded are
augmented on the host, too: one implementation gives the same pixels everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Final

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from dask_image_ingest.decode.augment import UNCHANGED, Step, draw_steps
from dask_image_ingest.decode.buffers import Origin, host_images
from dask_image_ingest.decode.dali import decode_pool
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.typedefs import ImageBatch

# Operations that move pixels: labels and stored values follow these only.
_MOVES: Final = ("Flip", "Affine")


class PixelAugments:
    """The pixel augmentations of one set of options in this process. Thread-safe."""

    def __init__(self, decoding: DecodeSpec) -> None:
        self._augments = decoding.pixel_augments
        self._moves_only = decoding.mode in ("labels", "raw")

    def run(self, images: ImageBatch, origins: Sequence[Origin]) -> list[np.ndarray]:
        """Augment the images of a batch: arrays in host memory."""
        return list(decode_pool().map(self._augmented, host_images(images), origins))

    def _augmented(self, image: Any, origin: Origin) -> np.ndarray:
        array = np.asarray(host_images(image))
        height, width, _ = array.shape
        return apply_steps(array, self._steps(height, width, origin))

    def _steps(self, height: int, width: int, origin: Origin) -> list[Step]:
        steps = draw_steps(self._augments, height, width, origin)
        return [step for step in steps if not self._moves_only or step.operation in _MOVES]


def apply_steps(image: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """The steps applied to an array (height, width, channels)."""
    shape = image.shape
    pixels: np.ndarray | Image.Image = image
    for name, values in steps:
        if name in _ON_ARRAYS:  # without Pillow, and of values of any type
            pixels = _ON_ARRAYS[name](np.asarray(pixels).reshape(shape), *map(int, values))
        elif name != UNCHANGED.operation:
            if isinstance(pixels, np.ndarray):
                pixels = Image.fromarray(pixels if shape[2] > 1 else pixels[..., 0])
            pixels = _BY_PILLOW[name](pixels, *values)
    return np.asarray(pixels).reshape(shape)


def _erased(
    image: np.ndarray, top: int, left: int, height: int, width: int, *value: int
) -> np.ndarray:
    erased = image.copy()
    erased[top : top + height, left : left + width] = value[: image.shape[2]]
    return erased


def _mirrored(image: np.ndarray) -> np.ndarray:
    mirrored = np.empty_like(image)
    for channel in range(image.shape[2]):  # at once it takes twelve times as long
        mirrored[..., channel] = image[:, ::-1, channel]
    return mirrored


_ON_ARRAYS: Final[dict[str, Callable[..., np.ndarray]]] = {"Flip": _mirrored, "Erase": _erased}


def _moved(pixels: Image.Image, *matrix: float) -> Image.Image:
    return pixels.transform(pixels.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _with_hue(pixels: Image.Image, shift: float) -> Image.Image:
    if pixels.mode == "L":
        return pixels
    hue, saturation, value = pixels.convert("HSV").split()
    # The circle of colours has 256 values.
    turned = hue.point([(number + int(shift * 255)) % 256 for number in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


# Torchvision's functions of PIL images, and of the numbers of a step.
_BY_PILLOW: Final[dict[str, Callable[..., Image.Image]]] = {
    "Affine": _moved,
    "AutoContrast": ImageOps.autocontrast,
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
    "Posterize": lambda pixels, bits: ImageOps.posterize(pixels, int(bits)),
    "Solarize": lambda pixels, threshold: ImageOps.solarize(pixels, ceil(threshold)),
    "Brightness": lambda pixels, factor: ImageEnhance.Brightness(pixels).enhance(factor),
    "Contrast": lambda pixels, factor: ImageEnhance.Contrast(pixels).enhance(factor),
    "Color": lambda pixels, factor: ImageEnhance.Color(pixels).enhance(factor),
    "Sharpness": lambda pixels, factor: ImageEnhance.Sharpness(pixels).enhance(factor),
    "Hue": _with_hue,
}
