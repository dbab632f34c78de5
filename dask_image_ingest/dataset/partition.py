"""One task: a part of one shard becomes one dataframe. The story of the package, from here down."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.filters import Filters
from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.schema import Component, image_member
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.decode import Decoding, Pixels, decode
from dask_image_ingest.errors import (
    ImageDecodeError,
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.frames import BackendName, get_backend
from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import TarIndex, index_tar

ErrorPolicy = Literal["null", "raise", "drop"]
ShardErrorPolicy = Literal["raise", "skip"]

logger = logging.getLogger("dask_image_ingest")

# Members that came late and were warned about: news once for a process, not for each shard.
_warned_extensions: set[str] = set()


@dataclass(frozen=True, slots=True)
class ShardSplit:
    """The samples of one partition: the ``part``-th of ``parts`` equal parts of a shard."""

    url: str
    part: int = 0
    parts: int = 1

    def rows(self, samples: int) -> range:
        """Which of a shard's samples these are."""
        return range(samples * self.part // self.parts, samples * (self.part + 1) // self.parts)


@dataclass(frozen=True)
class Query:
    """What every task of a collection has to know; small, because each task carries it."""

    columns: tuple[str, ...]
    filters: Filters | None
    limit: int | None
    decoding: Decoding
    errors: ErrorPolicy
    backend: BackendName
    image_extensions: tuple[str, ...]
    components: tuple[Component, ...]
    known_extensions: frozenset[str] | None
    shard_errors: ShardErrorPolicy = "raise"
    storage_options: dict[str, Any] | None = None

    @property
    def wants_pixels(self) -> bool:
        """Whether the image column itself is asked for."""
        return "image" in self.columns

    @property
    def must_decode(self) -> bool:
        """Whether images are decoded: for their pixels, or because only that tells the errors."""
        return (
            self.wants_pixels
            or "error" in self.columns
            or "error" in dnf.columns_of(self.filters)
            or self.errors != "null"
        )

    @property
    def filters_before_decode(self) -> Filters | None:
        """What of the filters can be judged without decoding."""
        return dnf.without(self.filters, "error") if self.must_decode else self.filters

    @property
    def filters_after_decode(self) -> Filters | None:
        """The filters, where some of them need to know which images could be decoded."""
        return self.filters if "error" in dnf.columns_of(self.filters) else None


def read_partition(split: ShardSplit, query: Query) -> Any:
    """Read one partition: the samples ``split`` of one shard, as a dataframe.

    Pixels are decoded last, and only for the rows that the filters keep.

    Raises
    ------
    ShardError
        Where the shard can't be read, with ``shard_errors="raise"``.
    PartitionTooLargeError
        Where the images would decode to more than one partition can hold; before they do.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    try:
        return _read(split, query)
    except (ShardError, ShardNotFoundError) as error:
        if query.shard_errors == "raise":
            raise
        if not split.part:
            warn_of_skipped(error)
        empty = SampleRows(
            split.url,
            b"",
            TarIndex(),
            range(0),
            image_extensions=query.image_extensions,
            components=query.components,
            max_pixels=query.decoding.max_pixels,
        )
        return _frame(empty, _decode(split, empty, query), query)


def _read(split: ShardSplit, query: Query) -> Any:
    backend = get_backend(query.backend)
    with open_shard(split.url, query.storage_options) as content:
        index = index_tar(content, split.url)
        _report(split, index, query)
        rows = SampleRows(
            split.url,
            content,
            index,
            split.rows(len(index.samples)),
            image_extensions=query.image_extensions,
            components=query.components,
            max_pixels=query.decoding.max_pixels,
        ).keep(query.filters_before_decode)
        if not query.must_decode:
            rows = rows.take(range(len(rows))[: query.limit])
            return backend.frame(rows.table(query.columns), rows.numbers, None)
        if query.limit is not None:
            if query.errors == "drop" or query.filters_after_decode:
                return _first_rows(split, rows, query, query.limit)
            rows = rows.take(range(len(rows))[: query.limit])
        pixels = _decode(split, rows, query)
        return _frame(rows, pixels, query)


def _first_rows(split: ShardSplit, rows: SampleRows, query: Query, limit: int) -> Any:
    """The first rows where only the decoder tells which these are: few at first, then more."""
    parts: list = []
    start, size = 0, max(1, limit)
    while not parts or (start < len(rows) and sum(map(len, parts)) < limit):
        portion = rows.take(range(start, min(start + size, len(rows))))
        parts.append(_frame(portion, _decode(split, portion, query), query))
        start, size = start + size, 2 * size
    return parts[0] if len(parts) == 1 else concat(parts).head(limit)


def _decode(split: ShardSplit, rows: SampleRows, query: Query) -> Pixels:
    backend = get_backend(query.backend)
    nbytes = sum(map(query.decoding.nbytes, rows.headers))
    if query.wants_pixels:
        what = f"samples {rows.numbers[0]}-{rows.numbers[-1]} of {split.url}" if len(rows) else ""
        check_size(what, nbytes, backend.largest_partition)
        buffer = backend.pixel_buffer(nbytes)
    else:
        buffer = NoPixels()
    pixels = decode(rows.headers, rows.image_bytes, query.decoding, buffer, rows.origin)
    failed = [row for row, error in enumerate(pixels.errors) if error is not None]
    if failed and query.errors == "raise":
        row = failed[0]
        raise ImageDecodeError(
            f"{split.url}: the image of sample {rows.samples[row].key!r} can't be decoded: "
            f"{pixels.errors[row]}. Pass errors='null' to get it as a row without an image"
        )
    if failed:
        logger.warning(
            "%s: %d of %d images could not be decoded, first that of %r: %s",
            split.url,
            len(failed),
            len(rows),
            rows.samples[failed[0]].key,
            pixels.errors[failed[0]],
        )
    return pixels


def _frame(rows: SampleRows, pixels: Pixels, query: Query) -> Any:
    filtered_by = dnf.columns_of(query.filters_after_decode)
    names = [name for name in query.columns if name != "image"]
    table = rows.table([*names, *sorted(filtered_by.difference(names))])
    if "error" in table.column_names:
        position = table.column_names.index("error")
        table = table.set_column(position, "error", pa.array(pixels.errors, pa.string()))
    kept = np.arange(len(rows))
    if query.filters_after_decode:
        kept = dnf.matching(table, query.filters_after_decode)
    if query.errors == "drop":
        kept = kept[[pixels.errors[row] is None for row in kept]]
    kept = kept[: query.limit]
    if len(kept) < len(rows):
        table, pixels = table.take(kept), pixels.take(kept)
    frame = get_backend(query.backend).frame(
        table.select(names), rows.numbers[kept], pixels if query.wants_pixels else None
    )
    columns = list(query.columns)
    return frame if list(frame.columns) == columns else frame[columns]


def check_size(what: str, nbytes: int, largest: int) -> None:
    """Refuse a partition that can't be held, before anything is decoded.

    Raises
    ------
    PartitionTooLargeError
    """
    if nbytes > largest:
        raise PartitionTooLargeError(
            f"{what} decode to {nbytes / 1e9:.1f} GB, and one partition holds at most "
            f'{largest / 1e9:.1f} GB of pixels here. Pass partition_size="512 MiB" to split shards '
            "(or repartition a frame that is there already), or size= to decode smaller images"
        )


def warn_of_skipped(error: Exception) -> None:
    """Say which shard is left out, and why."""
    logger.warning("skipped: %s", error)
    warn_user(f"skipped: {error}")


def _report(split: ShardSplit, index: TarIndex, query: Query) -> None:
    # Once for a shard, not once for each part of it.
    if split.part:
        return
    if index.damage is not None:
        warn_user(
            f"{split.url} is damaged at byte {index.damage.offset}: {index.damage.reason}. "
            f"The {len(index.samples)} samples before it are read, what follows is lost"
        )
    if query.known_extensions is None:
        return
    late: set[str] = set()
    for sample in index.samples:
        unknown = sample.members.keys() - query.known_extensions
        if unknown:
            late.update(unknown - {image_member(sample, query.image_extensions)})
    unheard = sorted(late - _warned_extensions - {""})
    if unheard:
        _warned_extensions.update(unheard)
        few = ", ".join(map(repr, unheard[:3]))
        more = f" and {len(unheard) - 3} more" if len(unheard) > 3 else ""
        warn_user(
            f"{split.url} has members of a kind that the first shard has not: {few}{more}. They "
            f"are left out; to have them as a column, pass components={{..., {unheard[0]!r}: "
            "'string'} (or 'binary', 'int64' ...)"
        )


class NoPixels:
    """Takes decoded images where only their errors are asked for."""

    def append(self, images: Any) -> None:
        """Forget a batch."""

    def finish(self) -> np.ndarray:
        """Nothing was kept."""
        return np.empty(0, np.uint8)
