"""Results of reading a header: the stored shape, the EXIF orientation, or why it is no image."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from dask_image_ingest.storage import LazyBytes, describe_bytes

#: Most segments or chunks that are read from a file, so that a crafted one can't stall a worker.
MAX_PARTS: Final = 1 << 16

MAX_DETAIL = 200


class StoredHeader(NamedTuple):
    """Header of an image before its orientation is applied; fields as in `Header`.

    ``orientation`` is EXIF's, 1 to 8.
    """

    height: int | None
    width: int | None
    channels: int | None
    orientation: int
    needs_pillow: bool
    error: str | None


class BadImage(Exception):
    """Error of an image that can't be decoded.

    Parameters
    ----------
    code : str
        Stable code, to group and filter by: ``empty``, ``not-an-image``, ``unsupported-format``,
        ``too-large``, ``truncated``, ``corrupt`` or ``crashed-decoder``.
    detail : object
        Text for a human reader. It may quote the image, so it is escaped and shortened.
    """

    def __init__(self, code: str, detail: object) -> None:
        self.code = code
        self.detail = printable(str(detail))
        super().__init__(f"{code}: {self.detail}")

    @classmethod
    def of(cls, error: str) -> BadImage:
        """Parse the text of such an exception."""
        code, _, detail = error.partition(": ")
        return cls(code, detail)

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str]]:
        # By default pickle would pass the whole message as ``code``.
        return BadImage, (self.code, self.detail)


def no_page(page: int, pages: int) -> BadImage:
    """Error of a page that an image does not have."""
    return BadImage("page", f"it has {pages} pages, counted from 0, and no page {page}")


def printable(text: str, limit: int = MAX_DETAIL) -> str:
    """Escape ``text`` to one line of ASCII, of at most ``limit`` characters.

    Text from inside an image must not bring control characters or endless lines into logs.
    """
    escaped = "".join(
        char if " " <= char <= "~" else char.encode("unicode_escape").decode()
        for char in text[:limit]
    )
    return escaped if len(text) <= limit >= len(escaped) else escaped[: limit - 3] + "..."


def looks_like(head: bytes) -> str:
    """Describe bytes that are not an image, and quote their beginning."""
    return f"looks like {describe_bytes(head)}: {printable(repr(head[:24]))[1:]}"


# --- EXIF -----------------------------------------------------------------------------------------

#: Orientations that swap height and width.
SWAPPED: Final = frozenset({5, 6, 7, 8})

#: Prefix of EXIF in a JPEG.
EXIF_PREFIX: Final = b"Exif\0\0"

_FIRST_LOOK: Final = 1024
_ORDERS: Final[dict[bytes, Literal["little", "big"]]] = {b"II*\0": "little", b"MM\0*": "big"}
# Tag 274 as stored, and its type and count: one unsigned short.
_TAG: Final = {"little": b"\x12\x01", "big": b"\x01\x12"}
_ONE_SHORT: Final = {"little": b"\x03\0\x01\0\0\0", "big": b"\0\x03\0\0\0\x01"}
_ENTRY: Final = 12


def read_orientation(data: LazyBytes, start: int, stop: int) -> tuple[int, bool]:
    """Read the orientation from the EXIF block ``data[start:stop]``, which begins like a TIFF file.

    Some writers put JPEG's prefix before it, in a JPEG too, which has one already. As in Pillow, it
    is skipped however often it is there.

    Returns
    -------
    orientation : int
        1 to 8; 1 if it is missing or invalid.
    unambiguous : bool
        True if every EXIF reader returns this value. If not, DALI, which has its own reader, must
        not decode the image.
    """
    block = bytes(data[start : min(stop, start + _FIRST_LOOK)])
    prefixes = 0
    while block.startswith(EXIF_PREFIX, prefixes):
        prefixes += len(EXIF_PREFIX)
    start, block = start + prefixes, block[prefixes:]
    order = _ORDERS.get(block[:4])
    if order is None:
        return 1, False
    first, last = _directory(block, order)
    if last > len(block) and start + len(block) < stop:
        block = bytes(data[start:stop])
        first, last = _directory(block, order)
    # DALI does not recognize EXIF after a prefix.
    orientation, unambiguous = 1, not prefixes and last <= len(block)
    entries = _entries(block, _TAG[order], first, min(last, len(block)))
    for at in entries:
        value = int.from_bytes(block[at + 8 : at + 10], order)
        one_short = block[at + 2 : at + 8] == _ONE_SHORT[order]
        unambiguous = unambiguous and len(entries) == 1 and one_short
        orientation = value if 1 <= value <= 8 else 1
        if not unambiguous:
            break
    return orientation, unambiguous


def _directory(block: bytes, order: Literal["little", "big"]) -> tuple[int, int]:
    """Start and end of the entries of the first directory; the end may lie beyond the block."""
    start = int.from_bytes(block[4:8], order)
    entries = int.from_bytes(block[start : start + 2], order)
    return start + 2, start + 2 + _ENTRY * entries


def _entries(block: bytes, tag: bytes, first: int, last: int) -> list[int]:
    """Positions of the whole entries of a tag."""
    positions = []
    at = block.find(tag, first, last)
    while at >= 0:
        # Elsewhere the two bytes are part of a value.
        if (at - first) % _ENTRY == 0 and at + _ENTRY <= last:
            positions.append(at)
        at = block.find(tag, at + 1, last)
    return positions
