"""Contents of members: read as a whole or on slicing; sparse ones are expanded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import LazyBytes, MemoryReader
from dask_image_ingest.tar.shard_index import ShardIndex, Span

#: Extensions of images, in order of preference.
IMAGE_EXTENSIONS = (
    "jpg;jpeg;png;webp;jfif;gif;bmp;tif;tiff;avif;heic;heif;jp2;j2k;ppm;pgm;pbm;pnm;ico;img"
)

#: Extensions that webdataset decodes to text and to integers (autodecode.py, 1.0.2).
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn", "caption"})
INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})


#: Most bytes of one value of an Arrow binary column.
LARGEST_VALUE = 2**31 - 1

#: Default limit for members that are read into a column: a small tar may claim huge ones, by holes
#: or by compression.
MAX_MEMBER_BYTES = 256 << 20

#: Bytes of a member that are read when it is opened: most image headers fit.
HEAD = 4096


def read_member(content: LazyBytes, index: ShardIndex, span: Span) -> Any:
    """Read one member: a slice of ``content``, or new bytes if it is sparse.

    Raises
    ------
    ShardError
        If the content ends too early, or a sparse member claims to be larger than 2 GiB.
    """
    offset, size = span
    sparse = index.sparse.get(offset)
    if sparse is None:
        data = content[offset : offset + size]
        if len(data) != size:
            raise ShardError(
                f"a member of {size} bytes was found at byte {offset}, and only {len(data)} bytes "
                "are there now: did the shard change while it was read?"
            )
        return data
    if size > LARGEST_VALUE:
        raise ShardError(
            f"the sparse member at byte {offset} claims to expand to {size} bytes, more than 2 GiB"
        )
    return _OpenSparse(content, offset, size, sparse.pieces)[:]


def open_member(content: LazyBytes, index: ShardIndex, span: Span) -> Any:
    """One member, sliced like ``bytes``; only its head is read now, the rest on slicing.

    Raises
    ------
    ShardError
        As `read_member`, now or when it is sliced.
    """
    offset, size = span
    if offset in index.sparse and size <= LARGEST_VALUE:
        return _OpenSparse(content, offset, size, index.sparse[offset].pieces)
    if isinstance(content, (bytes, memoryview, MemoryReader)) or offset in index.sparse:
        return read_member(content, index, span)
    return _OpenMember(content, span)


class _OpenSparse:
    """A sparse member: only what is sliced is read, and expanded into new memory.

    ``pieces`` are the starts and lengths of its data, which lie one after another in the shard.
    """

    def __init__(
        self, content: LazyBytes, offset: int, size: int, pieces: Iterable[tuple[int, int]]
    ) -> None:
        self._content = content
        self._offset, self._size, self._pieces = offset, size, pieces

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> memoryview:
        start, stop, _ = part.indices(self._size)
        expanded = bytearray(max(0, stop - start))
        offset = self._offset
        for begin, length in self._pieces:
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:
                data = self._content[offset + first - begin : offset + last - begin]
                expanded[first - start : last - start] = data
            offset += length
        return memoryview(expanded).toreadonly()


class _OpenMember:
    """A member whose first `HEAD` bytes are in memory."""

    def __init__(self, content: LazyBytes, span: Span) -> None:
        self._content = content
        self._offset, self._size = span
        self._head = content[self._offset : self._offset + min(self._size, HEAD)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> Any:
        start, stop, _ = part.indices(self._size)
        if stop <= len(self._head):
            return self._head[start:stop]
        return self._content[self._offset + start : self._offset + stop]


def too_large_error(index: ShardIndex, span: Span) -> str | None:
    """Error of a sparse image that expands to more than `MAX_MEMBER_BYTES`; None for others."""
    if span[0] not in index.sparse or span[1] <= MAX_MEMBER_BYTES:
        return None
    return f"too-large: the sparse member claims to expand to {span[1]:,} bytes, more than 256 MiB"


def duplicate_error(extensions: Iterable[str]) -> str:
    """Error of a sample that has several members of these extensions."""
    what = ", ".join(sorted(extensions))
    return f"duplicate-member: the sample has more than one {what}; which is meant?"
