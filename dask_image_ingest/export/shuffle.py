"""A global order from a seed: of pointers, so that no sample is moved to find it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.export.locate import Located

__all__ = ["shuffled"]


def shuffled(rows: pa.Table, sources: Sequence[Located], seed: int) -> np.ndarray:
    """An order that depends on the seed and on where samples come from, on nothing else.

    Not on the order of the frame: a merge gives another one with other partitions.
    """
    codes = rows.column("source").to_numpy()
    hashed = np.array([_hash(f"{seed}\0{source.url}") for source in sources], np.uint64)
    offsets = rows.column("offset")
    places = pc.fill_null(offsets, 0).to_numpy().astype(np.uint64)
    for row in np.flatnonzero(pc.is_null(offsets).to_numpy()):
        places[row] = _hash(rows.column("key")[int(row)].as_py())
    return np.lexsort([places, codes, _mix(hashed[codes] ^ _mix(places))])


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Spread 64 bits as splitmix64 does, the same on every machine and in every release."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
