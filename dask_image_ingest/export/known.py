"""What was located while the frame was computed: partition by partition, and asked by source."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pyarrow as pa

from dask_image_ingest.export.locate import Located

__all__ = ["Known"]


class Known:
    """Rows of the frame whose members are known."""

    def __init__(self) -> None:
        # Source → the first row of a partition, and what was located for it and those that follow.
        self._parts: dict[str, list[tuple[int, Located]]] = {}

    def add(self, first: int, located: Located) -> None:
        """Add a partition, which begins with this row of the frame; in the frame's order."""
        self._parts.setdefault(located.url, []).append((first, located))

    def take(self, url: str, rows: np.ndarray) -> Located | None:
        """What is known of some rows of a source, and forget it.

        None if not all of them are known, or if the source has changed while it was read.
        """
        parts = self._parts.pop(url, [])
        if len({located.version for _, located in parts}) != 1:
            return None
        firsts = np.array([first for first, _ in parts])
        counts = [len(located.rows) for _, located in parts]
        part = np.searchsorted(firsts, rows, side="right") - 1
        within = rows - firsts[part]
        if (part < 0).any() or (within >= np.array(counts)[part]).any():
            return None
        before = np.array([0, *accumulate(counts)])
        whole = pa.concat_tables([located.rows for _, located in parts])
        taken = whole.take(pa.array(before[part] + within)).combine_chunks()
        first = parts[0][1]
        return Located(url, first.version, taken, first.expanded, first.damage, first.interleaved)
