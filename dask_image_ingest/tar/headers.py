"""A single tar header: its checksum, extended headers by tarfile, and blocks that are no header."""

from __future__ import annotations

import io
import tarfile
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import ByteReader, ReaderFile, describe_bytes

BLOCK = 512


class SparseMember(NamedTuple):
    """A member that is stored without its holes.

    ``size`` is that of the expanded member. ``pieces`` has the offset in the expanded member and
    the size of each stored piece; in the shard the pieces follow one another.
    """

    size: int
    pieces: tuple[tuple[int, int], ...]


# In bytes; so that a wrong size in a damaged header does not read a whole shard.
_LARGEST_EXTENDED_HEADER = 16 << 20


# --- checksums ------------------------------------------------------------------------------------

_OCTAL_WEIGHTS = 8 ** np.arange(5, -1, -1)


def first_bad_checksum(headers: list[tuple[int, bytes]]) -> tuple[int, bytes] | None:
    """Verify many headers at once, given with offsets; the first with a wrong checksum, or None."""
    if not headers:
        return None
    blocks = np.frombuffer(b"".join([header for _, header in headers]), np.uint8)
    blocks = blocks.reshape(-1, BLOCK)
    # The eight bytes of the checksum itself count as blanks.
    sums = blocks.sum(1, np.uint32) - blocks[:, 148:156].sum(1, np.uint32) + 8 * 32
    digits = blocks[:, 148:154].astype(np.int64) - 48
    is_plain = (digits >= 0).all(1) & (digits < 8).all(1) & (blocks[:, 154] == 0)
    # Others may still be right, in a rarer notation.
    for i in np.flatnonzero(~is_plain | (digits @ _OCTAL_WEIGHTS != sums)):
        if not checksum_holds(headers[i][1]):
            return headers[i]
    return None


def checksum_holds(header: bytes) -> bool:
    """Verify one header as tarfile does: in any notation, also sums of signed bytes."""
    try:
        stored = int(header[148:156].partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return False
    summed = header[:148] + b" " * 8 + header[156:]
    return stored in (sum(summed), sum(summed) - 256 * sum(byte > 127 for byte in summed))


# --- extended headers -----------------------------------------------------------------------------

# Exceptions of tarfile for a header with a right checksum and invalid contents.
UNREADABLE = (
    tarfile.TarError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TarfileReader:
    """The standard library's header parser, at any offset."""

    def __init__(self, content: ByteReader) -> None:
        # A TarFile reads its first member on creation: give it an empty archive for that.
        self._tar = tarfile.TarFile(
            fileobj=io.BytesIO(bytes(2 * BLOCK)), encoding="utf-8", errors="surrogateescape"
        )
        self._file = self._tar.fileobj = _HeaderFile(content)
        #: Whether a global PAX header overrides names, links or sizes of all members after it.
        self.has_global_names = False

    def read_header(self, offset: int) -> tuple[tarfile.TarInfo, int]:
        """Read the member whose first header is at ``offset``; it, and the next header's offset."""
        self._file.seek(offset)
        info = self._tar.tarinfo.fromtarfile(self._tar)
        following = self._tar.offset
        if info.size < 0 or following <= offset:
            raise ValueError("negative size")
        self.has_global_names = any(
            keyword in ("path", "linkpath", "size") or keyword.startswith("GNU.sparse.")
            for keyword in self._tar.pax_headers
        )
        return info, following


class _HeaderFile(ReaderFile):
    """File for tarfile: refuses huge extended headers, raises EOFError instead of short reads."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_EXTENDED_HEADER:
            raise tarfile.HeaderError(f"an extended header of {size} bytes")
        block = super().read(size)
        if len(block) < size:
            raise EOFError
        return block


def sparse_member(info: tarfile.TarInfo) -> SparseMember | None:
    """The pieces of a sparse member; None for a plain one."""
    stored: Any = info.sparse  # a list of pairs; typeshed says bytes
    if stored is None:
        return None
    pieces = tuple((start, length) for start, length in stored if length)
    if any(start < 0 or length < 0 or start + length > info.size for start, length in pieces):
        raise ValueError("pieces of a sparse file lie outside it")
    return SparseMember(info.size, pieces)


# --- blocks that are no header --------------------------------------------------------------------


def refuse_no_tar(block: bytes, url: str) -> None:
    """Raise ShardError if a shard's first block shows that it is no tar archive."""
    empty = not block.strip(b"\0")
    if not (empty or _has_magic(block) or (len(block) == BLOCK and checksum_holds(block))):
        raise ShardError(f"{url} is no tar archive: it begins with {describe(block)} at byte 0.")


def not_a_header(offset: int, block: bytes) -> tuple[str, int, str]:
    """Code, offset and reason of the damage if a block stands in place of a header."""
    if _has_magic(block):
        return "bad-checksum", offset, f"the checksum of the header at byte {offset} is wrong"
    return "not-a-tar", offset, f"no header at byte {offset}, but {describe(block)}"


def _has_magic(block: bytes) -> bool:
    return block[257:262] == b"ustar"


def describe(block: bytes) -> str:
    """Quote the first bytes of a block and name their file type."""
    if _has_magic(block):
        return "a tar header"
    what = describe_bytes(block)
    return repr(block[:16]) if what == "unknown data" else f"{block[:16]!r} ({what})"
