"""How a JPEG is coded, from its headers alone: what of it a hardware decoder cannot take."""

from __future__ import annotations

from typing import Final, NamedTuple

from dask_image_ingest.decode.formats.dimensions import FRAMES, MAX_PARTS, SEGMENT
from dask_image_ingest.storage import LazyBytes

__all__ = ["JpegFrame", "read_jpeg_frame"]

# Up to the pixels in most photos: one read of the shard.
_WINDOW: Final = 2048
_SCAN: Final = 0xDA
_CODINGS: Final = {
    0xC0: "baseline",
    0xC1: "extended",
    0xC2: "progressive",
    0xC3: "lossless",
    0xC9: "arithmetic",
    0xCA: "arithmetic",
    0xCB: "lossless",
}
# Width and height of the first component's blocks in those of the others.
_SUBSAMPLINGS: Final = {
    (1, 1): "4:4:4",
    (2, 1): "4:2:2",
    (2, 2): "4:2:0",
    (1, 2): "4:4:0",
    (4, 1): "4:1:1",
    (4, 2): "4:1:0",
}
_IN_HARDWARE: Final = frozenset(("4:4:4", "4:2:2", "4:2:0", "4:4:0"))


class JpegFrame(NamedTuple):
    """What a JPEG's frame header and its first scan say.

    Attributes
    ----------
    coding
        ``baseline``, ``extended``, ``progressive``, ``lossless``, ``arithmetic``, or ``other``.
    precision
        Bits of a sample.
    sampling
        Of each component: blocks across, blocks down.
    one_scan
        Whether the first scan has all components. Of a baseline JPEG it is then the only one.
    """

    coding: str
    precision: int
    sampling: tuple[tuple[int, int], ...]
    one_scan: bool

    @property
    def is_baseline(self) -> bool:
        """Whether it is baseline, in one scan."""
        return self.coding == "baseline" and self.precision == 8 and self.one_scan

    @property
    def subsampling(self) -> str:
        """As ``4:2:0``, ``grey`` for one component, ``other`` for what has no name."""
        if len(self.sampling) == 1:
            return "grey"
        (across, down), *others = self.sampling
        if len(set(others)) != 1 or across % others[0][0] or down % others[0][1]:
            return "other"
        return _SUBSAMPLINGS.get((across // others[0][0], down // others[0][1]), "other")

    @property
    def not_in_hardware(self) -> str | None:
        """Why a hardware decoder does not take it; None if one does.

        By what NVIDIA says of nvJPEG's ``NVJPEG_BACKEND_HARDWARE``: baseline JPEG, a single scan, 1
        or 3 channels, neither 4:1:0 nor 4:1:1
        (https://docs.nvidia.com/cuda/nvjpeg/index.html#nvjpeg-backend). Baseline means Huffman
        coding and 8 bits. What that page does not name (uncommon subsamplings) counts as not taken.
        """
        if self.precision != 8:
            return f"{self.precision}-bit"
        if self.coding != "baseline":
            return self.coding
        if not self.one_scan:
            return "several scans"
        if len(self.sampling) not in (1, 3):
            return f"{len(self.sampling)} components"
        known = self.subsampling == "grey" or self.subsampling in _IN_HARDWARE
        return None if known else f"subsampling {self.subsampling}"


def read_jpeg_frame(data: LazyBytes) -> JpegFrame | None:
    """Read the segments of a JPEG up to its first scan; None if they lead to none."""
    window = bytes(data[:_WINDOW])

    def part(start: int, stop: int) -> bytes:
        return window[start:stop] if stop <= len(window) else bytes(data[start:stop])

    at, frame = 2, None
    for _ in range(MAX_PARTS):
        head = part(at, at + 4)
        if len(head) < 4:
            return None
        mark, kind, length = SEGMENT(head)
        if mark != 0xFF or kind in (0x00, 0xFF):
            # Fill bytes, or junk that decoders pass over.
            step = head.find(b"\xff", 1)
            at += step if step > 0 else len(head)
            continue
        if kind in FRAMES and frame is None:
            frame = kind, part(at + 4, at + 2 + length)
        elif kind == _SCAN:
            return None if frame is None else _jpeg_frame(*frame, part(at + 4, at + 5))
        at += 2 + length
    return None


def _jpeg_frame(kind: int, body: bytes, scan: bytes) -> JpegFrame | None:
    factors = body[7::3]
    if len(body) < 6 or len(factors) != body[5] or not factors or not scan:
        return None
    sampling = tuple((factor >> 4, factor & 15) for factor in factors)
    if any(not 1 <= factor <= 4 for pair in sampling for factor in pair):
        return None
    return JpegFrame(_CODINGS.get(kind, "other"), body[0], sampling, scan[0] == len(factors))
