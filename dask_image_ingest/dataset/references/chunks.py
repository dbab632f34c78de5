"""Decode moved rows in chunks: of split partitions, and for batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
from distributed import Client

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import PreservesRows
from dask_image_ingest.dataset.plan.operations import ELEMENTWISE, SAME_ROWS
from dask_image_ingest.dataset.plan.scan_node import Scan, ScanPlaceholder, Steps
from dask_image_ingest.dataset.references.decode_node import Decode
from dask_image_ingest.dataset.references.fetch import (
    Fetch,
    decode_partition,
    encoded_sizes,
    fetch,
    fetch_rows,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.scan.rows import ColumnDecode, slices_by_size
from dask_image_ingest.frames import BackendName, backend_of
from dask_image_ingest.storage import has_random_access, is_pipe, local_path
from dask_image_ingest.typedefs import DataFrame


def _rows(frame: DataFrame, start: int, end: int) -> DataFrame:
    return frame.iloc[start:end]


def persist_moves(expr: dx.Expr, scheduler: Client | str) -> dx.Expr | None:
    """Run the moves of an optimised query once, and persist the moved references.

    If only projections follow the decode, partitions with more encoded bytes than a partition of
    the scan has on average are split. None if the query moves no rows.
    """
    all_moved = _moved_references(expr)
    for moved in all_moved:
        persisted = dx.new_collection(moved).persist(scheduler=scheduler)
        decode = expr
        while isinstance(decode, dx.Projection):
            decode = decode.frame
        replacement = persisted.expr
        if isinstance(decode, Decode) and decode.frame._name == moved._name:
            partitions = max((r.npartitions for r in moved.find_operations(Scan)), default=1)
            replacement = _split_large(persisted, decode.images, partitions, scheduler)
        expr = expr.substitute(moved, replacement)
    return expr if all_moved else None


def _moved_references(expr: dx.Expr) -> list[dx.Expr]:
    """The inputs of decodes that are not computed partition by partition."""
    inputs = {decode.frame._name: decode.frame for decode in expr.find_operations(Decode)}
    return [
        rows
        for rows in inputs.values()
        if not all(isinstance(node, (dx.Blockwise, dx.FromGraph)) for node in _nodes(rows))
    ]


def _nodes(expr: dx.Expr) -> list[dx.Expr]:
    """The nodes of a query, apart from the values of ``isin``, which are no rows."""
    values = {id(isin.operand("values")) for isin in expr.find_operations(dx.Isin)}
    return [node for node in expr.walk() if id(node) not in values or node.ndim]


def _split_large(
    persisted: dx.FrameBase,
    images: Sequence[ColumnDecode],
    partitions: int,
    scheduler: Client | str,
) -> dx.Expr:
    """Split at the average encoded size of ``partitions`` partitions."""
    parts = persisted.to_delayed()
    tasks = [dask.delayed(_total_sizes)(part, images) for part in parts]
    sizes = dask.compute(*tasks, scheduler=scheduler)
    largest = max(1, sum(int(nbytes.sum()) for nbytes in sizes) // partitions)
    slices = [
        (part, rows.start, rows.stop)
        for part, nbytes in enumerate(sizes)
        for rows in slices_by_size([nbytes], largest)
    ]
    if len(slices) == len(sizes):
        return persisted.expr
    split = [dask.delayed(_rows)(parts[part], start, stop) for part, start, stop in slices]
    return dd.from_delayed(split, meta=persisted._meta, verify_meta=False).expr


def _total_sizes(frame: DataFrame, images: Sequence[ColumnDecode]) -> np.ndarray:
    """Encoded bytes of each row, all image columns together; shape (n,), int64."""
    return np.sum([encoded_sizes(frame, image) for image in images], axis=0)


# Images that are fetched to estimate the decoded size of a partition.
_SAMPLED = 16


def _decode_rows(
    images: Sequence[ColumnDecode],
    columns: Sequence[Hashable],
    steps: Steps | None,
    backend: BackendName,
    rows: DataFrame,
    draws: np.ndarray | None = None,
    fetch_bytes: Fetch = fetch_rows,
) -> DataFrame:
    decoded = decode_partition(rows, images, draws=draws, fetch_bytes=fetch_bytes, backend=backend)
    decoded = decoded if steps is None else steps.function(decoded)
    return decoded[list(columns)]


@dataclass(frozen=True)
class LastDecode:
    """The last decode of a query, apart from the undecoded rows below it.

    Attributes
    ----------
    rows
        The query below the decode, with references in place of images.
    images
        As for `Decode`.
    columns
        Columns of the result, in order.
    steps
        Row-wise operations that follow, such as ``map_batches``; None without.
    """

    rows: dx.Expr
    images: tuple[ColumnDecode, ...]
    columns: tuple[Any, ...]
    steps: Steps | None

    @property
    def function(self) -> Callable[..., Any]:
        """Function of a frame of any of these rows, of ``draws`` and ``fetch_bytes``: decodes it.

        ``draws``, uint64 (rows,), says which random numbers each row gets; None those of a read.
        ``fetch_bytes`` fetches the images; without, their ranges are fetched.
        Rows with equal reference and draw have equal pixels, whatever else the frame holds.
        """
        backend = backend_of(self.rows._meta).name
        return functools.partial(_decode_rows, self.images, self.columns, self.steps, backend)

    def resized(self, shape: tuple[int, int]) -> LastDecode:
        """The same decode to images of one height and width, of which edges are cut off.

        Images of stored values keep their size.
        """
        return replace(self, images=tuple(_resized(image, shape) for image in self.images))

    @property
    def is_random(self) -> bool:
        """True if pixels may depend on ``draws``."""
        return any(image.decoding.is_random for image in self.images)

    @property
    def is_remote(self) -> bool:
        """True if images are fetched from a server."""
        return reads_remote(self.rows)

    def pixels(self, rows: DataFrame) -> int | None:
        """Estimate the decoded bytes of some rows; None if the references carry encoded bytes."""
        some = rows.iloc[:: max(1, len(rows) // _SAMPLED)]
        nbytes = 0
        for image in self.images:
            per_row = reference_rows(references_of(some, image.image))
            references = [reference for reference in per_row if reference is not None]
            if any(reference.bytes is not None for reference in references):
                return None
            headers, *_ = fetch(references, image.decoding, image.storage_options)
            nbytes += sum(map(image.decoding.nbytes, headers))
        return nbytes * len(rows) // max(1, len(some))


def _resized(image: ColumnDecode, shape: tuple[int, int]) -> ColumnDecode:
    decoding = image.decoding
    if decoding.mode == "raw" and decoding.augment is None:
        return image
    resize = "crop" if decoding.augment is None else decoding.resize
    return replace(image, decoding=replace(decoding, size=shape, resize=resize, crop_from=None))


def last_decode(expr: dx.Expr) -> LastDecode | None:
    """The last decode of a query; None if rows of its result can't be made apart from others.

    They can if only row-wise operations follow it, and shards are local, or indexed, with random
    access. Without an index, the scan of a remote shard downloads all of it, and a later decode
    would do so again. None also if rows are dropped by their errors or by other pixels, so that
    their number is not known before.
    """
    expr = expr.simplify()
    decode = _decode_before_steps(expr)
    if decode is None or decode.only is not None:
        return None  # how many rows there are is known when they are decoded
    nodes = _nodes(decode.frame)
    if not all(isinstance(node, dx.Blockwise) for node in nodes):
        return None
    sources = [node for node in nodes if not node.dependencies()]
    if not all(isinstance(node, Scan) and _reads_apart(node) for node in sources):
        return None
    steps = None
    if not isinstance(expr, Decode):
        decoded = ScanPlaceholder(decode._meta)
        steps = Steps(expr.substitute(decode, decoded).lower_completely())
    return LastDecode(decode.frame, decode.images, tuple(expr.columns), steps)


# Operations whose results over some rows are those rows of the result.
_STEPS = (*SAME_ROWS, *ELEMENTWISE, PreservesRows)


def _decode_before_steps(expr: dx.Expr) -> Decode | None:
    """The decode of all rows that only row-wise operations follow in a simplified query, if any."""
    found: dict[str, Decode] = {}
    stack = [expr]
    while stack:
        node = stack.pop()
        if type(node) is Decode:
            found[node._name] = node
        elif isinstance(node, _STEPS) and node.dependencies():
            stack += node.dependencies()
        else:
            return None
    (decode, *others) = found.values()
    return None if others or decode.limit is not None else decode


def reads_remote(expr: dx.Expr) -> bool:
    """True if some shard of a query is on a server."""
    return any(_is_remote(url) for url in _urls_of(expr))


def _is_remote(url: str) -> bool:
    return local_path(url) is None and not is_pipe(url)


def unindexed_remote(expr: dx.Expr) -> str | None:
    """The first remote tar without an index of a query; None if there is none."""
    for scan in expr.find_operations(Scan):
        dataset = scan.dataset
        if not dataset.are_numbered and not dataset.options.is_table:
            for split in itertools.chain(*dataset.partitions):
                if split.index is None and _is_remote(split.url):
                    return split.url
    return None


def known_lengths(expr: dx.Expr) -> list[int] | None:
    """Rows of each partition of a query without filters, by the indexes; None if unknown."""
    scan = expr.simplify()
    if not isinstance(scan, Scan) or scan.dataset.options.shard_errors != "raise":
        return None
    lengths = [length for length in scan.counted if length is not None]
    return lengths if len(lengths) == scan.npartitions else None


def _reads_apart(scan: Scan) -> bool:
    """True if the images of some rows can be read without the rest of their shards."""
    dataset = scan.dataset
    located = {
        split.url for split in itertools.chain(*dataset.partitions) if split.index is not None
    }
    return all(
        has_random_access(url)
        and (local_path(url) is not None or dataset.are_numbered or url in located)
        for url in _urls_of(scan)
    )


def _urls_of(expr: dx.Expr) -> Iterator[str]:
    """The shards of a query."""
    for scan in expr.find_operations(Scan):
        yield from (shard.url for shard in scan.dataset.shards)


def _decode_at_end(expr: dx.Expr) -> Decode | None:
    """The decode of all rows that only projections follow in a simplified query, if any."""
    while isinstance(expr, dx.Projection) and expr.ndim == 2:
        expr = expr.frame
    return expr if type(expr) is Decode and expr.limit is None else None


def with_bad_rows(expr: dx.Expr, columns: Sequence[str]) -> dx.Expr:
    """The query with the rows that it drops since their images have errors; else itself.

    For batches of ``columns``, which leave out rows without an image: the number of rows is then
    known before the decode.
    """
    decode = _decode_at_end(expr.simplify())
    if decode is None or decode.only != "good":
        return expr
    if not {image.image for image in decode.images} <= {*columns}:
        return expr
    return dx.Projection(Decode(decode.frame, decode.images), list(expr.columns))


def is_augmented(expr: dx.Expr) -> bool:
    """True if some images of a query are decoded with ``augment=``."""
    decodes = expr.find_operations(Decode)
    return any(image.decoding.is_augmented for node in decodes for image in node.images)


def with_draw(expr: dx.Expr, draw: int) -> dx.Expr:
    """The query with other random numbers of its augmentations; itself if it has none.

    ``draw`` is that of all images, for a query whose rows can't be decoded apart.
    """
    for node in expr.find_operations(Decode):
        images = tuple(_drawn(image, draw) for image in node.images)
        if images != node.images:
            other = node.substitute_parameters({"images": images})
            return with_draw(expr.substitute(node, other), draw)
    return expr


def _drawn(image: ColumnDecode, draw: int) -> ColumnDecode:
    decoding = image.decoding
    return replace(image, decoding=replace(decoding, draw=draw)) if decoding.is_random else image
