"""Warnings that reach the user from whatever process a task runs in, and those about shards."""

from __future__ import annotations

import logging
import warnings

from dask_image_ingest.errors import this_worker
from dask_image_ingest.index import IndexFile
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.tar import Damage

logger = logging.getLogger("dask_image_ingest")

# Members that came late and were warned about: once in a process, not once for each shard.
_warned_extensions: set[str] = set()


def warn_user(message: str) -> None:
    """Warn here, and on a worker of a cluster also in the client that waits for it."""
    message = without_passwords(message)
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


def warn_of_unusable(error: Exception, index: IndexFile) -> None:
    """Say which index is not used, why, and where: a worker may lack what others have."""
    warn_user(
        f"the index {index.url} is not used: {error}. {index.shard.url} is read without it"
        f"{this_worker()}"
    )


def warn_of_damage(url: str, damage: Damage | None, samples: int) -> None:
    """Say what of a shard is lost, if anything is."""
    if damage is not None:
        warn_user(
            f"{url} is damaged at byte {damage.offset}: {damage.reason}. "
            f"The {samples} samples before it are read, what follows is lost"
        )


def warn_of_late_members(url: str, late: set[str]) -> None:
    """Say which kinds of members a shard has that the first shard has not."""
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
