"""Decode options, and the decoded size that they imply."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

import dask
import numpy as np
from dask.base import tokenize

from dask_image_ingest.arguments import (
    check_choice,
    check_flag,
    is_share,
    is_whole,
    shown,
    whole_number,
)
from dask_image_ingest.client import own_version
from dask_image_ingest.decode.augment import (
    Augment,
    Operations,
    PixelAugment,
    RandomHorizontalFlip,
    draw_steps,
    parse_augment,
)
from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.formats.header import read_header, too_large
from dask_image_ingest.decode.placement import Placement
from dask_image_ingest.decode.random_crop import RandomResizedCrop, draw_region
from dask_image_ingest.decode.region import Part, Region
from dask_image_ingest.decode.resize import Interpolation, ResizeGeometry, resize_geometry
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage import LazyBytes
from dask_image_ingest.user_functions import token_and_code

# Default of max_pixels: the limit above which Pillow raises a decompression bomb error.
MAX_PIXELS = 178_956_970

# Bytes of the largest image after a resize, as a cuDF column holds no more.
LARGEST_IMAGE = 2**31 - 1

# Largest edge for ``size``.
LARGEST_SIZE = 2**15 - 1

_HW_LOAD = "image-ingest.hw-decoder-load"

# Distance of the draws of two views, odd so that all differ; another one than that of repetitions.
_VIEW = 0xD1B54A32D192ED03

# Most bytes of a raw value by format; 4 for formats not listed, TIFF and PNM.
_RAW_BYTES = {"jpeg": 1, "webp": 1, "bmp": 1, "gif": 1, "png": 2}

#: Meaning of a pixel: colour, colour and alpha, grey, a class number, or the stored values.
Mode = Literal["RGB", "RGBA", "L", "labels", "raw"]

# For ``"raw"`` the maximum, as it differs between images.
_CHANNELS: dict[Mode, int] = {"RGB": 3, "RGBA": 4, "L": 1, "labels": 1, "raw": 4}

#: How an image is brought to ``size=``.
Resize = Literal["stretch", "crop", "pad", "shorter", "longer"]

#: What becomes of a part that reaches beyond its picture: cut off, black pixels, or an error.
Outside = Literal["clip", "pad", "error"]

INTERPOLATIONS: tuple[Interpolation, ...] = ("bilinear", "bicubic", "lanczos")

Device = Literal["cpu", "gpu"]

#: Height, width and channels; None where it differs between images or is not known.
ImageShape = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, eq=False)
class DecodeSpec:
    """Decode options. Equal options share one DALI pipeline in a process.

    Attributes
    ----------
    size : tuple of int, or None
        (height, width) for the resizes ``stretch``, ``crop`` and ``pad``; (edge,) for ``shorter``
        and ``longer``.
    interpolation : {"bilinear", "bicubic", "lanczos"}
        Filter of a resize, but for labels and stored values.
    crop_from : int or None
        With ``crop``, the shorter edge of the image from which ``size`` is cut; None for the
        smallest image that covers it.
    scaled : bool
        Decode large JPEGs at a reduced scale.
    hw_load : float or None
        Share of a batch for the hardware JPEG engines of a GPU; None for DALI's default.
    augment : RandomResizedCrop or None
        Random region of each image to decode, resized to ``size`` by ``stretch``.
    pixel_augments : tuple of augmentations
        Augmentations of the decoded and resized pixels, in order.
    draw : int
        `Origin.draw` of all images that have none of their own.
    view : int
        Number of this image among those of a sample that are to differ: each draws for itself.
    outside : {"clip", "pad", "error"}
        What becomes of a part that reaches beyond its picture.
    in_parts : bool
        The images are parts of pictures, so that each has a region. Found when they are fetched.
    token : str
        Dask token of all options.
    transform_code : str
        Digest of the transform's code, by which a worker refuses another version.
    version : str
        Version of this package in the process that planned the decode.
    """

    device: Device = "cpu"
    size: tuple[int, ...] | None = None
    resize: str = "stretch"
    mode: Mode = "RGB"
    transform: Callable[..., Any] | None = None
    max_pixels: int = sys.maxsize
    scaled: bool = False
    hw_load: float | None = None
    augment: RandomResizedCrop | None = None
    draw: int = 0
    interpolation: Interpolation = "bilinear"
    crop_from: int | None = None
    pixel_augments: tuple[PixelAugment, ...] = ()
    view: int = 0
    outside: Outside = "clip"
    in_parts: bool = False
    token: str = field(init=False, repr=False)
    transform_code: str = field(init=False, repr=False)
    version: str = field(default_factory=own_version, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if f.init and f.compare and f.name != "transform"]
        options = tuple(getattr(self, name) for name in given)
        transform: str | None = None
        code = ""
        if self.transform is not None:
            transform, code = token_and_code(self.transform)
        object.__setattr__(self, "token", tokenize(options, transform))
        object.__setattr__(self, "transform_code", code)

    # By token, since each task unpickles another object for the same transform.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodeSpec) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __dask_tokenize__(self) -> str:
        return self.token

    @property
    def channels(self) -> int:
        """Channels of a decoded image."""
        return _CHANNELS[self.mode]

    @property
    def by_pillow(self) -> bool:
        """True if Pillow decodes all images: DALI supports neither alpha nor palettes."""
        return self.mode in ("RGBA", "labels", "raw")

    @property
    def filter(self) -> Interpolation | Literal["nearest"]:
        """Filter of a resize; the nearest pixel where a mean of classes, or of depths, is none."""
        return "nearest" if self.mode in ("labels", "raw") else self.interpolation

    @property
    def is_random(self) -> bool:
        """True if pixels may depend on `Origin.draw`; what a transform does is not known."""
        return self.transform is not None or self.is_augmented

    @property
    def is_augmented(self) -> bool:
        """True if ``augment=`` was given."""
        return self.augment is not None or bool(self.pixel_augments)

    @property
    def flips(self) -> bool:
        """True if images are mirrored after their resize."""
        return any(isinstance(one, RandomHorizontalFlip) for one in self.pixel_augments)

    @property
    def is_placed_at_random(self) -> bool:
        """True if images show a random region, or are mirrored at random: see `placement`."""
        return self.augment is not None or self.flips

    @property
    def moves(self) -> PixelAugment | None:
        """The first augmentation that turns, shears or shifts pixels; None without."""
        moving = (one for one in self.pixel_augments if isinstance(one, Operations))
        return next(moving, None)

    @property
    def can_share(self) -> bool:
        """True if the result can be cut from the whole image, as from the decode of its region."""
        return self.augment is not None and self.resized_here and not self.scaled

    @property
    def shape(self) -> ImageShape:
        """Shape of every decoded image, as far as these options determine it."""
        if self.transform is not None or self.mode == "raw":
            return None, None, None
        if self.size is None or len(self.size) != 2:
            return None, None, self.channels
        return *self.size, self.channels

    @property
    def resized_here(self) -> bool:
        """True if `ResizedImage` resizes, not DALI: on a CPU, and stored values everywhere."""
        return self.size is not None and (self.device == "cpu" or self.mode == "raw")

    @property
    def cuts(self) -> bool:
        """True if images are regions of their pictures, not all of them."""
        return self.augment is not None or self.in_parts

    @property
    def takes_regions(self) -> bool:
        """True if DALI gets the region of each image: it decodes no more, or resizes it."""
        return self.cuts or (self.size is not None and not self.resized_here)

    @property
    def decoded_in_full(self) -> bool:
        """True if the decoder's output has the height and width in the header, or of its region."""
        return self.size is None or (self.resized_here and not self.scaled)

    def geometry(self, height: int, width: int) -> ResizeGeometry:
        """Geometry of the resize of an image, or a region, of this height and width."""
        assert self.size is not None
        return resize_geometry(height, width, self.size, self.resize, self.crop_from)

    def drawn(self, origin: Origin) -> Origin:
        """The origin of an image with the draw that these options give it."""
        draw = origin.draw or self.draw
        return origin._replace(draw=(draw + self.view * _VIEW) % 2**64)

    def region(
        self, header: Header, origin: Callable[[], Origin], part: Part | None = None
    ) -> Region | None:
        """Region of an upright picture that is decoded; None if the header has an error.

        It lies in the ``part`` to which the header applies. ``origin`` is called if it is random.
        """
        if header.error is not None or not header.height or not header.width:
            return None
        region = Region(0, 0, header.height, header.width)
        if self.augment is not None:
            region = draw_region(self.augment, *region[2:4], self.drawn(origin()))
        return region if part is None else region.shifted(*part.region[:2])

    def placement(
        self, header: Header, origin: Callable[[], Origin], part: Part | None = None
    ) -> Placement | None:
        """Place of an image's pixels in its decoded image; None if its header has an error."""
        region = self.region(header, origin, part)
        if region is None:
            return None
        shape = region.height, region.width
        whole = ResizeGeometry(shape, shape, (0, 0))
        geometry = whole if self.size is None else self.geometry(*shape)
        if self.flips:
            drawn = draw_steps(self.pixel_augments, *geometry.shape, self.drawn(origin()))
            flips = sum(step.operation == "Flip" for step in drawn)
            region = region._replace(mirrored=region.mirrored != bool(flips % 2))
        shape = (header.height or 0, header.width or 0) if part is None else part.shape
        return Placement(shape, region, geometry)

    def read_header(self, data: LazyBytes, page: int | None = None) -> Header:
        """Read an image's header, with an error if these options refuse the image.

        With a ``page``, parts of it are wanted: of a TIFF, nothing else is decoded.
        """
        if page is None:
            return self.validated(read_header(data, self.max_pixels))
        header = read_header(data, sys.maxsize, page)
        height, width = header.height or 0, header.width or 0
        if header.error is None and header.format != "tiff" and height * width > self.max_pixels:
            error = too_large(height, width, self.max_pixels)
            return header._replace(error=error, needs_pillow=True)
        return header

    def validated(self, header: Header) -> Header:
        """Set the header's error if the image would be too large after the resize.

        Only ``shorter`` needs this check: it does not bound the longer edge.
        """
        if header.error is not None or not header.height or not header.width:
            return header
        if self.size is None or self.resize != "shorter":
            return header
        height, width = self.geometry(header.height, header.width).shape
        limit, capacity = self.max_pixels, LARGEST_IMAGE // self.channels
        if height * width <= min(limit, capacity):
            return header
        exceeded = (
            f"max_pixels={limit:,}"
            if limit <= capacity
            else f"the {capacity:,} that a column can hold"
        )
        error = (
            f"too-large: {header.width} x {header.height} resized to {width} x {height} is "
            f"{height * width:,} pixels, more than {exceeded}"
        )
        return header._replace(error=error, needs_pillow=True)

    def nbytes(self, header: Header) -> int:
        """Bytes of one decoded image, estimated from its header; a transform may change them."""
        if header.error is not None or header.height is None or header.width is None:
            return 0
        height, width = header.height, header.width
        if self.size is not None and height and width:
            height, width = self.geometry(height, width).shape
        return height * width * self.bytes_per_pixel(header)

    def bytes_per_pixel(self, header: Header) -> int:
        """Bytes of a decoded pixel; for raw values the format's maximum."""
        if self.mode != "raw":
            return self.channels
        return (header.channels or 1) * _RAW_BYTES.get(header.format or "", 4)


