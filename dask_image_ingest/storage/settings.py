"""Settings of remote reads, from Dask's configuration: ``image-ingest.remote``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import dask
from dask.utils import parse_bytes, parse_timedelta

from dask_image_ingest.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Settings:
    """Bytes and seconds; the guide has the table.

    Attributes
    ----------
    connections
        Requests that a process has under way at once.
    request_size
        Bytes that one request asks for at most.
    read_ahead
        Bytes of an open shard that are on their way, or have come and are not used yet.
    cache
        Bytes of an open shard that are kept after they were used.
    gap
        Ranges that lie no further apart are one request.
    skip
        A header scan that skips more bytes than this at a time fetches headers only.
    head
        Bytes that opening a shard asks for.
    connect_timeout, read_timeout
        How long to wait for a connection, and for the next byte.
    retry_limit
        How long the requests for one range are tried again after the first of them has failed.
    """

    connections: int = 16
    request_size: int = 4 << 20
    read_ahead: int = 64 << 20
    cache: int = 128 << 20
    gap: int = 128 << 10
    skip: int = 4 << 20
    head: int = 64 << 10
    connect_timeout: float = 10.0
    read_timeout: float = 20.0
    retry_limit: float = 120.0


def settings() -> Settings:
    """The settings as configured now.

    Raises
    ------
    ArgumentError
        If a value is no number of the kind.
    """
    found = {}
    for field in fields(Settings):
        name = "image-ingest.remote." + field.name.replace("_", "-")
        value = dask.config.get(name, None)
        if value is not None and not (field.name == "skip" and value == "auto"):
            found[field.name] = _parse(name, value, field.name)
    return Settings(**found)


def _parse(name: str, value: Any, field: str) -> Any:
    seconds = field.endswith(("timeout", "limit"))
    try:
        parsed = parse_timedelta(value) if seconds else parse_bytes(value)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        kind = "seconds, such as 20 or '20s'" if seconds else "a number, such as 16 or '4 MiB'"
        raise ArgumentError(f"{name}={value!r} in Dask's configuration: give {kind}") from error
    least = 0 if field in ("gap", "skip", "retry_limit", "read_ahead", "cache") else 1e-3
    if parsed < least or (not seconds and field not in ("gap", "skip") and parsed < 0):
        raise ArgumentError(f"{name}={value!r} in Dask's configuration is too small")
    return parsed
