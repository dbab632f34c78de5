"""Layout of a shard: the position of each member, known before any byte is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dask_image_ingest.export.tar_header import Chunk, headers, padding, tar_size
from dask_image_ingest.index import wds2idx_text


@dataclass(frozen=True)
class Layout:
    """A shard before it is written; arrays and lists have an entry for each member, in order.

    Attributes
    ----------
    names
        As they stand in the tar.
    sample
        The row of the batch that a member belongs to.
    extensions
        Of the members.
    where, offsets, sizes
        Where a member's bytes are now (``SOURCE``, ``EXPANDED`` or ``COLUMN``), and how many.
    headers, positions
        What stands in front of a member, and where that begins in the shard.
    places
        Where its bytes begin in the shard.
    images
        For each sample, which member is its image; -1 where it has none.
    size
        Of the shard.
    """

    names: Sequence[str]
    sample: np.ndarray
    extensions: Sequence[str]
    where: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    headers: Sequence[Chunk]
    positions: np.ndarray
    places: np.ndarray
    images: np.ndarray
    size: int


def lay_out(batch: pa.RecordBatch) -> Layout:
    """Lay out the samples of a batch one behind the other."""
    members = batch.column("members")
    flat = members.flatten()
    starts = members.offsets.to_numpy() - members.offsets[0].as_py()
    sample = np.repeat(np.arange(len(batch)), np.diff(starts))
    keys = batch.column("key").to_pylist()
    extensions = flat.field("extension").to_pylist()
    names = [f"{keys[row]}.{e}" for row, e in zip(sample.tolist(), extensions, strict=True)]
    sizes = flat.field("size").to_numpy()
    made = headers(names, sizes, sample)
    lengths = np.array([len(header) for header in made], np.int64)
    ends = np.cumsum(lengths + sizes + padding(sizes))
    positions = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(names)]
    images = batch.column("image").fill_null(-1).to_numpy()
    return Layout(
        names=names,
        sample=sample,
        extensions=extensions,
        where=flat.field("where").to_numpy(),
        offsets=flat.field("offset").to_numpy(),
        sizes=sizes,
        headers=made,
        positions=positions,
        places=positions + lengths,
        images=np.where(images < 0, -1, images + starts[:-1]),
        size=tar_size(int(ends[-1]) if len(ends) else 0),
    )


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
