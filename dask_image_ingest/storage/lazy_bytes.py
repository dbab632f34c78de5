"""Bytes that are read when they are sliced."""

from __future__ import annotations

from typing import Protocol

__all__ = ["LazyBytes"]


class LazyBytes(Protocol):
    """``bytes``, ``memoryview``, or a reader of a file or of remote ranges."""

    def __len__(self) -> int:
        """Size of the whole, in bytes."""
        ...

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        """Read a part; as with ``bytes``, what lies past the end is left out."""
        ...
