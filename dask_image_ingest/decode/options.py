"""Decode options: what images should look like, and how many bytes they will take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import dask
import numpy as np
from dask.base import tokenize

from dask_image_ingest.arguments import check_choice, check_flag, is_whole, shown, whole_number
from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.resize import resize_geometry
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.user_functions import code_digests, token_of

# Pillow's limit, twice its warning level: what decodes to more is taken for a bomb.
MAX_PIXELS = 178_956_970

# Bytes that an image may be resized to: a column of cuDF holds no more.
LARGEST_IMAGE = 2**31 - 1

# What ``size`` may be at most.
LARGEST_SIZE = 2**15 - 1

_HW_LOAD = "image-ingest.hw-decoder-load"

# Bytes of a value of these formats; those of TIFF and PNM are 4 at most.
_RAW_BYTES = {"jpeg": 1, "webp": 1, "bmp": 1, "gif": 1, "png": 2}

#: Meaning of a pixel: colour, colour and alpha, grey, the number of a class, or what is stored.
Mode = Literal["RGB", "RGBA", "L", "labels", "raw"]

# Of ``"raw"`` the most: each image has its own.
_CHANNELS: dict[Mode, int] = {"RGB": 3, "RGBA": 4, "L": 1, "labels": 1, "raw": 4}

#: ``"nearest"`` says what a resize of labels is anyway.
Resize = Literal["stretch", "crop", "pad", "shorter", "longer", "nearest"]

RESIZES = ("stretch", "crop", "pad", "shorter", "longer")

Device = Literal["cpu", "gpu"]

#: Height, width and channels; None for what is not the same for all images, or not known.
ImageShape = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, eq=False)
class DecodeSpec:
    """Decode options; equal ones share one DALI pipeline in a process.

    ``size`` is (height, width) for the resizes ``stretch``, ``crop`` and ``pad``, and (edge,) for
    ``shorter`` and ``longer``. ``hw_load`` is the share of a batch that the JPEG engines of a GPU
    get, None for DALI's own.
    """

    device: Device = "cpu"
    size: tuple[int, ...] | None = None
    resize: str = "stretch"
    mode: Mode = "RGB"
    transform: Callable[..., Any] | None = None
    max_pixels: int = sys.maxsize
    scaled: bool = False
    hw_load: float | None = None
    token: str = field(init=False, repr=False)
    transform_code: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options: list[Any] = [
            self.device,
            self.size,
            self.resize,
            self.mode,
            self.max_pixels,
            self.scaled,
        ]
        if self.hw_load is not None:
            options.append(self.hw_load)
        transform, code = None, {}
        if self.transform is not None:
            transform, code = token_of(self.transform), code_digests(self.transform)
        object.__setattr__(self, "token", tokenize(tuple(options), transform))
        object.__setattr__(self, "transform_code", code)

    # A transform comes out of every task's pickle as another object: only its token is the same.
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
        """True if DALI decodes none of the images: it has neither alpha nor palettes."""
        return self.mode in ("RGBA", "labels", "raw")

    @property
    def nearest(self) -> bool:
        """True if a resize takes the nearest pixel: a mean of two classes is a third one."""
        return self.mode == "labels"

    @property
    def shape(self) -> ImageShape:
        """The shape of every decoded image, as far as these options say it."""
        if self.transform is not None or self.mode == "raw":
            return None, None, None
        if self.size is None or len(self.size) != 2:
            return None, None, self.channels
        return *self.size, self.channels

    @property
    def resized_here(self) -> bool:
        """True if images are resized after DALI, as on a CPU; on a GPU DALI does it."""
        return self.size is not None and self.device == "cpu"

    @property
    def decoded_in_full(self) -> bool:
        """True if the decoder gives images as large as their headers say."""
        return self.size is None or (self.resized_here and not self.scaled)

    def validated(self, header: Header) -> Header:
        """The header of an image, with its error where it is too large once it is resized.

        Only the shorter edge being given, the other one is as long as the image's shape has it.
        """
        if header.error is not None or not header.height or not header.width:
            return header
        if self.size is None or self.resize != "shorter":
            return header
        height, width = resize_geometry(header.height, header.width, self.size, self.resize).shape
        limit, held = self.max_pixels, LARGEST_IMAGE // self.channels
        if height * width <= min(limit, held):
            return header
        most = f"max_pixels={limit:,}" if limit <= held else f"the {held:,} that a column can hold"
        error = (
            f"too-large: {header.width} x {header.height} resized to {width} x {height} is "
            f"{height * width:,} pixels, more than {most}"
        )
        return header._replace(error=error, needs_pillow=True)

    def nbytes(self, header: Header) -> int:
        """Bytes of one decoded image, as its header foretells them; a transform may change them."""
        if header.error is not None or header.height is None or header.width is None:
            return 0
        height, width = header.height, header.width
        if self.size is not None and height and width:
            height, width = resize_geometry(height, width, self.size, self.resize).shape
        return height * width * self.bytes_per_pixel(header)

    def bytes_per_pixel(self, header: Header) -> int:
        """Bytes of a decoded pixel; of raw values the most that the format has."""
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
    scaled_decode: bool = False,
) -> DecodeSpec:
    """Check a user's arguments and bring them together.

    Raises
    ------
    ArgumentError
        For arguments that are unknown, out of range, or contradict each other.
    """
    check_choice("mode", mode, tuple(_CHANNELS))
    if isinstance(resize, str) and resize == "nearest":
        if mode != "labels":
            raise ArgumentError(
                "resize='nearest' is for mode='labels': pass 'stretch', 'crop', 'pad', 'shorter' "
                "or 'longer'"
            )
        resize = "stretch"
    check_choice("resize", resize, RESIZES)
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
    if mode == "raw" and (size is not None or transform is not None):
        raise ArgumentError(
            "mode='raw' takes neither size= nor transform=: values stay as they are stored. "
            "Resize them in a function of map_batches. In images= pass "
            "ImageColumn(..., mode='raw', size=None, transform=None)"
        )
    if mode in ("RGBA", "labels", "raw") and scaled_decode:
        raise ArgumentError(f"mode={mode!r}: scaled_decode= is for images of 'RGB' and 'L'")
    limit = sys.maxsize
    if max_pixels is not None:
        advice = "pass a whole number of at least 1, or None for no limit"
        limit = min(limit, whole_number("max_pixels", max_pixels, 1, advice))
    load = _hw_load() if device == "gpu" else None
    made = _size(size, resize)
    return DecodeSpec(device, made, resize, mode, transform, limit, scaled_decode, load)


def _hw_load() -> float | None:
    """Configured share of the JPEG engines; workers get it with the options."""
    load = dask.config.get(_HW_LOAD, None)
    if load is None:
        return None
    if isinstance(load, bool) or not isinstance(load, (int, float)) or not 0 <= load <= 1:
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


def _is_edge(edge: Any) -> bool:
    return is_whole(edge) and 1 <= edge <= LARGEST_SIZE
