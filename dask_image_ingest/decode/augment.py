"""Random augmentations of decoded pixels: what each draws for an image, as steps.

Names, defaults and rules are torchvision's. The numbers are a hash of the sample and its draw, as
those of a random crop, so they depend neither on the batch nor on the device. `augment_pixels`
applies the steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from dask_image_ingest.arguments import check_choice, is_whole, shown
from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.decode.random_crop import RandomResizedCrop, uniform_numbers
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
        ``Erase`` top, left, height and width; else at most one: factor, shift, bits, or threshold.
    """

    operation: str
    values: tuple[float, ...] = ()


UNCHANGED: Final = Step("Identity")


@dataclass(frozen=True)
class RandomHorizontalFlip:
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

    operations: ClassVar[frozenset[str]] = frozenset({"Flip"})

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise _refused(self, "p", "a probability, 0 to 1")

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        """Steps for an image of this height and width, from random numbers of [0, 1)."""
        return [Step("Flip") if next(numbers) < self.p else UNCHANGED]


@dataclass(frozen=True)
class ColorJitter:
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

    operations: ClassVar[frozenset[str]] = frozenset({"Brightness", "Contrast", "Color", "Hue"})

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation", "hue"):
            least, middle, most = (-0.5, 0, 0.5) if name == "hue" else (0, 1, math.inf)
            given = getattr(self, name)
            low, high = given if isinstance(given, Sequence) else (middle - given, middle + given)
            if not isinstance(given, Sequence) and name != "hue":
                low = max(low, least)
            if not least <= low <= high <= most or high == math.inf:
                limit = " <= 0.5" if name == "hue" else ""
                expected = f"a number from 0, or (low, high), {least} <= low <= high{limit}"
                raise _refused(self, name, expected)
            object.__setattr__(self, name, (float(low), float(high)))

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        """Steps for an image of this height and width, from random numbers of [0, 1)."""
        ranges = {
            "Brightness": (self.brightness, 1.0),
            "Contrast": (self.contrast, 1.0),
            "Color": (self.saturation, 1.0),
            "Hue": (self.hue, 0.0),
        }
        steps = []
        for name, (given, unchanged) in ranges.items():
            low, high = given if isinstance(given, tuple) else (given, given)
            place, number = next(numbers), next(numbers)
            if not low == high == unchanged:
                steps.append((place, Step(name, (low + (high - low) * number,))))
        return [step for _, step in sorted(steps)]


@dataclass(frozen=True)
class RandomErasing:
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

    operations: ClassVar[frozenset[str]] = frozenset({"Erase"})

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise _refused(self, "p", "a probability, 0 to 1")
        for name, highest in ("scale", 1.0), ("ratio", math.inf):
            low, high = getattr(self, name)
            if not 0 < low <= high <= highest:
                limit = " <= 1" if name == "scale" else ""
                raise _refused(self, name, f"(low, high), 0 < low <= high{limit}")
            object.__setattr__(self, name, (float(low), float(high)))
        values = self.value if isinstance(self.value, Sequence) else [self.value] * 3
        if len(values) != 3 or not all(map(_is_value, values)):
            raise _refused(self, "value", "a whole number, 0 to 255, or (red, green, blue)")
        object.__setattr__(self, "value", tuple(map(int, values)))

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        """Steps for an image of this height and width, from random numbers of [0, 1)."""
        if next(numbers) >= self.p:
            return [UNCHANGED]
        (least, most), (low, high) = self.scale, map(math.log, self.ratio)
        for _ in range(10):
            area = height * width * (least + (most - least) * next(numbers))
            ratio = math.exp(low + (high - low) * next(numbers))
            down, across = next(numbers), next(numbers)
            rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if rows < height and columns < width:
                top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
                return [Step("Erase", (top, left, rows, columns))]
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


