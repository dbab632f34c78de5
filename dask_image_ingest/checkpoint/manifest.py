"""Manifest of a checkpoint: the query, written first, and the finished partitions.

A folder belongs to one work. Results of other functions, or of other options, may have taken days:
they are never removed, nor mixed with new ones, unless a user says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

from dask_image_ingest.checkpoint.fingerprint import FingerprintedQuery
from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage import OutputStore

#: What is done to each partition; and how many rows and bytes each has, when all are there.
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
    query: Mapping[str, Any] | None
    parts: Mapping[str, PartitionFile]

    def is_of(self, query: FingerprintedQuery) -> bool:
        """True if the folder belongs to this query."""
        return self.query is not None and self.query["work"] == query.digest

    def refuse_other(self, query: FingerprintedQuery) -> None:
        """Refuse another query than that of the folder, and say how it differs."""
        if self.query is not None and not self.is_of(query):
            raise ExportError(
                f"{self.output.url} has the results of other work: "
                f"{_difference(self.query, query)}. overwrite=True removes them; "
                "or choose another folder"
            )

    def begin(self, query: FingerprintedQuery) -> None:
        """Record the query of a new folder."""
        described = {
            "format": _FORMAT,
            "work": query.digest,
            "version": query.version,
            "steps": [[step.name, step.digest] for step in query.steps],
        }
        if not self.output.create(QUERY_FILE, json.dumps(described, indent=1).encode()):
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
        If that is of a later release, or of nobody.
    """
    query = _parsed(output, QUERY_FILE)
    if query is not None and not _is_query(query):
        raise ExportError(
            f"{output.locate(QUERY_FILE)} is not what this release writes there, or is damaged: "
            "choose another folder, or move it away; what is beside it is then taken for nobody's, "
            "and is computed again"
        )
    parts = (_parsed(output, PARTITIONS_FILE) or {}).get("parts")
    if parts is not None and not _are_parts(parts):
        parts = None
    return Manifest(output, query, parts or {})


def _parsed(output: OutputStore, name: str) -> dict[str, Any] | None:
    """Parse a JSON file; empty if it is damaged, None if it is not there."""
    content = output.read(name)
    if content is None:
        return None
    with suppress(ValueError):
        parsed = json.loads(content)
        if isinstance(parsed, dict):
            return parsed
    return {}


def _is_query(told: Mapping[str, Any]) -> bool:
    steps = told.get("steps")
    return (
        told.get("format") == _FORMAT
        and isinstance(told.get("work"), str)
        and "version" in told
        and isinstance(steps, list)
        and all(isinstance(step, list) and len(step) == 2 for step in steps)
    )


def _are_parts(told: Any) -> bool:
    """Check the form of the list of partitions; without it, files are read instead."""
    return isinstance(told, dict) and all(
        isinstance(part, dict)
        and isinstance(part.get("rows"), int)
        and isinstance(part.get("bytes"), int)
        for part in told.values()
    )


def _difference(old: Mapping[str, Any], new: FingerprintedQuery) -> str:
    if old["version"] != new.version:
        return f"version= was {old['version']!r} and is {new.version!r} now"
    before = [tuple(step) for step in old["steps"]]
    now = [(step.name, step.digest) for step in new.steps]
    names = [[name for name, _ in steps] for steps in (before, now)]
    if names[0] != names[1]:
        return f"its steps were {', '.join(names[0])} and are {', '.join(names[1])} now"
    # Those that come after it have changed with it.
    return f"{next(name for name, digest in now if (name, digest) not in before)} has changed"
