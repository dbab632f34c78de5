"""Results of reading a header: the stored shape, or why the image can't be decoded."""

from __future__ import annotations

from typing import Final, NamedTuple

from dask_image_ingest.storage import describe_bytes

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
