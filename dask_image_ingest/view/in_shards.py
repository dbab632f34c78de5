"""Rows whose images are still in their shards: which frames have them, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import (
    POINTER,
    Decode,
    ReadImageFiles,
    ReadWebDataset,
    datasets_of,
    decode_frame,
    is_pointed,
    value_sources,
)
from dask_image_ingest.decode import MAX_PIXELS, Decoding, make_decoding
from dask_image_ingest.frames import backend_of, image_columns, pandas_type

# What a read or a late decode finds an image by: one that no place tells, by its key.
PLACE = (*POINTER, "__key__")


@dataclass(frozen=True)
class _Way:
    """Read settings of a shard."""

    storage_options: dict[str, Any] | None = None
    max_pixels: int = MAX_PIXELS


# A way to read images, and the shards whose images are read so; None where these are not known.
_Known = tuple[_Way, Set[str] | None]


@dataclass(frozen=True)
class InShards:
    """Reader of the images that rows point to.

    Attributes
    ----------
    ways
        Those that there are.
    number
        For each shard the number of its way; 0 for those that are not named.
    """

    ways: tuple[_Way, ...] = (_Way(),)
    number: Mapping[str, int] = field(default_factory=dict)

    def decode(self, rows: Any, longer: int) -> pd.DataFrame:
        """Rows of any backend as a pandas frame with small images, and their errors.

        They are decoded on the CPU, since they are few and a client may have no GPU.
        """
        frame = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
        numbers = np.array([self.number.get(url, 0) for url in frame["__url__"]], np.int64)
        places = [np.flatnonzero(numbers == number) for number in range(len(self.ways))]
        parts = [
            _decoded(frame.iloc[some], way, longer)
            for way, some in zip(self.ways, places, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return pd.concat(parts).iloc[np.argsort(np.concatenate(places))]


def _decoded(frame: pd.DataFrame, way: _Way, longer: int) -> pd.DataFrame:
    decoding = make_decoding(
        device="cpu",
        size=longer,
        resize="longer",
        mode="RGB",
        transform=None,
        max_pixels=way.max_pixels,
    )
    decoded: pd.DataFrame = decode_frame(frame, decoding, way.storage_options)
    return decoded


def in_shards(frame: Any, storage_options: dict[str, Any] | None) -> InShards | None:
    """Find the reader of the images that a frame's rows point to.

    None where these are not known to be the images of the frame, or are decoded already.
    """
    if not set(POINTER) <= set(frame.columns):
        return None
    lazy = isinstance(frame, FrameBase)
    images = image_columns(frame)
    if len(images) > 1 or (images and not lazy):
        return None
    if not lazy:
        return InShards((_Way(storage_options),))
    if images:
        sources = list(_sources(frame.expr, (images[0], *PLACE)))
        if not all(_decodes(*source) for source in sources):
            return None
    else:
        sources = list(value_sources(frame.expr, ("__url__",)))
    ways = (way for source, _ in sources for way in _ways(source))
    found = _together(ways, sure=bool(images))
    if found is None or storage_options is None:
        return found
    given = [replace(way, storage_options=storage_options) for way in found.ways]
    return replace(found, ways=tuple(given))


def _sources(expr: Any, columns: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Expressions that decode images, with the names of image and pointer columns."""
    for source, names in value_sources(expr, columns):
        if _is_of_references(source):
            # The references that stand in the place of the images are those of a read.
            yield from _sources(source.frame, names)
        else:
            yield source, names


def _is_of_references(expr: Any) -> bool:
    return (
        isinstance(expr, Decode)
        and not is_pointed(expr.frame)
        and all(_is_picture(each.decoding) for each in expr.images)
    )


def _decodes(expr: Any, columns: tuple[Any, ...]) -> bool:
    """True if an expression only decodes images by their pointers."""
    if columns != ("image", *PLACE) or not set(columns) <= set(expr.columns):
        return False
    if isinstance(expr, ReadWebDataset):
        return _is_picture(expr.dataset.options.decoding)
    if isinstance(expr, ReadImageFiles):
        return _is_picture(expr.files.images.decoding)
    return isinstance(expr, Decode) and any(
        each.image == "image" and _is_picture(each.decoding) for each in expr.images
    )


def _is_picture(decoding: Decoding) -> bool:
    """True if the stored image shows what is decoded; raw values are scaled by their own range."""
    return decoding.transform is None and decoding.mode != "raw"


def _ways(expr: Any) -> Iterator[_Known]:
    """Read settings of an expression and of those below it."""
    if isinstance(expr, Decode):
        images = expr.images[0]
        yield _Way(images.storage_options, images.decoding.max_pixels), _urls(expr.frame)
        return
    if isinstance(expr, ReadImageFiles):
        images = expr.files.images
        way = _Way(images.storage_options, images.decoding.max_pixels)
        yield way, {file.url for file in expr.files.files}
        return
    for dataset in datasets_of(expr):
        options = dataset.options
        way = _Way(options.storage_options, options.decoding.max_pixels)
        yield way, {shard.url for shard in dataset.shards}


def _urls(expr: Any) -> set[str] | None:
    """The shards that the rows of an expression may be of; None if they may be of any."""
    sources = [source for source, _ in value_sources(expr, ("__url__",))]
    if not all(isinstance(source, ReadWebDataset) for source in sources):
        return None
    return {shard.url for source in sources for shard in source.dataset.shards}


def _together(known: Iterable[_Known], sure: bool) -> InShards | None:
    """All ways to read; the first one where nothing tells which, or None to be ``sure``."""
    found = list(known)
    ways: list[_Way] = []
    for way, _ in found:
        if way not in ways:
            ways.append(way)
    if len(ways) < 2:
        return InShards(tuple(ways) or (_Way(),))
    numbers: dict[str, int] = {}
    for way, urls in found:
        number = ways.index(way)
        if sure and (urls is None or any(numbers.get(url, number) != number for url in urls)):
            return None
        for url in urls or ():
            numbers.setdefault(url, number)
    return InShards(tuple(ways), numbers)
