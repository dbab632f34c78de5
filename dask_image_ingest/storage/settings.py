"""Settings of remote reads, from Dask's configuration: ``image-ingest.remote``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import dask
from dask.utils import parse_bytes, parse_timedelta

from dask_image_ingest.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of remote reads, in bytes and seconds.

    Attributes
    ----------
    connections
        Concurrent requests of a process.
    request_size
        Most bytes of one request.
    read_ahead
        Most bytes of an open shard that are requested or fetched but not used yet.
    cache
        Bytes of an open shard to keep after they were used.
    gap
        Ranges that lie no further apart are fetched by one request.
    skip
        A header scan that skips more bytes than this at a time fetches headers only.
    head
        Bytes that are fetched when a shard is opened.
    connect_timeout, read_timeout
        Longest wait for a connection, and for the next byte.
    retry_limit
        How long a range is retried after its first failure.
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


def configured_settings() -> Settings:
    """The current settings in Dask's configuration.

    Raises
    ------
    ArgumentError
        If a value cannot be parsed, or is too small.
    """
    configured = {}
    for field in fields(Settings):
        name = "image-ingest.remote." + field.name.replace("_", "-")
        value = dask.config.get(name, None)
        if value is not None and not (field.name == "skip" and value == "auto"):
            configured[field.name] = _parse(name, value, field.name)
    return Settings(**configured)


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
