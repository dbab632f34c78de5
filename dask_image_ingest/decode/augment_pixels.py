"""The steps of random augmentations, applied to decoded images: by Pillow, or by DALI on a GPU.

On a CPU the pixels are those of torchvision's functions of PIL images, which take as long as DALI's
operators there. A GPU has them within the bounds that the guide tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Final, Literal, NamedTuple, TypeAlias

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
from dask_image_ingest.decode.buffers import Origin, shapes_of
from dask_image_ingest.decode.dali import (
    BatchPipeline,
    conditional_pipeline,
    dali,
    decode_pool,
    decode_threads,
)
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
        self._dali: DaliSteps | None = None
        if decoding.device == "gpu" and decoding.mode != "raw":
            slots = [augment for _, augment in self._steps((8, 8), Origin("", 0, ""))]
            self._dali = DaliSteps(slots, decoding.channels, "gpu")

    def run(self, images: ImageBatch, origins: Sequence[Origin]) -> ImageBatch:
        """Augment the images of a batch: DALI's on a GPU, else what converts to arrays."""
        if self._dali is None:
            return list(decode_pool().map(self._augmented, images, origins))
        return self._dali.run(images, list(map(self._steps, shapes_of(images), origins)))

    def _augmented(self, image: Any, origin: Origin) -> np.ndarray:
        array = np.asarray(image)
        return apply_steps(array, self._steps(array.shape, origin))

    def _steps(self, shape: Sequence[int] | np.ndarray, origin: Origin) -> Steps:
        drawn = draw_steps(self._augments, int(shape[0]), int(shape[1]), origin)
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


_INPUT, _NUMBERS = "images", "numbers-{}"  # of each slot


class DaliSteps:
    """A pipeline of DALI that applies the steps of a batch. Thread-safe.

    The operation of each image and its numbers are inputs, by which DALI splits the batch.

    Parameters
    ----------
    slots
        The augmentation of each step of an image; all images have as many.
    channels
        Of the images; those of one channel have no hue and no saturation.
    device
        Where the images are.
    """

    def __init__(
        self, slots: Sequence[PixelAugment], channels: int, device: Literal["cpu", "gpu"]
    ) -> None:
        grey = {"Hue", "Color"} if channels == 1 else set[str]()
        self._slots = [
            _Slot(augment, sorted({"Identity", *augment.operations} - grey)) for augment in slots
        ]
        self._device = device
        self._pipeline = BatchPipeline(self._build)
        self._lock = threading.Lock()

    def run(self, images: ImageBatch, steps: Sequence[Steps]) -> ImageBatch:
        """Apply the steps of each image of a batch."""
        inputs: dict[str, Any] = {_INPUT: images}
        for number, slot in enumerate(self._slots):
            rows = [slot.numbers(image[number][0]) for image in steps]
            inputs[_NUMBERS.format(number)] = np.array(rows, np.float32)
        with self._lock:
            (augmented,) = self._pipeline.run(**inputs)
        return augmented

    def _build(self) -> Any:
        fn, types, _ = dali()

        def graph() -> Any:
            images = fn.external_source(
                name=_INPUT, no_copy=True, dtype=types.UINT8, layout="HWC", device=self._device
            )
            for number, slot in enumerate(self._slots):
                numbers = fn.external_source(
                    name=_NUMBERS.format(number), dtype=types.FLOAT, ndim=1, device="cpu"
                )
                images = _one_of(images, numbers, slot, 0, len(slot.operations) - 1)
            return images

        pipeline = conditional_pipeline(self._device, decode_threads(), graph)
        pipeline.build()
        return pipeline


class _Slot(NamedTuple):
    """A step of every image: one of some operations of an augmentation."""

    augment: PixelAugment
    operations: list[str]

    def numbers(self, step: Step) -> list[float]:
        """Input of DALI for an image: number of the operation, and its values."""
        name, values = step
        if name not in self.operations:
            name, values = UNCHANGED
        if name == "Posterize":
            values = (256 - 2 ** (8 - values[0]),)  # mask of the upper bits
        return [self.operations.index(name), *values, *[0.0] * (6 - len(values))]


def _one_of(images: Any, numbers: Any, slot: _Slot, low: int, high: int) -> Any:
    """Append the operations ``low`` to ``high`` of a slot, of which each image gets its own.

    DALI converts this function: its first ``if`` is for the graph, the second splits the batch.
    """
    if low == high:
        return _in_dali(images, numbers, slot.augment, slot.operations[low])
    middle = (low + high) // 2
    if numbers[0] <= middle:
        chosen = _one_of(images, numbers, slot, low, middle)
    else:
        chosen = _one_of(images, numbers, slot, middle + 1, high)
    return chosen


# Weights of red, green and blue in a grey.
_LUMA: Final = (0.299, 0.587, 0.114)

# Pillow's SMOOTH.
_SMOOTH: Final = (1, 1, 1, 1, 5, 1, 1, 1, 1)
_SHARP: Final = (0, 0, 0, 0, 1, 0, 0, 0, 0)


def _in_dali(images: Any, numbers: Any, augment: PixelAugment, name: str) -> Any:
    """Append one operation with the numbers of each image."""
    fn, types, _ = dali()
    value = numbers[1]
    # Arithmetic wants numbers where the images are.
    here = value.gpu() if images.device == "gpu" else value
    if name == "Flip":
        return fn.flip(images)
    if name == "Affine":
        assert isinstance(augment, Operations)
        nearest = augment.interpolation == "nearest"
        return fn.warp_affine(
            images,
            matrix=fn.reshape(numbers[1:7], shape=[2, 3]),
            fill_value=augment.fill,
            interp_type=types.INTERP_NN if nearest else types.INTERP_LINEAR,
        )
    if name == "Erase":
        assert isinstance(augment, RandomErasing)
        return fn.erase(
            images,
            anchor=numbers[1:3],
            shape=numbers[3:5],
            axis_names="HW",
            fill_value=augment.value,
        )
    if name == "Brightness":
        return fn.brightness(images, brightness=value)
    if name == "Color":
        return fn.saturation(images, saturation=value)
    if name == "Hue":
        return fn.hue(images, hue=value * 360)
    if name == "Equalize":
        return fn.equalize(images)
    if name == "Contrast":
        mean = fn.reductions.mean(images, axis_names="HW", keep_dims=True)
        grey = fn.reductions.sum(mean * _constant(_LUMA), axis_names="C", keep_dims=True)
        return fn.cast_like(grey + (images - grey) * here, images)
    if name == "Sharpness":
        kernel = _constant(_SHARP) * here + _constant(_SMOOTH) / 13 * (1 - here)
        return fn.filter(images, fn.reshape(kernel, shape=[3, 3]))
    if name == "AutoContrast":
        low = fn.reductions.min(images, axis_names="HW", keep_dims=True)
        high = fn.reductions.max(images, axis_names="HW", keep_dims=True)
        # A channel of one value stays as it is.
        flat = high == low
        scale = 255 / fn.cast(high - low + flat * (255 - high + low), dtype=types.FLOAT)
        return fn.cast_like((images - low * (flat ^ True)) * scale, images)
    most = types.Constant(255, dtype=types.UINT8)
    if name == "Invert":
        return most - images
    if name == "Solarize":
        return images ^ (fn.cast(images >= here, dtype=types.UINT8) * most)
    if name == "Posterize":
        return images & fn.cast(here, dtype=types.UINT8)
    return images


def _constant(values: Sequence[float]) -> Any:
    _, types, _ = dali()
    return types.Constant(np.array(values, np.float32))
