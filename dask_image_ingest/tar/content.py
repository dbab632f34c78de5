"""Contents of members: read whole or where sliced, with the holes of sparse ones filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import LazyBytes, MemoryReader
from dask_image_ingest.tar.shard_index import ShardIndex, Span

#: Those taken for the image, in order of preference.
IMAGE_EXTENSIONS = (
    "jpg;jpeg;png;webp;jfif;gif;bmp;tif;tiff;avif;heic;heif;jp2;j2k;ppm;pgm;pbm;pnm;ico;img"
)

#: Those that webdataset itself decodes to text and to integers (autodecode.py, 1.0.2).
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn", "caption"})
INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})


#: More bytes cannot be one value of an Arrow binary column.
LARGEST_VALUE = 2**31 - 1

#: Larger members are not read for a column unless more is asked for: a hole of any size takes a few
#: bytes of a tar, and what compresses well takes a thousandth of its size.
MAX_MEMBER_BYTES = 256 << 20

#: The bytes of a member that are read when it is opened: most headers of images fit.
HEAD = 4096


def read_member(content: LazyBytes, index: ShardIndex, span: Span) -> Any:
    """Read one member: a slice of ``content``, or new bytes with the holes filled if it is sparse.

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
    expanded = bytearray(size)
    for start, length in sparse.pieces:
        expanded[start : start + length] = content[offset : offset + length]
        offset += length
    return bytes(expanded)


def open_member(content: LazyBytes, index: ShardIndex, span: Span) -> Any:
    """One member as something that is read where it is sliced, and no further.

    Raises
    ------
    ShardError
        As `read_member`, now or when it is sliced.
    """
    if isinstance(content, (bytes, memoryview, MemoryReader)) or span[0] in index.sparse:
        return read_member(content, index, span)
    return _OpenMember(content, span)


class _OpenMember:
    """A member of a shard, whose first bytes are at hand."""

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
    """Error of a sparse member that claims more than 2 GiB; None for others."""
    if span[0] not in index.sparse or span[1] <= LARGEST_VALUE:
        return None
    return f"too-large: the sparse member claims to expand to {span[1]:,} bytes, more than 2 GiB"


def duplicate_error(extensions: Iterable[str]) -> str:
    """Error of a sample that has these members more than once."""
    what = ", ".join(sorted(extensions))
    return f"duplicate-member: the sample has more than one {what}; which is meant?"
