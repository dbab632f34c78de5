"""Rows between partition and batch: images, and arrays of the other columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend
from dask_image_ingest.loader.order import Size


@dataclass(frozen=True)
class Rows:
    """Images, and arrays of the other columns of their rows."""

    images: list[Any]
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> Size:
        """The number of rows, and the bytes of their pixels."""
        return Size(len(self.images), sum(image.nbytes for image in self.images))

    def take(self, rows: Any) -> Rows:
        """Select rows by number; views, without a copy, where they are a range."""
        images = [self.images[row] for row in rows]
        where = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return Rows(images, {name: values[where] for name, values in self.columns.items()})

    def copied(self) -> Rows:
        """A copy of the rows, which does not keep their partition in memory."""
        copies = [image.copy() for image in self.images]
        return Rows(copies, {name: values.copy() for name, values in self.columns.items()})

    @classmethod
    def of(cls, parts: Sequence[Rows], backend: Backend) -> Rows:
        """Concatenate rows."""
        columns = {
            name: _concatenated([part.columns[name] for part in parts], name, backend)
            for name in parts[0].columns
        }
        return cls([image for part in parts for image in part.images], columns)


def rows_of(frame: Any, image: str, backend: Backend) -> Rows:
    """The rows of a partition that have an image.

    Raises
    ------
    ArgumentError
        If another column can't be an array.
    """
    arrays = backend.arrays(frame[image])
    present = [row for row, array in enumerate(arrays) if array is not None]
    others = frame[[name for name in frame.columns if name != image]]
    if len(present) < len(arrays):
        others = others.take(present)
    columns = {}
    for name in others.columns:
        columns[name] = backend.values(others[name])
        if columns[name] is None:
            raise ArgumentError(
                f"iter_batches: column {name!r} has nulls, or lists of differing lengths, which no "
                f"array can hold: leave it out with columns=, or drop these rows before, "
                f"ddf[ddf[{name!r}].notnull()]"
            )
    return Rows([arrays[row] for row in present], columns)


def _concatenated(parts: list[Any], name: str, backend: Backend) -> Any:
    library = np if isinstance(parts[0], np.ndarray) else backend.numpy
    # A part without rows does not tell the length of its lists.
    parts = [part for part in parts if len(part)] or parts[:1]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ArgumentError(
            f"iter_batches: the lists of column {name!r} differ in length from partition to "
            "partition: leave it out with columns="
        )
    return library.concatenate(parts)
