"""Where an image comes from."""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """What an image's random numbers, and the errors about it, know it by.

    Attributes
    ----------
    shard : str
        URL of its shard.
    number : int
        Of its sample in the shard; after a late decode the place of its bytes there.
    name : str
        What errors call it.
    """

    shard: str
    number: int
    name: str


def unknown(row: int) -> Origin:
    """The origin of an image of which no more is known."""
    return Origin("", row, f"image {row}")
