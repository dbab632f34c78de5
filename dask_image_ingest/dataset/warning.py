"""Warnings that reach the user from whatever process a task runs in, and those about shards."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from dask_image_ingest.dataset.schema import image_member
from dask_image_ingest.tar import TarIndex

__all__ = ["logger", "warn_of_damage", "warn_of_late_members", "warn_of_skipped", "warn_user"]

logger = logging.getLogger("dask_image_ingest")

# Members that came late and were warned about: once in a process, not once for each shard.
_warned_extensions: set[str] = set()


def warn_user(message: str) -> None:
    """Warn here, and on a worker of a cluster also in the client that waits for it."""
    try:
        from distributed.worker import get_worker, warn

        get_worker()
    except (ImportError, ValueError):
        warnings.warn(message, stacklevel=3)
    else:
        warn(message)


def warn_of_skipped(error: Exception) -> None:
    """Say which shard is left out, and why."""
    logger.warning("skipped: %s", error)
    warn_user(f"skipped: {error}")


def warn_of_damage(url: str, index: TarIndex) -> None:
    """Say what of a shard is lost, if anything is."""
    if index.damage is not None:
        warn_user(
            f"{url} is damaged at byte {index.damage.offset}: {index.damage.reason}. "
            f"The {len(index.samples)} samples before it are read, what follows is lost"
        )


def warn_of_late_members(
    url: str, index: TarIndex, known: frozenset[str], image_extensions: Sequence[str]
) -> None:
    """Say which kinds of members a shard has that are not ``known`` from the first shard."""
    late: set[str] = set()
    for sample in index.samples:
        unknown = sample.members.keys() - known
        if unknown:
            late.update(unknown - {image_member(sample, image_extensions)})
    unheard = sorted(late - _warned_extensions - {""})
    if unheard:
        _warned_extensions.update(unheard)
        few = ", ".join(map(repr, unheard[:3]))
        more = f" and {len(unheard) - 3} more" if len(unheard) > 3 else ""
        warn_user(
            f"{url} has members of a kind that the first shard has not: {few}{more}. They "
            f"are left out; to have them as a column, pass components={{..., {unheard[0]!r}: "
            "'string'} (or 'binary', 'int64' ...)"
        )
