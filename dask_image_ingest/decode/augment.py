"""Random augmentations of decoded pixels: what each draws for an image, as steps.

Names, defaults and rules are torchvision's. The numbers are a hash of the sample and its draw, as
those of a random crop, so they depend neither on the batch nor on the device. `augment_pixels`
applies the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from dask_image_ingest.arguments import is_whole, shown, whole_number
from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.decode.random_crop import (
    RandomResizedCrop,
    refused,
    set_probability,
    set_range,
    uniform_numbers,
)
from dask_image_ingest.errors import ArgumentError

#: A range of numbers, or one number by which to differ from "no change".
Range: TypeAlias = float | tuple[float, float]


class Step(NamedTuple):
    """An operation on one image, with the numbers that were drawn.

    Attributes
    ----------
    operation : str
        ``Flip``, ``Affine``, ``Erase``, ``Hue``, or one of torchvision's ``RandAugment``.
    values : tuple of float
        Of ``Affine`` the matrix from a pixel of the result to one of the image, row by row; of
        ``Erase`` top, left, height, width and the values; else at most one: factor, shift, bits, or
        threshold.
    """

    operation: str
    values: tuple[float, ...] = ()


UNCHANGED: Final = Step("Identity")


class PixelAugment:
    """Random augmentation of decoded pixels, which follows the crop and the resize."""

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        """Steps for an image of this height and width, from random numbers of [0, 1)."""
        raise NotImplementedError


@dataclass(frozen=True)
class RandomHorizontalFlip(PixelAugment):
    """Mirror an image left to right at random, for ``augment=`` of a read.

    Parameters
    ----------
    p : float
        Probability, 0 to 1.

    Raises
    ------
    ArgumentError
        If a number is out of range.

    Examples
    --------
    >>> ddf = read_webdataset_images("train-{000..003}.tar", augment=RandomHorizontalFlip())
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        set_probability(self, "p")

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        return [Step("Flip") if next(numbers) < self.p else UNCHANGED]


# Argument, operation, its smallest value, the value that changes nothing, and the largest one.
_JITTER: Final = (
    ("brightness", "Brightness", 0.0, 1.0, math.inf),
    ("contrast", "Contrast", 0.0, 1.0, math.inf),
    ("saturation", "Color", 0.0, 1.0, math.inf),
    ("hue", "Hue", -0.5, 0.0, 0.5),
)


@dataclass(frozen=True)
class ColorJitter(PixelAugment):
    """Change brightness, contrast, saturation and hue in random order, for ``augment=`` of a read.

    As torchvision's of the same name.

    Parameters
    ----------
    brightness, contrast, saturation : float or (float, float)
        Smallest and largest factor, at least 0; a number ``x`` stands for ``(max(0, 1 - x),
        1 + x)``.
    hue : float or (float, float)
        Smallest and largest shift, -0.5 to 0.5 of the circle of colours; ``x`` stands for
        ``(-x, x)``.

    Raises
    ------
    ArgumentError
        If a number is out of range.

    Examples
    --------
    >>> augment = ["random_resized_crop", ColorJitter(0.4, 0.4, 0.4, hue=0.1)]
    """

    brightness: Range = 0
    contrast: Range = 0
    saturation: Range = 0
    hue: Range = 0

    def __post_init__(self) -> None:
        for name, _, least, unchanged, most in _JITTER:
            given = getattr(self, name)
            if isinstance(given, Sequence):
                low, high = given
            else:
                low, high = max(least, unchanged - given), unchanged + given
            if not least <= low <= high <= most:
                bounds = f"{least:g} <= low <= high <= {most:g}"
                raise refused(self, name, f"a number from 0, or (low, high), {bounds}")
            object.__setattr__(self, name, (float(low), float(high)))

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        steps = []
        for name, operation, _, unchanged, _ in _JITTER:
            low, high = getattr(self, name)
            place, number = next(numbers), next(numbers)
            if not low == high == unchanged:
                steps.append((place, Step(operation, (low + (high - low) * number,))))
        return [step for _, step in sorted(steps)]


