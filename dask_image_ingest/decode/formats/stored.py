"""Results of a look at an image: its shape as stored, or why it can't be decoded."""

from __future__ import annotations

from typing import Final, NamedTuple

from dask_image_ingest.storage import describe_bytes

#: Most segments or chunks of a file that are looked at: a made one must not keep us busy.
MAX_PARTS: Final = 1 << 16

MAX_DETAIL = 200


class Stored(NamedTuple):
    """An image's shape before orientation, its orientation, and what is wrong with it."""

    height: int | None
    width: int | None
    channels: int | None
    orientation: int
    needs_pillow: bool
    error: str | None


class BadImage(Exception):
    """An image that cannot be decoded, and why.

    Parameters
    ----------
    code : str
        The stable part, to group and filter by: ``empty``, ``not-an-image``,
        ``unsupported-format``, ``too-large``, ``truncated`` or ``corrupt``.
    detail : object
        The part for a human reader. It may quote the image, and is escaped and shortened here.
    """

    def __init__(self, code: str, detail: object) -> None:
        self.code = code
        self.detail = printable(str(detail))
        super().__init__(f"{code}: {self.detail}")

    @classmethod
    def of(cls, error: str) -> BadImage:
        """The exception of which ``error`` is the text."""
        code, _, detail = error.partition(": ")
        return cls(code, detail)

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str]]:
        # Exceptions travel between workers by pickle, which would pass on the joined message alone.
        return BadImage, (self.code, self.detail)


def printable(text: str, limit: int = MAX_DETAIL) -> str:
    """``text`` on one line of ASCII, at most ``limit`` characters.

    What an image says about itself ends up in logs and on screens: control characters and endless
    lines must not.
    """
    escaped = "".join(
        sign if " " <= sign <= "~" else sign.encode("unicode_escape").decode()
        for sign in text[:limit]
    )
    return escaped if len(text) <= limit >= len(escaped) else escaped[: limit - 3] + "..."


def looks_like(head: bytes) -> str:
    """Description of bytes that are no image, quoting their beginning."""
    return f"looks like {describe_bytes(head)}: {printable(repr(head[:24]))[1:]}"
