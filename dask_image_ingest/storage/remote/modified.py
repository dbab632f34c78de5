"""When a file was changed, whatever a file system calls that and however it writes it."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

__all__ = ["modified_of", "seconds"]

_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "Last-Modified")


def modified_of(info: dict[str, Any]) -> float | None:
    """When a file was changed, in seconds, of what fsspec tells about it; None if it tells none."""
    return next((found for name in _TIMES if (found := seconds(info.get(name)))), None)


def seconds(time: Any) -> float | None:
    """A time as a number, None if it is none that is known."""
    if isinstance(time, datetime):
        return time.timestamp()
    if isinstance(time, (int, float)):
        return float(time)
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return read(time).timestamp()
        except (TypeError, ValueError):
            continue
    return None
