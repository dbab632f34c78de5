"""What making pictures gave for a source shard, kept for a run that goes on after a kill.

Pictures are made before there is a plan, which may take hours. So each source's are kept under a
name that stands for the shard as it is, the rows that are wanted of it and what becomes of them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pyarrow as pa

from dask_image_ingest.export.arrow_files import from_bytes, to_bytes
from dask_image_ingest.export.job import Options
from dask_image_ingest.export.place import STAGING, Place

__all__ = ["is_kept", "keep", "kept_name", "read_kept"]

_PREFIX = f"{STAGING}/made-"

# Of what is written down of each row.
_FORMAT = 2


def is_kept(name: str) -> bool:
    """Whether a staged file outlives a run that was killed before it had a plan."""
    return name.startswith(_PREFIX)


def kept_name(url: str, version: str, wanted: pa.RecordBatch, options: Options) -> str:
    """How what is made for the rows wanted of a shard is called."""
    described = options.described()
    decisive = [_FORMAT, url, version, *(described[name] for name in ("jpeg", "members", "index"))]
    digest = hashlib.sha256(json.dumps(decisive).encode())
    digest.update(to_bytes(pa.Table.from_batches([wanted])))
    return f"{_PREFIX}{digest.hexdigest()}"


def keep(place: Place, name: str, rows: pa.Table, facts: dict[str, Any]) -> None:
    """Write down what was found, once the pictures themselves are there."""
    told = rows.replace_schema_metadata({"facts": json.dumps(facts)})
    place.put(name, to_bytes(told))


def read_kept(place: Place, name: str) -> tuple[pa.Table, dict[str, Any]] | None:
    """What a run before this one found; None if there is no such thing."""
    content = place.read(name)
    if content is None:
        return None
    rows = from_bytes(content)
    return rows.replace_schema_metadata(None), json.loads(rows.schema.metadata[b"facts"])
