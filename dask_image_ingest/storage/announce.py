"""What is about to be read of a shard, so that it can be fetched at once."""

from __future__ import annotations

from collections.abc import Iterable

from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.local import LocalBytes, Memory
from dask_image_ingest.storage.remote import RemoteBytes

__all__ = ["announce", "announce_walk", "beginning", "is_fetched", "read_ahead"]


def is_fetched(content: LazyBytes) -> bool:
    """Whether reading costs requests."""
    return isinstance(content, RemoteBytes)


def announce(content: LazyBytes, ranges: Iterable[tuple[int, int]]) -> None:
    """Say which ranges, start and stop, will be read from here on, about in order.

    They are fetched by many requests at once, ahead of their use, and nothing else is. Nothing
    happens where bytes are at hand anyway.
    """
    told = getattr(content, "announce", None)
    if told is not None:
        told(ranges)


def announce_walk(content: LazyBytes) -> None:
    """Say that a tar's headers will be read from here on, and after that what they tell of.

    What lies between them is fetched as well, where that is faster than to leave it out.
    """
    if isinstance(content, RemoteBytes):
        content.walk()


def read_ahead(content: LazyBytes, start: int, stop: int, memory: Memory) -> None:
    """Have all of a range of a local shard read in large pieces, by other threads, from now on.

    Nothing happens where ``memory`` gives none, or bytes are fetched or at hand anyway.
    """
    told = getattr(content, "read_ahead", None)
    if told is not None and stop > start:
        told(start, stop, memory)


def beginning(content: LazyBytes) -> bytes | memoryview:
    """As much of a shard, from its first byte on, as can be sliced with no further ado by now."""
    if isinstance(content, LocalBytes):
        return content.ready()
    return content if isinstance(content, (bytes, memoryview)) else b""
