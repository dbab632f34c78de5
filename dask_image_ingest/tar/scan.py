"""Header scan of a tar.

Plain headers take a fast path. All others (PAX names, GNU long names, sparse files, sizes in base
256) are left to :mod:`tarfile`, so that names are the same as everywhere in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import ByteReader
from dask_image_ingest.tar.headers import (
    BLOCK,
    UNREADABLE,
    SparseMember,
    TarfileReader,
    checksum_holds,
    describe,
    first_bad_checksum,
    not_a_header,
    refuse_no_tar,
    sparse_member,
)

# Name, offset and size. Plain tuples: there are millions.
Member = tuple[str, int, int]

# Headers whose checksums are verified together.
_BATCH = 1024

_REGULAR, _REGULAR_V7, _PAX = b"0\0x"
_WITHOUT_DATA = frozenset(b"123456")

# PAX records that change neither name nor size; webdataset's own writer puts an mtime before every
# member. No value may hold an "=", so none can hide another record behind a wrong length.
_HARMLESS_PAX = re.compile(rb"(?:\d+ (?:[amc]time|[ug]id)=[-.\d]*\n)+\0*")

_LARGEST_INT64 = 2**63 - 1

# In place of the offset of the next header: the scan is over.
_OVER = -1


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a shard: offset, explanation and code.

    ``code`` is ``truncated-header``, ``truncated-member``, ``truncated-padding``,
    ``truncated-stream``, ``bad-checksum``, ``bad-header``, ``not-a-tar`` or ``trailing-data``.
    """

    offset: int
    reason: str
    code: str


class TarScan:
    """Scan of a tar: iterates over batches of members; attributes are final after that.

    Attributes
    ----------
    damage
        None if the tar is complete.
    sparse
        Offset → sparse member.
    pax
        Number of members with a PAX header.
    """

    def __init__(self, content: ByteReader, url: str) -> None:
        refuse_no_tar(bytes(content[:BLOCK]), url)
        self.damage: Damage | None = None
        self.sparse: dict[int, SparseMember] = {}
        self.pax = 0
        self._content = content
        self._end = len(content)
        self._tarfile = TarfileReader(content)
        #: Where the last harmless PAX header ends, which a member must follow; -1 before.
        self._after_pax = -1

    def __iter__(self) -> Iterator[list[Member]]:
        offset = 0
        while offset != _OVER:
            members: list[Member] = []
            unverified: list[tuple[int, bytes]] = []
            offset = self._take_batch(offset, members, unverified)
            invalid = first_bad_checksum(unverified)
            if invalid is not None:
                offset = self._stop(*not_a_header(*invalid))
                members = [member for member in members if member[1] <= invalid[0]]
                self.sparse = {data: m for data, m in self.sparse.items() if data <= invalid[0]}
            yield members

    def _take_batch(
        self, offset: int, members: list[Member], unverified: list[tuple[int, bytes]]
    ) -> int:
        """Append the members of the next headers; the offset of the first header not read."""
        content, end, reader = self._content, self._end, self._tarfile
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

            if size < 0 or not header[0] or reader.has_global_names:
                following = self._take_odd_header(offset, header, members)
            elif kind == _REGULAR or (kind == _REGULAR_V7 and not _names_folder(header)):
                unverified.append((offset, header))
                if data + size > end:
                    return self._end_in_member(offset, plain_name(header), data + size)
                members.append((plain_name(header), data, size))
            elif kind in _WITHOUT_DATA:
                unverified.append((offset, header))
                following = data
            elif kind == _PAX and size <= 4096 and _HARMLESS_PAX.fullmatch(content[data:following]):
                unverified.append((offset, header))
                self.pax += 1
                self._after_pax = following
            else:
                following = self._take_odd_header(offset, header, members)

            if following == _OVER:
                return _OVER
            offset = following
        return offset

    def _take_odd_header(self, offset: int, header: bytes, members: list[Member]) -> int:
        if header.count(0) == BLOCK:
            return self._end_of_archive(offset)
        if not checksum_holds(header):
            return self._stop(*not_a_header(offset, header))
        try:
            info, following = self._tarfile.read_header(offset)
            sparse = sparse_member(info)
        except EOFError:
            reason = f"the shard ends inside the extended header at byte {offset}"
            return self._stop("truncated-header", offset, reason)
        except ShardError:
            raise  # the content could not be read, which says nothing about the header
        except UNREADABLE as error:
            reason = f"the header at byte {offset} makes no sense ({error})"
            return self._stop("bad-header", offset, reason)

        self.pax += header[156] == _PAX
        name = info.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        data = info.offset_data
        stored = info.size if sparse is None else sum(length for _, length in sparse.pieces)
        if following > data and data + stored > self._end:
            return self._end_in_member(offset, name, data + stored)
        if info.isreg():
            members.append((name, data, min(info.size, _LARGEST_INT64)))
            if sparse is not None:
                self.sparse[data] = sparse
        return following

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
        what = describe(bytes(self._content[trailing : trailing + BLOCK]))
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


def plain_name(header: bytes) -> str:
    """The name in a header; a PAX or GNU header before it may give another one."""
    end = header.find(0, 0, 100)
    name = header[:end] if end >= 0 else header[:100]
    if header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return str(name, "utf-8", "backslashreplace")


def _names_folder(header: bytes) -> bool:
    """True for a folder in the Unix V7 format, which has no type for folders."""
    return header[:100].partition(b"\0")[0].endswith(b"/")


def _first_non_zero(content: ByteReader, offset: int) -> int | None:
    for start in range(offset, len(content), 1 << 16):
        chunk = bytes(content[start : start + (1 << 16)])
        if stripped := chunk.lstrip(b"\0"):
            return start + len(chunk) - len(stripped)
    return None
