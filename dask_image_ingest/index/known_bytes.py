"""A shard's bytes, some of which its index has."""

from __future__ import annotations

from functools import cached_property

from dask_image_ingest.index.stored import StoredIndex, UnusableIndexError
from dask_image_ingest.storage import ByteReader

__all__ = ["KnownBytes"]


class KnownBytes(ByteReader):
    """Reader that takes small members from the index of a shard, and the rest from the shard."""

    def __init__(self, index: StoredIndex, content: ByteReader) -> None:
        self._index = index
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        known = self._known.get(part.start)
        if known is not None and len(known) == part.stop - part.start:
            return known
        return self._content[part]

    @cached_property
    def _known(self) -> dict[int, bytes]:
        """Offset → the member that begins there; nothing where that can't be read."""
        try:
            return self._contents()
        except UnusableIndexError:
            return {}

    def _contents(self) -> dict[int, bytes]:
        index = self._index
        return {
            offset: content
            for extension in index.extensions
            for offset, content in zip(
                index.column(extension, "offset").to_pylist(),
                index.column(extension, "content").to_pylist(),
                strict=True,
            )
            if content is not None and offset not in index.tar.sparse
        }
