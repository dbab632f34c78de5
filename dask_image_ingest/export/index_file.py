"""A shard's layout → the index that DALI and wds2idx know, so that nobody walks the tar again."""

from __future__ import annotations

import re

from dask_image_ingest.export.layout import Layout

__all__ = ["index_file"]

_BLANK = re.compile(r"\s")


def index_file(layout: Layout, samples: int) -> bytes:
    """The text of an ``.idx`` file, version 1.2: a line of each sample's members."""
    lines: list[list[str]] = [[] for _ in range(samples)]
    members = zip(
        layout.sample.tolist(),
        layout.extensions,
        layout.places.tolist(),
        layout.sizes.tolist(),
        layout.names,
        strict=True,
    )
    for sample, extension, place, size, name in members:
        # Blanks separate; the name is only shown in messages.
        shown = _BLANK.sub("_", name)
        lines[sample].append(f"{extension} {place} {size} {shown}")
    return "\n".join([f"v1.2 {samples}", *map(" ".join, lines), ""]).encode()