def make_decode_spec(
    *,
    device: Device,
    size: int | tuple[int, int] | None,
    resize: str,
    mode: Mode,
    transform: Callable[..., Any] | None,
    max_pixels: int | None,
    augment: Augment | None = None,
    interpolation: str = "bilinear",
    crop_from: int | None = None,
    scaled_decode: bool = False,
    view: int = 0,
    outside: str = "clip",
) -> DecodeSpec:
    """Validate a user's arguments.

    Raises
    ------
    ArgumentError
        For arguments that are unknown, out of range, or contradict each other.
    """
    check_choice("mode", mode, tuple(_CHANNELS))
    check_choice("resize", resize, get_args(Resize))
    check_choice("interpolation", interpolation, INTERPOLATIONS)
    check_choice("outside", outside, get_args(Outside))
    check_flag("scaled_decode", scaled_decode)
    if transform is not None and not callable(transform):
        raise ArgumentError(
            f"transform={shown(transform)}: pass a function of DALI operators, images to images"
        )
    if scaled_decode and device == "gpu":
        raise ArgumentError("scaled_decode=True is for backend='pandas': a GPU decodes in full")
    if scaled_decode and (size is None or resize in ("shorter", "longer")):
        raise ArgumentError(
            "scaled_decode=True needs size= with resize='stretch', 'crop' or 'pad': the shape of "
            "its images must not depend on the scale at which they were decoded"
        )
    crop, pixel_augments = parse_augment(augment)
    if crop is not None and size is None:
        raise ArgumentError(
            "augment= with a crop resizes a region of each image: pass size= too. In image=, a "
            "column that stays as it is takes ImageColumn(..., size=None, augment=None)"
        )
    if crop is not None and resize != "stretch":
        raise ArgumentError(
            f"resize={resize!r}: a random crop stretches a region of each image to size=, so leave "
            "resize= out"
        )
    if mode == "raw" and ((size is not None and crop is None) or transform is not None):
        raise ArgumentError(
            "mode='raw' takes neither size= nor transform=, but size= with augment=: values stay "
            "as they are stored. Resize them in a function of map_batches. In image= pass "
            "ImageColumn(..., mode='raw', size=None, transform=None)"
        )
    for one in pixel_augments:
        flips = isinstance(one, RandomHorizontalFlip)
        moves = isinstance(one, Operations)
        if (mode == "RGBA" and not flips) or (mode == "raw" and moves):
            raise ArgumentError(
                f"mode={mode!r} takes no {type(one).__name__} of augment=, which is for images of "
                "'RGB', 'L' and 'labels'. In image= pass ImageColumn(..., augment=...) of its own"
            )
    if mode in ("RGBA", "labels", "raw") and scaled_decode:
        raise ArgumentError(f"mode={mode!r}: scaled_decode= is for images of 'RGB' and 'L'")
    limit = sys.maxsize
    if max_pixels is not None:
        advice = "pass a whole number of at least 1, or None for no limit"
        limit = min(limit, whole_number("max_pixels", max_pixels, 1, advice))
    load = _hw_load() if device == "gpu" else None
    target = _size(size, resize)
    return DecodeSpec(
        device=device,
        size=target,
        resize=resize,
        mode=mode,
        transform=transform,
        max_pixels=limit,
        scaled=scaled_decode,
        hw_load=load,
        augment=crop,
        interpolation=cast(Interpolation, interpolation),
        crop_from=_crop_from(crop_from, target, resize),
        pixel_augments=pixel_augments,
        view=whole_number("view", view, 0, "pass the number of the view, from 0", most=2**31),
        outside=cast(Outside, outside),
    )