@dataclass(frozen=True)
class RandAugment:
    """Some random operations of one strength, for ``augment=`` of a read.

    As torchvision's of the same name: each operation is one of 14, with the magnitude of its table.

    Parameters
    ----------
    num_ops : int
        Number of operations, one after the other.
    magnitude : int
        Strength of all operations, 0 to ``num_magnitude_bins - 1``.
    num_magnitude_bins : int
        Number of strengths, at least 2.
    interpolation : {"nearest", "bilinear"}
        Filter of operations that turn, shear or move.
    fill : int
        Value of pixels from outside the image, 0 to 255.

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
    num_magnitude_bins: int = 31
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: int = 0

    operations: ClassVar[frozenset[str]] = frozenset({"Affine", *_RAND_AUGMENT} - {*_MOVED})

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_ops", 1, 100),
            ("num_magnitude_bins", 2, 1000),
            ("magnitude", 0, self.num_magnitude_bins - 1),
        ):
            given = getattr(self, name)
            if not is_whole(given) or not least <= given <= most:
                raise _refused(self, name, f"a whole number, {least} to {most}")
        _check_moves(self)

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        """Steps for an image of this height and width, from random numbers of [0, 1)."""
        bins, steps = self.num_magnitude_bins, []
        for _ in range(self.num_ops):
            name = _RAND_AUGMENT[int(next(numbers) * len(_RAND_AUGMENT))]
            steps.append(_step(name, self.magnitude, bins, next(numbers) < 0.5, height, width))
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
class AutoAugment:
    """One of 25 pairs of operations at random, for ``augment=`` of a read.

    As torchvision's of the same name with its default, the policy learned on ImageNet
    (https://arxiv.org/abs/1805.09501).

    Parameters
    ----------
    interpolation : {"nearest", "bilinear"}
        Filter of operations that turn or shear.
    fill : int
        Value of pixels from outside the image, 0 to 255.

    Raises
    ------
    ArgumentError
        If a number is out of range.

    Examples
    --------
    >>> augment = ["random_resized_crop", "auto_augment"]
    """

    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: int = 0

    operations: ClassVar[frozenset[str]] = frozenset(
        {"Affine"} | {name for pair in _POLICY for name, *_ in pair}
    ) - {*_MOVED}

    def __post_init__(self) -> None:
        _check_moves(self)

    def draw(self, numbers: Iterator[float], height: int, width: int) -> list[Step]:
        """Steps for an image of this height and width, from random numbers of [0, 1)."""
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
    if name not in (*_MOVED, *_ENHANCED):
        return Step(name)
    most = {"Rotate": 30, "ShearX": 0.3, "ShearY": 0.3}.get(name, 0.9)
    if name.startswith("Translate"):
        most = 150 / 331 * (width if name == "TranslateX" else height)
    signed = _spaced(0, most, bin, bins) * (-1 if negative else 1)
    if name in _ENHANCED:
        return Step(name, (1 + signed,))
    if name == "ShearX":
        return Step("Affine", (1, math.tan(math.atan(signed)), 0, 0, 1, 0))
    if name == "ShearY":
        return Step("Affine", (1, 0, 0, math.tan(math.atan(signed)), 1, 0))
    if name == "TranslateX":
        return Step("Affine", (1, 0, -int(signed), 0, 1, 0))
    if name == "TranslateY":
        return Step("Affine", (1, 0, 0, 0, 1, -int(signed)))
    # About the centre, as Pillow's ``rotate``.
    angle = -math.radians(signed)
    cos, sin = math.cos(angle), math.sin(angle)
    across, down = width / 2, height / 2
    return Step(
        "Affine",
        (
            *(cos, sin, across - cos * across - sin * down),
            *(-sin, cos, down + sin * across - cos * down),
        ),
    )


@functools.lru_cache(maxsize=4096)
def _spaced(first: float, last: float, number: int, count: int) -> float:
    """One of so many evenly spaced numbers, as ``torch.linspace`` rounds it."""
    step = float((np.float32(last) - np.float32(first)) / np.float32(count - 1))
    if number < count // 2:
        return float(np.float32(float(np.float32(first)) + step * number))
    return float(np.float32(float(np.float32(last)) - step * (count - 1 - number)))


#: Augmentations of decoded pixels, which follow the crop and the resize.
PixelAugment: TypeAlias = (
    RandomHorizontalFlip | ColorJitter | RandAugment | AutoAugment | RandomErasing
)

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
) -> list[list[Step]]:
    """The steps of each augmentation for a decoded image: a function of its shape and origin.

    An augmentation draws as many steps for each image. Its numbers depend on no other augmentation,
    unless one of the same class precedes it.
    """
    drawn, seen = [], list[str]()
    for augment in augments:
        name = type(augment).__name__[:14]
        numbers = uniform_numbers(origin, f"{name}{seen.count(name) or ''}")
        drawn.append(augment.draw(numbers, height, width))
        seen.append(name)
    return drawn


def _check_moves(augment: RandAugment | AutoAugment) -> None:
    check_choice("interpolation", augment.interpolation, ("nearest", "bilinear"))
    if not _is_value(augment.fill):
        raise _refused(augment, "fill", "a whole number, 0 to 255")


def _is_value(value: object) -> bool:
    return is_whole(value) and 0 <= value <= 255


def _refused(augment: PixelAugment, name: str, expected: str) -> ArgumentError:
    given = shown(getattr(augment, name))
    return ArgumentError(f"{type(augment).__name__}({name}={given}): pass {expected}")
