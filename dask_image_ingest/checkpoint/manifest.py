"""Manifest of a checkpoint: the query, written first, and the finished partitions.

A folder belongs to one query. Results of another one may have taken days: they are never removed,
nor mixed with new ones, unless the user says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

from dask_image_ingest.checkpoint.query import FingerprintedQuery
from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output import OutputStore

#: The fingerprint of the query; and, once all are finished, rows and bytes of each partition.
QUERY_FILE, PARTITIONS_FILE = "_checkpoint.json", "_parts.json"

_FORMAT = 1


class PartitionFile(TypedDict):
    """Rows and bytes of a partition's file."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint folder."""

    output: OutputStore
    query: Mapping[str, Any] | None  # fingerprint of the query that owns the folder
    parts: Mapping[str, PartitionFile]  # by file name, as a finished run has recorded them

    def is_of(self, query: FingerprintedQuery) -> bool:
        """True if the folder belongs to this query."""
        return self.query is not None and self.query["work"] == query.digest

    def refuse_other(self, query: FingerprintedQuery) -> None:
        """Raise if the folder belongs to another query; say how they differ."""
        if self.query is not None and not self.is_of(query):
            raise ExportError(
                f"{self.output.url} has the results of other work: "
                f"{_difference(self.query, query)}. overwrite=True removes them; "
                "or choose another folder"
            )

    def begin(self, query: FingerprintedQuery) -> None:
        """Record the query of a new folder."""
        fingerprint = {
            "format": _FORMAT,
            "work": query.digest,
            "version": query.version,
            "steps": [[step.name, step.digest] for step in query.steps],
        }
        if not self.output.create(QUERY_FILE, json.dumps(fingerprint, indent=1).encode()):
            raise ExportError(f"another checkpoint began in {self.output.url} just now")

    def finish(self, parts: Mapping[str, PartitionFile]) -> None:
        """Record the finished partitions."""
        self.output.put(
            PARTITIONS_FILE, json.dumps({"format": _FORMAT, "parts": parts}, indent=0).encode()
        )
        self.output.fsync()


def read_manifest(output: OutputStore) -> Manifest:
    """Read the manifest of a folder.

    Raises
    ------
    ExportError
        If it has another format, such as that of a later release.
    """
    query = _parse(output, QUERY_FILE)
    if query is not None and not _is_query(query):
        raise ExportError(
            f"{output.locate(QUERY_FILE)} is damaged, or not from this release: choose another "
            "folder, or move the file away, to compute the checkpoint again"
        )
    parts = (_parse(output, PARTITIONS_FILE) or {}).get("parts")
    if parts is not None and not _are_parts(parts):
        parts = None
    return Manifest(output, query, parts or {})


def _parse(output: OutputStore, name: str) -> dict[str, Any] | None:
    """Parse a JSON file; empty if it is damaged, None if it does not exist."""
    content = output.read(name)
    if content is None:
        return None
    with suppress(ValueError):
        parsed = json.loads(content)
        if isinstance(parsed, dict):
            return parsed
    return {}


def _is_query(content: Mapping[str, Any]) -> bool:
    steps = content.get("steps")
    return (
        content.get("format") == _FORMAT
        and isinstance(content.get("work"), str)
        and "version" in content
        and isinstance(steps, list)
        and all(isinstance(step, list) and len(step) == 2 for step in steps)
    )


def _are_parts(content: Any) -> bool:
    """True if the list of partitions is valid; without one, the files themselves are inspected."""
    return isinstance(content, dict) and all(
        isinstance(part, dict)
        and isinstance(part.get("rows"), int)
        and isinstance(part.get("bytes"), int)
        for part in content.values()
    )


def _difference(old: Mapping[str, Any], new: FingerprintedQuery) -> str:
    if old["version"] != new.version:
        return f"version= was {old['version']!r} and is {new.version!r} now"
    old_steps = [tuple(step) for step in old["steps"]]
    new_steps = [(step.name, step.digest) for step in new.steps]
    old_names, new_names = ([name for name, _ in steps] for steps in (old_steps, new_steps))
    if old_names != new_names:
        return f"its steps were {', '.join(old_names)} and are {', '.join(new_names)} now"
    # Name the first one: digests of later steps depend on it.
    return (
        f"{next(name for name, digest in new_steps if (name, digest) not in old_steps)} has changed"
    )
