"""Warnings about shards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from dask_image_ingest.errors import this_worker, warn_user
from dask_image_ingest.index import IndexFile
from dask_image_ingest.tar import LINKS, Damage, Skipped

logger = logging.getLogger("dask_image_ingest")

# Extensions without a column that were warned about already: once per process, not once per shard.
_warned_extensions: set[str] = set()

# Folders of shards with links warned about already.
_warned_links: set[str] = set()


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


def warn_of_links(url: str, skipped: Mapping[str, Skipped]) -> None:
    """Warn of links that are not followed; once for the shards of a folder."""
    links = [skipped[code] for code in LINKS if code in skipped]
    folder = url.rpartition("/")[0]
    if links and folder not in _warned_links:
        _warned_links.add(folder)
        warn_user(
            f"{url}: links are not followed, {sum(each.number for each in links)} here, first "
            f"{links[0].first!r}: symbolic links, or hard links to no file before them in the "
            "shard. These members are missing; pack the files themselves (tar --dereference)"
        )


def first_dot_hint(extensions: Iterable[str], least_dots: int = 1) -> str:
    """A sentence on keys for extensions with dots, a part of which may be meant for the key."""
    for extension in extensions:
        if extension.count(".") >= least_dots:
            return (
                f". A key ends at the first dot of the file name: 'name.{extension}' is the member "
                f"{extension!r} of 'name'"
            )
    return ""


def warn_of_late_members(url: str, late: set[str]) -> None:
    """Warn of extensions of members that have no column."""
    new = sorted(late - _warned_extensions - {""})
    if new:
        _warned_extensions.update(new)
        few = ", ".join(map(repr, new[:3]))
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        warn_user(
            f"{url} has members with extensions that have no column: {few}{more}"
            f"{first_dot_hint(new)}. They are left out; to have them as a column, pass "
            f"members={{..., {new[0]!r}: 'string'}} (or 'binary', 'int64' ...)"
        )
