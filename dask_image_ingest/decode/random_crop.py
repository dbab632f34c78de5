"""Random crop that is resized: the region is drawn before the decode, which decodes no more.

The rule is torchvision's `RandomResizedCrop`. The numbers are a hash of the sample and its draw, so
they are the same on a CPU and a GPU, in every batch, and for all image columns of a sample. The
rule is applied to proportions, not to pixels: images of the same proportions get the same region.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dask_image_ingest.arguments import shown
from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.decode.region import Region
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.url_secrets import url_identity


@dataclass(frozen=True)
class RandomResizedCrop:
    """Random crop, resized to ``size`` and mirrored at random, for ``augment=`` of a read.

    As torchvision's ``RandomResizedCrop`` and ``RandomHorizontalFlip``: the crop has a random share
    of the image's area, and a random ratio of width to height; of ten such crops the first that
    fits is taken, otherwise the largest one in the middle of a ratio that is allowed. A decoder
    decodes only this region, where it can. ``augment="random_resized_crop"`` has these defaults.

    Parameters
    ----------
    scale : (float, float)
        Smallest and largest share of the image's area, 0 < low <= high <= 1.
    ratio : (float, float)
        Smallest and largest width divided by height, 0 < low <= high; its logarithm is uniform.
    flip : float
        Probability that the crop is mirrored left to right, 0 to 1.

    Raises
    ------
    ArgumentError
        If a number is out of range.

    Examples
    --------
    >>> gentle = RandomResizedCrop(scale=(0.5, 1.0), flip=0)
    >>> ddf = read_webdataset_images("train-{000..003}.tar", size=224, augment=gentle)
    >>> ddf.head(1).images.arrays()[0].shape
    (224, 224, 3)
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __post_init__(self) -> None:
        set_range(self, "scale", 1)
        set_range(self, "ratio")
        set_probability(self, "flip")


def set_range(augment: object, name: str, most: float = sys.float_info.max) -> None:
    """Check a field (low, high) of an augmentation, 0 < low <= high <= most; make them floats."""
    low, high = getattr(augment, name)
    if not 0 < low <= high <= most:
        limit = " <= 1" if most == 1 else ""
        raise refused(augment, name, f"(low, high), 0 < low <= high{limit}")
    object.__setattr__(augment, name, (float(low), float(high)))


def set_probability(augment: object, name: str) -> None:
    """Check a field that is a probability, and make it a float."""
    if not 0 <= getattr(augment, name) <= 1:
        raise refused(augment, name, "a probability, 0 to 1")
    object.__setattr__(augment, name, float(getattr(augment, name)))


def refused(augment: object, name: str, expected: str) -> ArgumentError:
    """The error of a field of an augmentation."""
    given = shown(getattr(augment, name))
    return ArgumentError(f"{type(augment).__name__}({name}={given}): pass {expected}")


_TRIES: Final = 10


def draw_region(crop: RandomResizedCrop, height: int, width: int, origin: Origin) -> Region:
    """Region of an image of this upright height and width: a function of these and its origin."""
    numbers = uniform_numbers(origin)
    mirrored = next(numbers) < crop.flip
    proportion = width / height
    (least, most), (narrow, wide) = crop.scale, map(math.log, crop.ratio)
    for _ in range(_TRIES):
        area = least + (most - least) * next(numbers)
        ratio = math.exp(narrow + (wide - narrow) * next(numbers))
        down, across = next(numbers), next(numbers)
        # Shares of the image's height and width.
        high, broad = math.sqrt(area / ratio * proportion), math.sqrt(area * ratio / proportion)
        if high <= 1 and broad <= 1:
            rows, columns = _pixels(high, height), _pixels(broad, width)
            # Each position is as likely, the last one too.
            top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
            return Region(top, left, rows, columns, mirrored)
    high = min(1.0, proportion / crop.ratio[0])
    broad = min(1.0, crop.ratio[1] / proportion)
    rows, columns = _pixels(high, height), _pixels(broad, width)
    return Region((height - rows) // 2, (width - columns) // 2, rows, columns, mirrored)


def _pixels(share: float, edge: int) -> int:
    return max(1, round(share * edge))


def uniform_numbers(origin: Origin, purpose: str = "crop") -> Iterator[float]:
    """Random numbers from 0 to 1, 1 excluded, of 53 bits; ``purpose`` has at most 16 letters."""
    key = struct.pack("<8sQQ", _digest(origin.shard), origin.number % 2**64, origin.draw)
    person = purpose.encode()
    for block in range(2**16):
        digest = hashlib.blake2b(key, salt=block.to_bytes(2, "little"), person=person).digest()
        for value in struct.unpack("<8Q", digest):
            yield (value >> 11) * 2.0**-53


@functools.lru_cache(maxsize=4096)
def _digest(shard: str) -> bytes:
    identity = url_identity(shard).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(identity, digest_size=8).digest()
