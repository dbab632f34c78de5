"""What decoded images should look like, and how many bytes they will take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dask.base import tokenize

from dask_image_ingest.decode.header import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.user_code import code_of, token_of

# Pillow's limit, twice its warning level: what decodes to more is taken for a bomb.
MAX_PIXELS = 178_956_970

RESIZES = ("stretch", "crop", "pad", "shorter", "longer")

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, eq=False)
class Decoding:
    """How images are decoded; equal options share one DALI pipeline in a process.

    ``size`` is (height, width) for the resizes ``stretch``, ``crop`` and ``pad``, and (edge,) for
    ``shorter`` and ``longer``.
    """

    device: Device = "cpu"
    size: tuple[int, ...] | None = None
    resize: str = "stretch"
    mode: Literal["RGB", "L"] = "RGB"
    transform: Callable | None = None
    max_pixels: int = sys.maxsize
    scaled: bool = False
    token: str = field(init=False, repr=False)
    transform_code: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options = (self.device, self.size, self.resize, self.mode, self.max_pixels, self.scaled)
        transform, code = None, {}
        if self.transform is not None:
            transform, code = token_of(self.transform), code_of(self.transform)
        object.__setattr__(self, "token", tokenize(options, transform))
        object.__setattr__(self, "transform_code", code)

    # A transform comes out of every task's pickle as another object: only its token is the same.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decoding) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __dask_tokenize__(self) -> str:
        return self.token

    @property
    def channels(self) -> int:
        """Channels of a decoded image."""
        return 1 if self.mode == "L" else 3

    def nbytes(self, header: Header) -> int:
        """Bytes of one decoded image, as its header foretells them; a transform may change them."""
        if header.error is not None or header.height is None or header.width is None:
            return 0
        height, width = header.height, header.width
        if self.size is None:
            return height * width * self.channels
        if len(self.size) == 2:
            return self.size[0] * self.size[1] * self.channels
        edge = min(height, width) if self.resize == "shorter" else max(height, width)
        scale = self.size[0] / max(edge, 1)
        return (round(height * scale) or 1) * (round(width * scale) or 1) * self.channels


def make_decoding(
    *,
    device: Device,
    size: int | tuple[int, int] | None,
    resize: str,
    mode: Literal["RGB", "L"],
    transform: Callable | None,
    max_pixels: int | None,
    scaled_decode: bool = False,
) -> Decoding:
    """Check a user's arguments and bring them together.

    Raises
    ------
    ArgumentError
        For arguments that are unknown, out of range, or contradict each other.
    """
    if resize not in RESIZES:
        raise ArgumentError(f"resize={resize!r}; choose one of {', '.join(RESIZES)}")
    if mode not in ("RGB", "L"):
        raise ArgumentError(f"mode={mode!r}; choose 'RGB' or 'L'")
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform={transform!r} is no function of DALI operators")
    if max_pixels is not None and max_pixels < 1:
        raise ArgumentError(f"max_pixels={max_pixels} must be positive, or None for no limit")
    if scaled_decode and device == "gpu":
        raise ArgumentError("scaled_decode=True is for backend='pandas': a GPU decodes in full")
    if scaled_decode and (size is None or resize in ("shorter", "longer")):
        raise ArgumentError(
            "scaled_decode=True needs size= with resize='stretch', 'crop' or 'pad': the shape of "
            "its images must not depend on the scale at which they were decoded"
        )
    limit = sys.maxsize if max_pixels is None else max_pixels
    return Decoding(device, _size(size, resize), resize, mode, transform, limit, scaled_decode)


def _size(size: int | tuple[int, int] | None, resize: str) -> tuple[int, ...] | None:
    if size is None:
        if resize != "stretch":
            raise ArgumentError(f"resize={resize!r} does nothing without size=")
        return None
    edges = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(edges) not in (1, 2) or not all(isinstance(e, int) and 0 < e < 2**15 for e in edges):
        raise ArgumentError(f"size={size!r}: pass pixels as an int or as (height, width)")
    if resize in ("shorter", "longer"):
        if len(edges) == 2:
            raise ArgumentError(f"resize={resize!r} scales one edge: pass size= as one int")
        return edges
    return edges * 2 if len(edges) == 1 else edges
