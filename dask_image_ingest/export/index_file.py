"""A shard's layout → the index that DALI and wds2idx know, so that nobody walks the tar again."""

from __future__ import annotations

from dask_image_ingest.export.layout import Layout
from dask_image_ingest.index import wds2idx_text

__all__ = ["index_file"]


def index_file(layout: Layout, samples: int) -> bytes:
    """The text of an ``.idx`` file, version 1.2: a line of each sample's members."""
    members = zip(
        layout.sample.tolist(),
        layout.extensions,
        layout.places.tolist(),
        layout.sizes.tolist(),
        layout.names,
        strict=True,
    )
    return wds2idx_text(samples, members)
