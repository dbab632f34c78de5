"""The steps of random augmentations, applied to decoded images by Pillow.

The pixels are those of torchvision's functions of PIL images. Those that a GPU has decoded are
augmented on the host, too: one implementation gives the same pixels everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Final, TypeAlias

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from dask_image_ingest.decode.augment import (
    UNCHANGED,
    AutoAugment,
    Operations,
    PixelAugment,
    RandAugment,
    RandomErasing,
    Step,
    draw_steps,
)
from dask_image_ingest.decode.buffers import Origin, on_host
from dask_image_ingest.decode.dali import decode_pool
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.typedefs import ImageBatch

#: The steps of an image, each with its augmentation.
Steps: TypeAlias = list[tuple[Step, PixelAugment]]

# Operations that move pixels: labels and stored values follow these only.
_MOVES: Final = ("Flip", "Affine")


class PixelAugments:
    """The pixel augmentations of one set of options in this process. Thread-safe."""

    def __init__(self, decoding: DecodeSpec) -> None:
        self._augments = list(decoding.pixel_augments)
        self._moves_only = decoding.mode in ("labels", "raw")
        if self._moves_only:  # no mean of classes, and background from outside
            self._augments = [
                replace(augment, interpolation="nearest", fill=0)
                if isinstance(augment, (RandAugment, AutoAugment))
                else augment
                for augment in self._augments
            ]

    def run(self, images: ImageBatch, origins: Sequence[Origin]) -> list[np.ndarray]:
        """Augment the images of a batch: arrays in host memory."""
        return list(decode_pool().map(self._augmented, on_host(images), origins))

    def _augmented(self, image: Any, origin: Origin) -> np.ndarray:
        array = np.asarray(on_host(image))
        return apply_steps(array, self._steps(*array.shape[:2], origin))

    def _steps(self, height: int, width: int, origin: Origin) -> Steps:
        drawn = draw_steps(self._augments, height, width, origin)
        return [
            (UNCHANGED if self._moves_only and step.operation not in _MOVES else step, augment)
            for augment, steps in zip(self._augments, drawn, strict=True)
            for step in steps
        ]


def apply_steps(image: np.ndarray, steps: Steps) -> np.ndarray:
    """The steps applied to an array (height, width, channels) on a CPU."""
    shape = image.shape
    pixels: np.ndarray | Image.Image = image
    for step, augment in steps:
        if step.operation in _ON_ARRAYS:  # without Pillow, and of values of any type
            array = np.asarray(pixels).reshape(shape)
            pixels = _ON_ARRAYS[step.operation](array, step, augment)
        elif step != UNCHANGED:
            if isinstance(pixels, np.ndarray):
                pixels = Image.fromarray(pixels if shape[2] > 1 else pixels[..., 0])
            pixels = _applied(pixels, step, augment)
    return np.asarray(pixels).reshape(shape)


def _erased(image: np.ndarray, step: Step, augment: PixelAugment) -> np.ndarray:
    assert isinstance(augment, RandomErasing)
    top, left, height, width = map(int, step.values)
    erased = image.copy()
    erased[top : top + height, left : left + width] = np.broadcast_to(augment.value, 3)[
        : image.shape[2]
    ]
    return erased


def _mirrored(image: np.ndarray, step: Step, augment: PixelAugment) -> np.ndarray:
    mirrored = np.empty_like(image)
    for channel in range(image.shape[2]):  # at once it takes twelve times as long
        mirrored[..., channel] = image[:, ::-1, channel]
    return mirrored


_ON_ARRAYS: Final = {"Flip": _mirrored, "Erase": _erased}


def _applied(pixels: Image.Image, step: Step, augment: PixelAugment) -> Image.Image:
    name, values = step
    if name != "Affine":
        return _BY_PILLOW[name](pixels, *values)
    assert isinstance(augment, Operations)
    nearest = augment.interpolation == "nearest"
    filter = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    fill = augment.fill if pixels.mode == "L" else (augment.fill,) * 3
    method = Image.Transform.AFFINE
    return pixels.transform(pixels.size, method, values, filter, fillcolor=fill)


def _with_hue(pixels: Image.Image, shift: float) -> Image.Image:
    if pixels.mode == "L":
        return pixels
    hue, saturation, value = pixels.convert("HSV").split()
    # The circle of colours has 256 values.
    turned = hue.point([(number + int(shift * 255)) % 256 for number in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


# Torchvision's functions of PIL images, and of the number of a step if it has one.
_BY_PILLOW: Final[dict[str, Callable[..., Image.Image]]] = {
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
