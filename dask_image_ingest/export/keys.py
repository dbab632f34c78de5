"""Whether a row's key still says which sample it is.

A row with an ``offset`` is found by it, whatever its key is. One without (its sample has no image,
or one that no range of bytes is) is found by its key. A user may have given keys anew, and the new
one may be that of another sample. So where anything shows that keys were changed, rows without an
offset are found no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase

__all__ = ["UNSURE", "assigns_keys", "unsure_rows"]

_KEY = "__key__"

#: Why a row is left out.
UNSURE = (
    "no-pointer: it has no offset (its sample has no image, a sparse one, or a member twice), and "
    "keys in the frame are not those of the shards any more, so that nothing says which sample it "
    "is; give new keys to rows with an offset alone, or export these with the keys that they had"
)


def assigns_keys(frame: Any) -> bool:
    """Whether a lazy frame says that it gives keys anew."""
    if not isinstance(frame, FrameBase):
        return False
    return any(map(_assigns_keys, frame.expr.find_operations((dx.Assign, dx.RenameFrame))))


def unsure_rows(found: pa.Table, assigned: bool) -> np.ndarray:
    """Which rows were found by a key that may be another sample's.

    Where rows with an offset have the keys of their shard, other rows of this shard have them too.
    Where there is none, nobody must have changed any key of the frame.

    Parameters
    ----------
    found
        For each row its ``source``, its ``offset``, and whether it has the ``same_key``.
    assigned
        Whether the frame says that keys were given anew.
    """
    source = found.column("source").to_numpy()
    pointed = pc.is_valid(found.column("offset")).to_numpy()
    same = pc.fill_null(found.column("same_key").cast(pa.int8()), -1).to_numpy()
    sources = source.max(initial=-1) + 1
    changed, kept = np.zeros(sources, bool), np.zeros(sources, bool)
    changed[source[same == 0]] = True
    kept[source[(same == 1) & pointed]] = True
    unsure = changed | ~kept if assigned or changed.any() else changed
    return ~pointed & unsure[source]


def _assigns_keys(step: Any) -> bool:
    if isinstance(step, dx.Assign):
        return _KEY in step.keys
    renamed = zip(step.frame.columns, step.columns, strict=True)
    return any(new == _KEY != old for old, new in renamed)
