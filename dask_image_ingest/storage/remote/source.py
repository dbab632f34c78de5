"""What stands between a remote shard and the rest: its size and version, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Fault", "Head", "Source"]


class Fault(Exception):
    """A request has failed, and may succeed when it is made again.

    Attributes
    ----------
    wait
        Seconds that the server asks to wait.
    unreached
        Whether there was no connection to a server.
    stalled
        Whether the patience with a server ended it.
    """

    def __init__(
        self, message: str, wait: float = 0.0, unreached: bool = False, stalled: bool = False
    ) -> None:
        super().__init__(message)
        self.wait = wait
        self.unreached = unreached
        self.stalled = stalled


@dataclass(frozen=True, slots=True)
class Head:
    """How a shard begins.

    Attributes
    ----------
    data
        Its first bytes; all of them where its server knows no ranges.
    size
        In bytes.
    """

    data: bytes
    size: int


class Source(Protocol):
    """A remote shard as it is when its head is read; any number of threads read its ranges.

    ``head`` and ``stream`` make one request each. They raise `Fault` where it may be made again,
    ``ShardNotFoundError`` where there is no such shard, and ``ShardError`` where nothing helps, or
    where the shard is not the one any more whose head was read.
    """

    url: str

    def head(self, nbytes: int, patience: float | None = None) -> Head:
        """Read the first bytes, and keep in mind which version this is."""
        ...

    def stream(self, start: int, stop: int, patience: float | None = None) -> Iterator[bytes]:
        """Read a range, piece by piece; an empty one first says that the answer has begun.

        To wait for the next byte longer than ``patience`` seconds is a fault, where that is known.
        """
        ...

    @property
    def version(self) -> str:
        """Which version this is, as a listing would tell it; empty where nothing does."""
        ...

    @property
    def modified(self) -> float | None:
        """When it was changed, in seconds; None where nobody tells."""
        ...

    def is_version(self, version: str) -> bool:
        """Whether this is the version that a listing has told, as far as that can be said."""
        ...

    def refuse_changes(self) -> None:
        """Say so where what was read may be of two versions."""
        ...
