"""Writers that die between any two changes of the disk, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What a writer calls to change what is on a disk.
CHANGES = ("replace", "link", "unlink", "rmdir", "mkdir", "fsync", "truncate", "pwritev")


class Dead(BaseException):
    """Nothing catches it, and nothing is cleaned up: once dead, a writer changes nothing."""


@contextmanager
def dying_at(moment: int, error: OSError | None = None) -> Iterator[list[str]]:
    """Die right before the change of this number; yields the names of the changes until then.

    With an ``error``, the disk dies instead: this change and all that follow raise it.
    """
    made: list[str] = []

    def until_death(name: str, change: Callable) -> Callable:
        def call(*args, **kwargs):
            if len(made) + 1 >= moment > 0:
                raise error or Dead
            made.append(name)
            return change(*args, **kwargs)

        return call

    originals = {name: getattr(os, name) for name in CHANGES}
    for name, change in originals.items():
        setattr(os, name, until_death(name, change))
    try:
        yield made
    finally:
        for name, change in originals.items():
            setattr(os, name, change)


def moments(write: Callable[[], object]) -> range:
    """The numbers of the changes that a writer makes, as one that lives has made them."""
    with dying_at(0) as made:
        write()
    return range(1, len(made) + 1)


def dies(moment: int, write: Callable[[], object]) -> bool:
    """Let a writer die at a moment; whether it did."""
    with dying_at(moment):
        try:
            write()
        except Dead:
            return True
    return False