def _hw_load() -> float | None:
    """Client's configured ``hw_load``; workers get it with the options."""
    load = dask.config.get(_HW_LOAD, None)
    if load is None:
        return None
    if not is_share(load):
        raise ArgumentError(
            f"{_HW_LOAD}={shown(load)} in dask's configuration; set 0 to 1, or None"
        )
    return float(load)


def _size(size: Any, resize: str) -> tuple[int, ...] | None:
    if size is None:
        if resize != "stretch":
            raise ArgumentError(f"resize={resize!r} does nothing without size=")
        return None
    listed = isinstance(size, (tuple, list)) or (isinstance(size, np.ndarray) and size.ndim == 1)
    pair = listed and len(size) == 2
    edges = list(size) if pair else [size]
    if not all(_is_edge(edge) for edge in edges):
        raise ArgumentError(
            f"size={shown(size)}: pass one whole number of pixels, or (height, width), each from "
            f"1 to {LARGEST_SIZE}"
        )
    edges = [int(edge) for edge in edges]
    if resize in ("shorter", "longer"):
        if pair:
            raise ArgumentError(f"resize={resize!r} scales one edge: pass size= as one int")
        return tuple(edges)
    return tuple(edges) if pair else (edges[0], edges[0])


def _crop_from(crop_from: object, size: tuple[int, ...] | None, resize: str) -> int | None:
    if crop_from is None:
        return None
    if size is None or resize != "crop":
        raise ArgumentError(
            f"crop_from={shown(crop_from)}: it is the shorter edge of the image from which "
            "resize='crop' cuts size=, as in size=224, resize='crop', crop_from=256"
        )
    advice = "pass the shorter edge before the crop, in pixels, at least the edges of size="
    return whole_number("crop_from", crop_from, max(size), advice, most=LARGEST_SIZE)


def _is_edge(edge: object) -> bool:
    return is_whole(edge) and 1 <= edge <= LARGEST_SIZE
