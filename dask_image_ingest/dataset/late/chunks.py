"""Rows that are decoded a part at a time: those that were moved, and those of a shuffled stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import dask
import numpy as np
from dask.dataframe.dispatch import concat

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import (
    decode_partition,
    decode_pieces,
    encoded_sizes,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.late.fetch import fetch_headers
from dask_image_ingest.dataset.late.groups import GroupsOfReferences
from dask_image_ingest.dataset.late.nodes import Decode
from dask_image_ingest.dataset.plan.nodes import ImageNode
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode, Kept, cuts
from dask_image_ingest.frames import backend_of
from dask_image_ingest.storage import has_random_access, local_path


def _of_all(frame: Any, function: Callable[..., Any], args: tuple[Any, ...], _: Any) -> Any:
    return function(frame, *args)


def _of_pieces(
    frame: Any, images: Any, function: Callable[..., Any], args: tuple[Any, ...], _: Any
) -> Any:
    largest = backend_of(frame).partition_memory()
    results = [function(piece, *args) for piece in decode_pieces(frame, images, largest)]
    return results[0] if len(results) == 1 else concat(results)


class ChunkedMap(ImageNode, dx.Blockwise):
    """A function of each partition, whose results over parts of it can be put one behind the other.

    Rows that were moved are decoded a piece at a time for it: how many images a key brought to one
    partition is known to nobody before, and no partition can become several when the graph is made.
    """

    _parameters: ClassVar = ["frame", "function", "args", "meta"]
    operation: ClassVar[Any] = staticmethod(_of_all)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.operand("meta")

    def _divisions(self) -> tuple[None, ...]:
        return (None,) * (self.frame.npartitions + 1)

    def _lower(self) -> dx.Expr | None:
        frame = self.frame
        if type(frame) is Decode and frame._lower() is None and frame.keep is None:
            return _ChunkedMapOfReferences(frame.frame, frame.images, *self.operands[1:])
        return None


class _ChunkedMapOfReferences(ChunkedMap):
    """The same over the pointers of rows that were moved."""

    _parameters: ClassVar = ["frame", "images", "function", "args", "meta"]
    operation = staticmethod(_of_pieces)

    def _lower(self) -> None:
        return None


class Pieces(dx.Expr):
    """Parts of the partitions of a frame, as partitions."""

    _parameters: ClassVar = ["frame", "places"]
    places: tuple[tuple[int, int, int], ...]

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    def _divisions(self) -> tuple[None, ...]:
        return (None,) * (len(self.places) + 1)

    def _layer(self) -> dict[Any, Any]:
        name = self._name
        return {
            (name, at): dx.Task((name, at), _rows, dx.TaskRef((self.frame._name, part)), start, end)
            for at, (part, start, end) in enumerate(self.places)
        }


def _rows(frame: Any, start: int, end: int) -> Any:
    return frame.iloc[start:end]


def move_rows_now(expr: dx.Expr, scheduler: Any) -> dx.Expr | None:
    """An optimised query whose rows were moved, once; None where it moves none.

    Only pointers and other metadata are moved and kept. The rows of a partition become several
    where their encoded images are more than those of a partition of the read on average, unless
    something above the decode sees partitions.
    """
    moved = _moved(expr)
    for rows in moved:
        kept = dx.new_collection(rows).persist(scheduler=scheduler)
        decode = expr
        while isinstance(decode, dx.Projection):
            decode = decode.frame
        new = kept.expr
        if isinstance(decode, Decode) and decode.frame._name == rows._name:
            partitions = max((r.npartitions for r in rows.find_operations(Scan)), default=1)
            new = _cut(kept, decode.images, partitions, scheduler)
        expr = expr.substitute(rows, new)
    return expr if moved else None


def _moved(expr: dx.Expr) -> list[dx.Expr]:
    """The pointers of a query which others than their own partition are needed for."""
    decodes = expr.find_operations((Decode, GroupsOfReferences))
    pointers = {decode.frame._name: decode.frame for decode in decodes}
    return [
        rows
        for rows in pointers.values()
        if not all(isinstance(node, (dx.Blockwise, dx.FromGraph)) for node in rows.walk())
    ]


def _cut(kept: Any, images: Sequence[ImageDecode], partitions: int, scheduler: Any) -> dx.Expr:
    tasks = [dask.delayed(_sizes)(part, images) for part in kept.to_delayed()]
    sizes = dask.compute(*tasks, scheduler=scheduler)
    largest = max(1, sum(int(each.sum()) for each in sizes) // partitions)
    places = [
        (part, rows.start, rows.stop)
        for part, each in enumerate(sizes)
        for rows in cuts([each], largest)
    ]
    return Pieces(kept.expr, tuple(places)) if len(places) > len(sizes) else kept.expr


def _sizes(frame: Any, images: Sequence[ImageDecode]) -> np.ndarray:
    return np.sum([encoded_sizes(frame, each) for each in images], axis=0)


# Headers that tell how large the images of a partition are.
_SAMPLED = 64


def _decode_rows(
    images: Sequence[ImageDecode], keep: Kept, columns: Sequence[Any], rows: Any
) -> Any:
    return decode_partition(rows, images, keep)[list(columns)]


@dataclass(frozen=True)
class LastDecode:
    """The decode that ends a query of local files, apart from the rows that it is made of.

    Attributes
    ----------
    rows
        The query without it: references in place of images.
    images, keep
        As of `Decode`.
    columns
        Of the result.
    """

    rows: dx.Expr
    images: tuple[ImageDecode, ...]
    keep: Kept
    columns: tuple[Any, ...]

    @property
    def function(self) -> Callable[[Any], Any]:
        """The decode of any of these rows."""
        return functools.partial(_decode_rows, self.images, self.keep, self.columns)

    def pixels(self, rows: Any) -> int | None:
        """About how many bytes some rows decode to; None where they hold the files themselves."""
        some = rows.iloc[:: max(1, len(rows) // _SAMPLED)]
        nbytes = 0
        for each in self.images:
            found = reference_rows(references_of(some, each.image))
            references = [row for row in found if row is not None]
            if any(row.bytes is not None for row in references):
                return None
            headers = fetch_headers(references, each.decoding, each.storage_options)
            nbytes += sum(map(each.decoding.nbytes, headers))
        return nbytes * len(rows) // max(1, len(some))

    def pieces(self, rows: Any, largest: int, most: int) -> Iterator[slice]:
        """Cut rows where their files have ``largest`` bytes together, or there are ``most``."""
        nbytes = np.sum([encoded_sizes(rows, each) for each in self.images], axis=0)
        return cuts([np.maximum(nbytes, largest // most)], largest)


def last_decode(expr: dx.Expr) -> LastDecode | None:
    """The decode that a query ends with; None where it does not, or its shards are far away.

    A scan of a remote shard may fetch all of it, and its images would be fetched again.
    """
    decode = expr = expr.simplify()
    while isinstance(decode, dx.Projection) and decode.ndim == 2:
        decode = decode.frame
    if type(decode) is not Decode or decode.limit is not None:
        return None
    nodes = list(decode.frame.walk())
    if not all(isinstance(node, dx.Blockwise) for node in nodes):
        return None
    urls = [getattr(node, "first_url", None) for node in nodes if not node.dependencies()]
    if any(url is None or local_path(url) is None or not has_random_access(url) for url in urls):
        return None
    return LastDecode(decode.frame, decode.images, decode.keep, tuple(expr.columns))
