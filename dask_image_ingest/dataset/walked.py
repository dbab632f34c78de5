"""The index that a read walked for, kept for a later step of the same task.

A read makes columns of a shard's index and lets go of it. Whoever writes shards needs the rest too:
where every member of each sample is. Where that step follows in the same task, and so in the same
thread, it takes the index from here, and the shard is not walked again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dask_image_ingest.storage import Shard
from dask_image_ingest.tar import TarIndex

__all__ = ["Walked", "keep_walked", "take_walked"]


@dataclass(frozen=True, slots=True)
class Walked:
    """A shard as it was just before its walk began, and what that found."""

    shard: Shard
    index: TarIndex


_latest = threading.local()


def keep_walked(walked: Walked | None) -> None:
    """Keep what was found, and nothing of what was found before."""
    _latest.walked = walked


def take_walked() -> Walked | None:
    """What was kept last in this thread, once."""
    walked: Walked | None = getattr(_latest, "walked", None)
    _latest.walked = None
    return walked