@dataclass(frozen=True)
class RandomErasing(PixelAugment):
    """Fill a random rectangle, for ``augment=`` of a read.

    As torchvision's of the same name. It erases decoded values, before ``normalize=`` of a loader:
    ``value=(124, 116, 104)`` is the mean of ImageNet, which is 0 afterwards.

    Parameters
    ----------
    p : float
        Probability, 0 to 1.
    scale : (float, float)
        Smallest and largest share of the image's area.
    ratio : (float, float)
        Smallest and largest height divided by width; its logarithm is uniform.
    value : int or (int, int, int)
        Value of the erased pixels, 0 to 255.

    Raises
    ------
    ArgumentError
        If a number is out of range.

    Examples
    --------
    >>> augment = ["random_resized_crop", RandomErasing(p=0.25, value=(124, 116, 104))]
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: int | tuple[int, int, int] = 0

    def __post_init__(self) -> None:
        set_probability(self, "p")
        set_range(self, "scale", 1)
        set_range(self, "ratio")
        values = self.value if isinstance(self.value, Sequence) else [self.value] * 3
        if len(values) != 3 or not all(is_whole(value) and 0 <= value <= 255 for value in values):
            raise refused(self, "value", "a whole number, 0 to 255, or (red, green, blue)")
        object.__setattr__(self, "value", tuple(map(int, values)))

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        if next(numbers) >= self.p:
            return [UNCHANGED]
        (least, most), (low, high) = self.scale, map(math.log, self.ratio)
        value = np.broadcast_to(self.value, 3).tolist()
        for _ in range(10):
            area = height * width * (least + (most - least) * next(numbers))
            ratio = math.exp(low + (high - low) * next(numbers))
            down, across = next(numbers), next(numbers)
            rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if rows < height and columns < width:
                top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
                return [Step("Erase", (top, left, rows, columns, *value))]
        return [UNCHANGED]


_MOVED: Final = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_ENHANCED: Final = ("Brightness", "Color", "Contrast", "Sharpness")

# In torchvision's order.
_RAND_AUGMENT: Final = (
    "Identity",
    *_MOVED,
    *_ENHANCED,
    *("Posterize", "Solarize", "AutoContrast", "Equalize"),
)


class Operations(PixelAugment):
    """Augmentation by operations of torchvision's ``_apply_op``, some of which move pixels."""


# Strengths of an operation of `RandAugment`: torchvision's default.
_BINS: Final = 31


@dataclass(frozen=True)
class RandAugment(Operations):
    """Some random operations of one strength, for ``augment=`` of a read.

    As torchvision's of the same name: each operation is one of 14, with the magnitude of its table;
    what is turned, sheared or moved takes the nearest pixel, and black from outside.

    Parameters
    ----------
    num_ops : int
        Number of operations, one after the other.
    magnitude : int
        Strength of all operations, 0 to 30.

    Raises
    ------
    ArgumentError
        If a number is out of range.

    Examples
    --------
    >>> augment = ["random_resized_crop", RandAugment(magnitude=7)]
    """

    num_ops: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        whole_number("num_ops", self.num_ops, 1)
        advice = f"pass a whole number, 0 to {_BINS - 1}"
        whole_number("magnitude", self.magnitude, 0, advice, _BINS - 1)

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        steps = []
        for _ in range(self.num_ops):
            name = _RAND_AUGMENT[int(next(numbers) * len(_RAND_AUGMENT))]
            steps.append(_step(name, self.magnitude, _BINS, next(numbers) < 0.5, height, width))
        return steps


# Pairs of an operation, its probability in tenths, and its strength from 0 to 9.
_IMAGENET: Final = """
Posterize 4 8, Rotate 6 9; Solarize 6 5, AutoContrast 6 0; Equalize 8 0, Equalize 6 0
Posterize 6 7, Posterize 6 6; Equalize 4 0, Solarize 2 4; Equalize 4 0, Rotate 8 8
Solarize 6 3, Equalize 6 0; Posterize 8 5, Equalize 10 0; Rotate 2 3, Solarize 6 8
Equalize 6 0, Posterize 4 6; Rotate 8 8, Color 4 0; Rotate 4 9, Equalize 6 0
Equalize 0 0, Equalize 8 0; Invert 6 0, Equalize 10 0; Color 6 4, Contrast 10 8
Rotate 8 8, Color 10 2; Color 8 8, Solarize 8 7; Sharpness 4 7, Invert 6 0
ShearX 6 5, Equalize 10 0; Color 4 0, Equalize 6 0; Equalize 4 0, Solarize 2 4
Solarize 6 5, AutoContrast 6 0; Invert 6 0, Equalize 10 0; Color 6 4, Contrast 10 8
Equalize 8 0, Equalize 6 0
"""
_POLICY: Final = [
    [(name, int(tenths) / 10, int(bin)) for name, tenths, bin in map(str.split, pair.split(","))]
    for pair in _IMAGENET.strip().replace("\n", ";").split(";")
]


@dataclass(frozen=True)
class AutoAugment(Operations):
    """One of 25 pairs of operations at random, for ``augment=`` of a read.

    As torchvision's of the same name with its defaults: the policy learned on ImageNet
    (https://arxiv.org/abs/1805.09501), the nearest pixel, and black from outside the image.

    Examples
    --------
    >>> augment = ["random_resized_crop", "auto_augment"]
    """

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        pair = _POLICY[int(next(numbers) * len(_POLICY))]
        steps = []
        for name, probability, bin in pair:
            taken, negative = next(numbers) < probability, next(numbers) < 0.5
            steps.append(_step(name, bin, 10, negative, height, width) if taken else UNCHANGED)
        return steps


