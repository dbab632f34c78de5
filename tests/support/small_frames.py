"""Frames of tiny images that no tar and no decoder stand behind."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import get_backend

BACKEND = get_backend("pandas")


def small_frame(keys, shape=(1, 1, 3), bad=()) -> pd.DataFrame:
    """A row for each of ``keys``, whose pixels have its value; those in ``bad`` have none."""
    size = int(np.prod(shape))
    good = [key for key in keys if key not in bad]
    flat = np.repeat(np.array(good, np.uint8), size)
    shapes = np.array([(0, 0, 0) if key in bad else shape for key in keys], np.int32)
    errors = ["corrupt: made so" if key in bad else None for key in keys]
    table = pa.table({"key": pa.array(list(keys), pa.int64())})
    pixels = Pixels(flat, shapes.reshape(-1, 3), errors)
    return BACKEND.frame(table, np.arange(len(keys)), pixels)


def lazy_frame(partitions, fails=()) -> dd.DataFrame:
    """A dask frame of these partitions; computing one whose number is in ``fails`` raises."""
    return dd.from_map(
        _partition,
        range(len(partitions)),
        partitions=partitions,
        fails=fails,
        meta=partitions[0].iloc[:0],
    )


def _partition(number, partitions, fails):
    if number in fails:
        raise OSError(f"partition {number} can't be read")
    return partitions[number]
