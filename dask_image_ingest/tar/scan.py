"""Header scan of a tar.

Plain headers take a fast path. All others (PAX names, GNU long names, sparse files, sizes in base
256) are left to :mod:`tarfile`, so that names are the same as everywhere in Python.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import normpath
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import ByteReader, ReaderFile, describe_bytes

BLOCK = tarfile.BLOCKSIZE

# Name, offset and size. Plain tuples: there are millions.
Member = tuple[str, int, int]


class SparseMember(NamedTuple):
    """A member that is stored without its holes.

    ``size`` is that of the expanded member. ``pieces`` has the offset in the expanded member and
    the size of each stored piece; in the shard the pieces follow one another.
    """

    size: int
    pieces: tuple[tuple[int, int], ...]


class Skipped(NamedTuple):
    """Members that are not read for the same reason: their number, and the name of the first."""

    number: int
    first: str


def add_skipped(skipped: dict[str, Skipped], code: str, name: str) -> None:
    """Count one more member that is not read."""
    number, first = skipped.get(code, (0, name))
    skipped[code] = Skipped(number + 1, first)


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a shard: offset, explanation and code.

    ``code`` is ``truncated-header``, ``truncated-member``, ``truncated-padding``,
    ``truncated-stream``, ``bad-checksum``, ``bad-header``, ``not-a-tar`` or ``trailing-data``.
    """

    offset: int
    reason: str
    code: str

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


# Headers whose checksums are verified together.
_BATCH = 1024

_REGULAR, _REGULAR_V7, _PAX, _HARD_LINK, _SYMBOLIC_LINK = b"0\0x12"
_WITHOUT_DATA = frozenset(b"3456")

# PAX records that change neither name nor size; webdataset's own writer puts an mtime before every
# member. No value may hold an "=", so none can hide another record behind a wrong length.
_HARMLESS_PAX = re.compile(rb"(?:\d+ (?:[amc]time|[ug]id)=[-.\d]*\n)+\0*")