def _step(name: str, bin: int, bins: int, negative: bool, height: int, width: int) -> Step:
    """Operation of torchvision's ``_apply_op``, with the magnitude of its table."""
    if name == "Posterize":
        return Step(name, (8 - round(4 * bin / (bins - 1)),))
    if name == "Solarize":
        return Step(name, (_spaced(255, 0, bin, bins),))
    largest = {
        "ShearX": 0.3,
        "ShearY": 0.3,
        "TranslateX": 150 / 331 * width,
        "TranslateY": 150 / 331 * height,
        "Rotate": 30.0,
        **dict.fromkeys(_ENHANCED, 0.9),
    }
    if name not in largest:
        return Step(name)
    signed = _spaced(0, largest[name], bin, bins) * (-1 if negative else 1)
    if name in _ENHANCED:
        return Step(name, (1 + signed,))
    if name == "Rotate":  # about the centre, as Pillow's ``rotate``
        cos, sin = math.cos(math.radians(signed)), -math.sin(math.radians(signed))
        x, y = width / 2, height / 2
        return Step("Affine", (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y))
    shear, shift = math.tan(math.atan(signed)), -int(signed)
    matrices: dict[str, tuple[float, ...]] = {
        "ShearX": (1, shear, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, shear, 1, 0),
        "TranslateX": (1, 0, shift, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, shift),
    }
    return Step("Affine", matrices[name])


def _spaced(first: float, last: float, number: int, count: int) -> float:
    """One of so many evenly spaced numbers, as ``torch.linspace`` rounds it."""
    step = float((np.float32(last) - np.float32(first)) / np.float32(count - 1))
    if number < count // 2:
        return float(np.float32(float(np.float32(first)) + step * number))
    return float(np.float32(float(np.float32(last)) - step * (count - 1 - number)))


_Name: TypeAlias = Literal[
    "random_resized_crop",
    "random_horizontal_flip",
    "rand_augment",
    "auto_augment",
    "random_erasing",
]

_One: TypeAlias = _Name | RandomResizedCrop | PixelAugment

#: The argument ``augment=`` of a read.
Augment: TypeAlias = _One | Sequence[_One]

_BY_NAME: Final[dict[str, type[RandomResizedCrop | PixelAugment]]] = {
    "random_resized_crop": RandomResizedCrop,
    "random_horizontal_flip": RandomHorizontalFlip,
    "rand_augment": RandAugment,
    "auto_augment": AutoAugment,
    "random_erasing": RandomErasing,
}


def parse_augment(augment: object) -> tuple[RandomResizedCrop | None, tuple[PixelAugment, ...]]:
    """Validate the argument ``augment=``: its crop, and what follows the resize.

    Raises
    ------
    ArgumentError
    """
    if augment is None:
        return None, ()
    parsed: list[RandomResizedCrop | PixelAugment] = []
    for one in augment if isinstance(augment, (list, tuple)) else [augment]:
        if isinstance(one, str) and one in _BY_NAME:
            parsed.append(_BY_NAME[one]())
        elif isinstance(one, (RandomResizedCrop, PixelAugment)):
            parsed.append(one)
        else:
            raise ArgumentError(
                f"augment={shown(one)}: pass {', '.join(map(repr, _BY_NAME))}, an object such as "
                "ColorJitter(brightness=0.4), or a list of them. Other augmentations are "
                "functions of DALI operators, transform=, or of arrays, map_batches()"
            )
    crops = [one for one in parsed[:1] if isinstance(one, RandomResizedCrop)]
    others = tuple(one for one in parsed if not isinstance(one, RandomResizedCrop))
    if len(crops) + len(others) < len(parsed):
        raise ArgumentError(
            "augment=: the random resized crop is decoded, so there is one, and it comes first"
        )
    return (crops[0] if crops else None), others


def draw_steps(
    augments: Sequence[PixelAugment], height: int, width: int, origin: Origin
) -> list[Step]:
    """The steps of the augmentations for a decoded image: a function of its shape and origin.

    The numbers of an augmentation depend on no other one, unless one of the same class precedes it.
    """
    drawn, seen = list[Step](), list[str]()
    for augment in augments:
        name = type(augment).__name__[:14]
        numbers = uniform_numbers(origin, f"{name}{seen.count(name) or ''}")
        drawn += augment.draw(numbers, height, width)
        seen.append(name)
    return drawn
