"""Warnings that reach the user from any process, and the warnings about shards."""

from __future__ import annotations

import logging
import warnings

from dask_image_ingest.errors import this_worker
from dask_image_ingest.index import IndexFile
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.tar import Damage

logger = logging.getLogger("dask_image_ingest")

# Extensions of late members warned about already: once per process, not once per shard.
_warned_extensions: set[str] = set()


def warn_user(message: str) -> None:
    """Warn in this process; on a cluster's worker also in the client."""
    message = without_passwords(message)
    try:
        from distributed.worker import get_worker, warn

        get_worker()
    except (ImportError, ValueError):
        warnings.warn(message, stacklevel=3)
    else:
        warn(message)


def warn_of_skipped(error: Exception) -> None:
    """Warn of a shard that is skipped."""
    logger.warning("skipped: %s", error)
    warn_user(f"skipped: {error}")


def warn_of_unusable(error: Exception, index: IndexFile) -> None:
    """Warn of an index that is not used; names the worker, since others may be able to use it."""
    warn_user(
        f"the index {index.url} is not used: {error}. {index.shard.url} is read without it"
        f"{this_worker()}"
    )


def warn_of_damage(url: str, damage: Damage | None, samples: int) -> None:
    """Warn if the end of a shard is lost."""
    if damage is not None:
        warn_user(
            f"{url} is damaged at byte {damage.offset}: {damage.reason}. "
            f"The {samples} samples before it are read, what follows is lost"
        )


def warn_of_late_members(url: str, late: set[str]) -> None:
    """Warn of extensions of members that the first shard does not have."""
    new = sorted(late - _warned_extensions - {""})
    if new:
        _warned_extensions.update(new)
        few = ", ".join(map(repr, new[:3]))
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        warn_user(
            f"{url} has members with extensions that the first shard lacks: {few}{more}. They "
            f"are left out; to have them as a column, pass components={{..., {new[0]!r}: "
            "'string'} (or 'binary', 'int64' ...)"
        )
