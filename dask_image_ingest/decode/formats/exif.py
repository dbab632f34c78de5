"""The EXIF orientation, and no more of EXIF than that."""

from __future__ import annotations

from typing import Final, Literal

from dask_image_ingest.storage import LazyBytes

#: The orientations that exchange height and width.
SWAPPED: Final = frozenset({5, 6, 7, 8})

#: What EXIF begins with in a JPEG.
EXIF_PREFIX: Final = b"Exif\0\0"

_FIRST_LOOK: Final = 1024
_ORDERS: Final[dict[bytes, Literal["little", "big"]]] = {b"II*\0": "little", b"MM\0*": "big"}
# Tag 274, which must be one unsigned short.
_TAG: Final = {"little": b"\x12\x01", "big": b"\x01\x12"}
_ONE_SHORT: Final = {"little": b"\x03\0\x01\0\0\0", "big": b"\0\x03\0\0\0\x01"}
_ENTRY: Final = 12


def read_orientation(data: LazyBytes, start: int, stop: int) -> tuple[int, bool]:
    """Read the orientation from the EXIF block ``data[start:stop]``, which begins like a TIFF file.

    Returns
    -------
    orientation : int
        1 to 8; 1 when there is none, or none that makes sense.
    plain : bool
        Whether every reader of EXIF gives the same. If not, DALI, which reads it by itself, must
        not get the image.
    """
    block = bytes(data[start : min(stop, start + _FIRST_LOOK)])
    order = _ORDERS.get(block[:4])
    if order is None:
        return 1, False
    first, last = _directory(block, order)
    if last > len(block) and start + len(block) < stop:
        block = bytes(data[start:stop])
        first, last = _directory(block, order)
    found, plain = 1, last <= len(block)
    entries = _entries(block, _TAG[order], first, min(last, len(block)))
    for at in entries:
        value = int.from_bytes(block[at + 8 : at + 10], order)
        plain = plain and len(entries) == 1 and block[at + 2 : at + 8] == _ONE_SHORT[order]
        found = value if 1 <= value <= 8 else 1
        if not plain:
            break
    return found, plain


def read_any_orientation(data: LazyBytes, start: int, stop: int) -> tuple[int, bool]:
    """As `read_orientation`, of a block that may begin with the prefix of EXIF in a JPEG."""
    # Some writers leave the prefix in that EXIF has in a JPEG; DALI then sees no EXIF.
    if bytes(data[start : start + 6]) == EXIF_PREFIX:
        return read_orientation(data, start + 6, stop)[0], False
    return read_orientation(data, start, stop)


def _directory(block: bytes, order: Literal["little", "big"]) -> tuple[int, int]:
    start = int.from_bytes(block[4:8], order)
    entries = int.from_bytes(block[start : start + 2], order)
    return start + 2, start + 2 + _ENTRY * entries


def _entries(block: bytes, tag: bytes, first: int, last: int) -> list[int]:
    # Values may hold the two bytes of the tag: only those at the head of an entry count.
    found = []
    at = block.find(tag, first, last)
    while at >= 0:
        if (at - first) % _ENTRY == 0:
            found.append(at)
        at = block.find(tag, at + 1, last)
    return found