# Exceptions of tarfile for a header with a right checksum and invalid contents.
_UNREADABLE = (
    tarfile.TarError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

# In bytes; so that a wrong size in a damaged header does not read a whole shard.
_LARGEST_EXTENDED_HEADER = 16 << 20

_LARGEST_INT64 = 2**63 - 1

# In place of the offset of the next header: the scan is over.
_OVER = -1


class TarScan:
    """Scan of a tar.

    Attributes
    ----------
    members
        The regular files, and hard links to earlier ones with the offset and size of these.
    damage
        None if the tar is complete.
    sparse
        Offset → sparse member.
    pax
        Number of members with a PAX header.
    skipped
        Links that are not followed: symbolic ones, and hard links to no earlier file.
    """

    def __init__(self, content: ByteReader, url: str) -> None:
        first = bytes(content[:BLOCK])
        if first.strip(b"\0") and not (_has_magic(first) or _is_header(first)):
            raise ShardError(
                f"{url} is no tar archive: it begins with {_describe(first)} at byte 0."
            )
        self.members: list[Member] = []
        self.damage: Damage | None = None
        self.sparse: dict[int, SparseMember] = {}
        self.pax = 0
        self.skipped: dict[str, Skipped] = {}
        #: Links among the members: the offset where their data would be → type and target.
        self._links: dict[int, tuple[int, str]] = {}
        self._content = content
        self._end = len(content)
        # A TarFile reads its first member on creation: give it an empty archive for that.
        self._tarfile = tarfile.TarFile(
            fileobj=io.BytesIO(bytes(2 * BLOCK)), encoding="utf-8", errors="surrogateescape"
        )
        self._file = self._tarfile.fileobj = _HeaderFile(content)
        #: Where the last harmless PAX header ends, which a member must follow; -1 before.
        self._after_pax = -1
        self._scan()
        if self._links:
            self.members = list(self._follow_links())

    def _scan(self) -> None:
        offset, invalid = 0, None
        while offset != _OVER and invalid is None:
            unverified: list[tuple[int, bytes]] = []
            offset = self._take_batch(offset, unverified)
            invalid = first_bad_checksum(unverified)
        if invalid is not None:
            self._stop(*_not_a_header(*invalid))
            self.members = [member for member in self.members if member[1] <= invalid[0]]

    def _follow_links(self) -> Iterator[Member]:
        """The regular members; a hard link has the bytes of the member it refers to.

        As for tarfile, that is the last one of its name before the link.
        """
        targets: dict[str, tuple[int, int] | None] = {}
        for name, data, size in self.members:
            span: tuple[int, int] | None = data, size
            if data in self._links:
                kind, target = self._links[data]
                span = targets.get(normpath(target)) if kind == _HARD_LINK else None
                if span is None:
                    code = "hard-link" if kind == _HARD_LINK else "symbolic-link"
                    add_skipped(self.skipped, code, name)
            targets[normpath(name)] = span
            if span is not None:
                yield name, *span

    def _take_batch(self, offset: int, unverified: list[tuple[int, bytes]]) -> int:
        """Take the members of the next headers; the offset of the first header not read."""
        content, end, members = self._content, self._end, self.members
        buffered = content.in_memory()
        buffered_size = len(buffered)
        for _ in range(_BATCH):
            data = offset + BLOCK
            if data <= buffered_size:
                header = bytes(buffered[offset:data])
            elif data > end:
                return self._end_of_bytes(offset)
            else:
                header = bytes(content[offset:data])
                if buffered_size:  # more was read meanwhile
                    buffered = content.in_memory()
                    buffered_size = len(buffered)
            kind = header[156]
            try:
                size = int(header[124:136].rstrip(b" \0"), 8)
            except ValueError:
                size = -1
            following = data + (size + 511 & -512)

            if size < 0 or not header[0]:
                following = self._take_odd_header(offset, header)
            elif kind == _REGULAR or (kind == _REGULAR_V7 and not _names_folder(header)):
                unverified.append((offset, header))
                if data + size > end:
                    return self._end_in_member(offset, plain_name(header), data + size)
                members.append((plain_name(header), data, size))
            elif kind in _WITHOUT_DATA:
                unverified.append((offset, header))
                following = data
            elif kind in (_HARD_LINK, _SYMBOLIC_LINK):
                unverified.append((offset, header))
                target = str(header[157:257].partition(b"\0")[0], "utf-8", "backslashreplace")
                following = self._take_link(plain_name(header), data, kind, target)
            elif kind == _PAX and size <= 4096 and _HARMLESS_PAX.fullmatch(content[data:following]):
                unverified.append((offset, header))
                self.pax += 1
                self._after_pax = following
            else:
                following = self._take_odd_header(offset, header)

            if following == _OVER:
                return _OVER
            offset = following
        return offset

    def _take_odd_header(self, offset: int, header: bytes) -> int:
        if header.count(0) == BLOCK:
            return self._end_of_archive(offset)
        if not _is_header(header):
            return self._stop(*_not_a_header(offset, header))
        try:
            self._file.seek(offset)
            info = tarfile.TarInfo.fromtarfile(self._tarfile)
            following = self._tarfile.offset
            if info.size < 0 or following <= offset:
                raise ValueError("negative size")
            sparse = _sparse_member(info)
        except EOFError:
            reason = f"the shard ends inside the extended header at byte {offset}"
            return self._stop("truncated-header", offset, reason)
        except ShardError:
            raise  # the content could not be read, which says nothing about the header
        except _UNREADABLE as error:
            reason = f"the header at byte {offset} makes no sense ({error})"
            return self._stop("bad-header", offset, reason)

        self.pax += header[156] == _PAX
        name = _as_text(info.name)
        data = info.offset_data
        stored = info.size if sparse is None else sum(length for _, length in sparse.pieces)
        if following > data and data + stored > self._end:
            return self._end_in_member(offset, name, data + stored)
        if info.isreg():
            self.members.append((name, data, info.size if sparse is None else sparse.size))
            if sparse is not None:
                self.sparse[data] = sparse
        elif info.islnk() or info.issym():
            return self._take_link(name, data, info.type[0], _as_text(info.linkname))
        return following

    def _take_link(self, name: str, data: int, kind: int, target: str) -> int:
        """Take a link, which has no data; the offset of the next header."""
        self.members.append((name, data, 0))
        self._links[data] = kind, target
        return data

    def _end_of_bytes(self, offset: int) -> int:
        """End of a tar without an end-of-archive mark; no damage if it is between two members."""
        if bytes(self._content[offset : self._end]).strip(b"\0"):
            reason = f"the shard ends inside the header at byte {offset}"
            return self._stop("truncated-header", offset, reason)
        if offset > self._end and offset != self._after_pax:
            reason = "the shard ends inside the padding after its last member, which is whole"
            return self._stop("truncated-padding", self._end, reason)
        return self._end_between_members(offset)

    def _end_of_archive(self, offset: int) -> int:
        trailing = _first_non_zero(self._content, offset + BLOCK)
        if trailing is None:
            return self._end_between_members(offset)
        what = _describe(bytes(self._content[trailing : trailing + BLOCK]))
        reason = f"the archive ends at byte {offset}, but at byte {trailing} follows {what}"
        return self._stop("trailing-data", trailing, reason)

    def _end_between_members(self, offset: int) -> int:
        if offset != self._after_pax:
            return _OVER
        reason = f"the shard ends at byte {offset}, between a PAX header and its member"
        return self._stop("truncated-header", offset, reason)

    def _end_in_member(self, offset: int, name: str, needed: int) -> int:
        reason = f"the shard ends {needed - self._end} bytes before the member {name!r} does"
        return self._stop("truncated-member", offset, reason)

    def _stop(self, code: str, offset: int, reason: str) -> int:
        self.damage = Damage(offset, reason, code)
        return _OVER


class _HeaderFile(ReaderFile):
    """File for tarfile: refuses huge extended headers, raises EOFError instead of short reads."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_EXTENDED_HEADER:
            raise tarfile.HeaderError(f"an extended header of {size} bytes")
        block = super().read(size)
        if len(block) < size:
            raise EOFError
        return block


def _sparse_member(info: tarfile.TarInfo) -> SparseMember | None:
    """The pieces of a sparse member; None for a plain one."""
    stored: Any = info.sparse  # a list of pairs; typeshed says bytes
    if stored is None:
        return None
    pieces = tuple((start, length) for start, length in stored if length)
    if any(start < 0 or length < 0 or start + length > info.size for start, length in pieces):
        raise ValueError("pieces of a sparse file lie outside it")
    return SparseMember(min(info.size, _LARGEST_INT64), pieces)


def _not_a_header(offset: int, block: bytes) -> tuple[str, int, str]:
    """Code, offset and reason of the damage if a block stands in place of a header."""
    if _has_magic(block):
        return "bad-checksum", offset, f"the checksum of the header at byte {offset} is wrong"
    return "not-a-tar", offset, f"no header at byte {offset}, but {_describe(block)}"


def _has_magic(block: bytes) -> bool:
    return block[257:262] == b"ustar"


def _is_header(block: bytes) -> bool:
    return len(block) == BLOCK and checksum_holds(block)


def _describe(block: bytes) -> str:
    """Quote the first bytes of a block and name their file type."""
    if _has_magic(block):
        return "a tar header"
    what = describe_bytes(block)
    return repr(block[:16]) if what == "unknown data" else f"{block[:16]!r} ({what})"


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


def plain_name(header: bytes) -> str:
    """The name in a header; a PAX or GNU header before it may give another one."""
    end = header.find(0, 0, 100)
    name = header[:end] if end >= 0 else header[:100]
    if header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return str(name, "utf-8", "backslashreplace")


def _as_text(name: str) -> str:
    """A name of tarfile as valid UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _names_folder(header: bytes) -> bool:
    """True for a folder in the Unix V7 format, which has no type for folders."""
    return header[:100].partition(b"\0")[0].endswith(b"/")


def _first_non_zero(content: ByteReader, offset: int) -> int | None:
    for start in range(offset, len(content), 1 << 16):
        chunk = bytes(content[start : start + (1 << 16)])
        if stripped := chunk.lstrip(b"\0"):
            return start + len(chunk) - len(stripped)
    return None
