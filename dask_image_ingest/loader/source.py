"""Sources of partitions: a frame in memory, or a dask dataframe that is computed by partition."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import dask
import numpy as np
import pandas as pd
from dask.dataframe.dispatch import concat
from dask.system import CPU_COUNT
from distributed import Client, secede, wait
from distributed import Future as RemoteFuture
from distributed.scheduler import KilledWorker
from distributed.threadpoolexecutor import ThreadPoolExecutor as DaemonThreads
from distributed.utils import offload

from dask_image_ingest.arguments import check_unique, column_names
from dask_image_ingest.client import client_that_computes
from dask_image_ingest.computing import killed_by
from dask_image_ingest.dask_internals import (
    FrameBase,
    convert_legacy_graph,
    cull,
    new_collection,
)
from dask_image_ingest.dataset.plan import Scan, select_columns, shard_of_partition
from dask_image_ingest.dataset.references import (
    Decode,
    EncodedAhead,
    LastDecode,
    image_shape,
    is_augmented,
    known_lengths,
    last_decode,
    persist_moves,
    reads_remote,
    rows_on_host,
    unindexed_remote,
    with_bad_rows,
    with_draw,
)
from dask_image_ingest.decode import ImageShape
from dask_image_ingest.errors import ArgumentError, warn_user
from dask_image_ingest.frames import backend_of, image_column, image_columns
from dask_image_ingest.loader.batch_format import (
    BatchRows,
    HeldPartition,
    PendingPartition,
    PendingRows,
    RowsOf,
    as_pandas,
    rows_in_order,
)
from dask_image_ingest.loader.mapped_pixels import map_remote
from dask_image_ingest.loader.position import worker_of_loader
from dask_image_ingest.loader.sampling import values_or_shapes
from dask_image_ingest.typedefs import AnyFrame, DataFrame

logger = logging.getLogger("dask_image_ingest")

# The rows of an epoch are numbered. A shuffle on disk, or from worker to worker, brings them in
# another order each time; and Dask would join small files of parquet to other partitions for each
# choice of columns.
_NUMBERED = {"dataframe.shuffle.method": "tasks", "optimization.tune.active": False}

# Indexes on servers that are read at once, by a few requests each.
_INDEXES_AT_ONCE = 8

# Default read-ahead on a cluster: a partition for each thread, up to a number that bounds the
# memory, and two more, so that no thread is idle until a finished partition is used.
_EXTRA_PARTITIONS = 2
_MAX_THREADS = 8

# Gives a column of all rows: its values, of arrays their shapes.
ColumnOf = Callable[[str], pd.Series]

# Bytes of an image of unknown size: of 1 megapixel.
_UNKNOWN_BYTES = 3e6


class FrameSource:
    """Source of the rows of a pandas or cuDF frame, which is one partition.

    Parameters
    ----------
    frame
        The columns of the batches.
    image
        The image column; None for a frame without images.
    shape
        Shape of its images, as far as it is known.
    column
        Gives any column of all rows, and of arrays their shapes.
    """

    partitions = 1
    #: Whether images are fetched from a server, ahead of their decode.
    fetches_ahead = False

    def __init__(
        self,
        frame: AnyFrame,
        image: str | None,
        shape: ImageShape | None = None,
        column: ColumnOf | None = None,
    ) -> None:
        self._frame = frame
        self.image = image
        self.shape = shape
        self._column = column
        self._backend = backend_of(self.meta)

    def __enter__(self) -> FrameSource:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def meta(self) -> DataFrame:
        """An empty frame of the columns of the batches."""
        return self._frame.iloc[:0]

    @property
    def known_row_bytes(self) -> float | None:
        """Bytes of the pixels of a row; None if only a partition can tell."""
        if self.shape is None or None in self.shape or len(image_columns(self.meta)) > 1:
            return None
        return float(np.prod(np.array(self.shape, np.int64)))

    def column(self, name: str) -> pd.Series:
        """A column of all rows, in memory; of arrays, their shapes."""
        assert self._column is not None
        return self._column(name)

    def check_process(self) -> None:
        """Raise `ArgumentError` in a fork of the process that reads ahead."""

    def default_prefetch(self) -> int:
        """Default number of partitions to read ahead."""
        return 1

    def read(self, number: int) -> Future[Any]:
        """Start reading a partition."""
        done: Future[Any] = Future()
        done.set_result(self._frame)
        return done

    def hold(self, pending: PendingPartition, rows_of: RowsOf) -> Any:
        """A partition that is being read, in the form in which `take` needs it."""
        return HeldPartition(pending, rows_of)

    def take(
        self,
        parts: Sequence[tuple[Any, np.ndarray]],
        order: np.ndarray,
        draws: np.ndarray,
        shape: tuple[int, int] | None,
        rows_of: RowsOf,
    ) -> PendingRows:
        """Start to take rows of several partitions.

        Parameters
        ----------
        parts
            Partitions that are read, and the numbers of the rows to take from each.
        order
            Order of all these rows.
        draws
            Seeds of random augmentations, in this order.
        shape
            Height and width to which images are decoded; None for those of the read.
        rows_of
            Takes the rows that have images from a frame.
        """
        if shape is not None:
            raise ArgumentError(
                "buckets= decides the size of a decode, and this query does not end with one: take "
                "the frame as it was read, or rows of references, with dii.decode_images"
            )
        return functools.partial(rows_in_order, parts, order, self._backend)

    def describe(self, number: int) -> str:
        """Name of a partition in errors."""
        return "the frame"

    def counts(self) -> np.ndarray:
        """Rows of each partition: int64 (partitions,)."""
        return np.array([len(self._frame)], np.int64)

    def row_bytes(self, number: int, held: Callable[[], PendingPartition] | None = None) -> float:
        """Decoded bytes of a row of a partition, on average; 1 if it is in memory already.

        ``held`` gives the partition to a source that has to read it.
        """
        return 1.0

    def encoded_bytes(self, part: PendingPartition) -> float:
        """Encoded bytes of a row of a partition, on average; if `fetches_ahead`."""
        raise NotImplementedError

    def fetch(self, part: PendingPartition, rows: np.ndarray) -> None:
        """Start fetching the images of neighbouring rows of a partition; if `fetches_ahead`."""
        raise NotImplementedError

    @property
    def decodes(self) -> bool:
        """True if images are yet to be decoded."""
        return False

    def lacks_images(self) -> bool:
        """True if no row has an image to decode; False if that is not known."""
        return False

    @property
    def is_augmented(self) -> bool:
        """True if ``augment=`` is yet to draw its random numbers."""
        return False

    def references(self) -> ReferenceSource | None:
        """Source of the same rows before their decode; None unless the decode is the last step."""
        return None

    def with_draw(self, draw: int) -> FrameSource:
        """The same rows, with other random numbers of the augmentations that are yet to come."""
        return self


class LazySource(FrameSource):
    """Source of a dask dataframe: partitions are computed by a cluster, or on a thread here."""

    def __init__(
        self,
        frame: AnyFrame,
        image: str | None,
        shape: ImageShape | None = None,
        column: ColumnOf | None = None,
    ) -> None:
        super().__init__(frame, image, shape, column)
        self._client: Client | None = client_that_computes()
        # The process whose thread or client this uses; None while it has neither.
        self._process = os.getpid() if self._client else None
        share = dask.config.get("image-ingest.share-pixels", True)
        # Whether to map pixels of workers on this machine; False after an attempt failed.
        self._can_map = share and self._backend.name == "pandas"
        # While it is open: the threads that compute, or fetch from the cluster; and those that
        # read partitions, by default the same.
        self._threads: Executor
        self._reading: Executor
        # The thread that asked for the latest partition.
        self._reader = 0
        # What the cluster is computing or holds for this source.
        self._futures: set[RemoteFuture] = set()
        self._secede()
        with dask.config.set(_NUMBERED):
            unfused = frame.optimize(fuse=False).expr
            # Shuffle rows once, for all partitions: each partition is computed by itself, and would
            # otherwise run the whole shuffle again.
            moved = persist_moves(unfused, self._client or "synchronous")
            # The graph is built once; `read` cuts out the tasks of each partition.
            self._rows = frame if moved is None else new_collection(moved)
            optimized = self._rows.optimize()
        self._keys = optimized.__dask_keys__()
        graph = optimized.__dask_graph__()
        if self._client is None and any(isinstance(task, RemoteFuture) for task in graph.values()):
            raise ArgumentError(
                "iter_batches: the frame was persisted on a cluster of which this process has no "
                "client, as a worker of a torch DataLoader has none: iterate over the frame as it "
                "was before persist(), or in the process of the client"
            )
        self._graph = convert_legacy_graph(graph)
        self.partitions = len(self._keys)

    @property
    def meta(self) -> DataFrame:
        return self._frame._meta

    def check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise ArgumentError(
                "iter_batches: an iterator cannot be used after a fork, which does not have its "
                "threads. Create another one in this process, with start=it.position to continue"
            )

    def __enter__(self) -> LazySource:
        self.check_process()
        self._process = os.getpid()
        self._secede()
        set_up = self._backend.thread_setup()
        if self._client is None:
            # On a GPU, one prepares or copies a partition while DALI decodes that of the other.
            threads = 2 if self._backend.device == "gpu" else 1
            self._threads = ThreadPoolExecutor(threads, "iter-batches", set_up)
        else:
            # Daemon threads: a script can end while a cluster is still computing.
            self._threads = DaemonThreads(1, thread_name_prefix="iter-batches")
            self._threads.submit(set_up)
            if self._backend.device == "gpu" and not self._client.asynchronous:
                # Frames arrive in Dask's own threads, which would use the first GPU.
                self._client.sync(_set_up_threads, set_up)
        self._reading = self._threads
        return self

    def _secede(self) -> None:
        if self._client is not None:
            # Inside a task, as in dask's compute(): free the worker's thread for other tasks, among
            # them the partitions that this one waits for.
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                secede()

    def __exit__(self, *_: object) -> None:
        if self._process != os.getpid():
            return  # a fork: thread and futures belong to the parent process
        if self._client is None:
            self._process = None
        for future in tuple(self._futures):
            future.release()
        self._futures.clear()
        if isinstance(self._threads, DaemonThreads):
            self._threads.shutdown(wait=False)
        else:
            # The garbage collector may run this on any thread, even on the one to wait for: wait
            # only on the thread that has been reading.
            is_reader = self._reader == threading.get_ident()
            self._threads.shutdown(wait=is_reader, cancel_futures=True)

    def default_prefetch(self) -> int:
        if self._backend.device == "gpu":
            # They lie in this process's GPU, beside a model, and perhaps a worker and DALI.
            return _EXTRA_PARTITIONS
        if self._client is None:
            return super().default_prefetch()
        threads: int = sum(self._client.nthreads().values())
        return _EXTRA_PARTITIONS + min(threads, _MAX_THREADS)

    def read(self, number: int) -> Future[Any]:
        self._reader = threading.get_ident()
        key = self._keys[number]
        graph = cull(self._graph, [key])
        if self._client is None:
            return self._reading.submit(dask.get, graph, key)
        (future,) = self._client.get(graph, [key], sync=False)
        self._futures.add(future)
        return self._reading.submit(self._fetch, future, functools.partial(self.describe, number))

    def _fetch(self, future: RemoteFuture, describe: Callable[[], str]) -> Any:
        if future not in self._futures:
            raise CancelledError  # the source was closed
        try:
            frame = self._mapped(future) if self._can_map else None
            if frame is not None:
                return frame
            # Directly from the worker if the client can reach it, not through the scheduler.
            return future.client.gather(future, direct=True)
        except KilledWorker as error:
            raise killed_by(error, describe()) from error
        finally:
            self._futures.discard(future)
            future.release()

    def _mapped(self, future: RemoteFuture) -> Any:
        """A partition with mapped pixels; None to transfer it."""
        with future.client.as_current():
            wait([future])
        try:
            return map_remote(future)
        except Exception:
            # A cluster may forbid running functions on its workers; the transfer still works.
            logger.debug("pixels are transferred, not mapped", exc_info=True)
            self._can_map = False
            return None

    def describe(self, number: int) -> str:
        shard = shard_of_partition(self._frame.expr, number)
        return f"partition {number}" + (f", {shard}" if shard else "")

    @property
    def decodes(self) -> bool:
        return next(self._frame.expr.find_operations(Decode), None) is not None

    def lacks_images(self) -> bool:
        decode = last_decode(self._rows.expr)
        if decode is None or self.image not in decode.rows.columns:
            return False
        encoded = new_collection(rows_on_host(decode.rows))[self.image]
        found = encoded.map_partitions(_has_image, meta=pd.Series([], dtype="bool"))
        return not _computed(found, self._client).any()

    @property
    def is_augmented(self) -> bool:
        return is_augmented(self._frame.expr)

    def references(self) -> ReferenceSource | None:
        decode = last_decode(self._rows.expr)
        return None if decode is None else ReferenceSource(decode, self.image)

    def with_draw(self, draw: int) -> FrameSource:
        # Of rows that were moved already: a shuffle runs once.
        expr = with_draw(self._rows.expr, draw)
        if expr._name == self._rows.expr._name:
            return self
        return LazySource(new_collection(expr), self.image, self.shape, self._column)

    def counts(self) -> np.ndarray:
        return self._once_if_versioned(("rows", self._rows._name), self._count)

    def _once_if_versioned(self, key: tuple[str, str], compute: Callable[[], Value]) -> Value:
        """Computed once in a process if the name of the query has the versions of its files."""
        leaves = (node for node in self._rows.expr.walk() if not node.dependencies())
        is_versioned = all(isinstance(leaf, Scan) for leaf in leaves)
        if not is_versioned:
            return compute()
        for oldest in list(_query_facts)[:-_MOST_KNOWN]:
            _query_facts.pop(oldest, None)
        return once(_query_facts, key, compute)

    def _count(self) -> np.ndarray:
        decode = last_decode(self._rows.expr)
        frame = self._rows if decode is None else new_collection(decode.rows)
        images = {self.image, *image_columns(self._frame)}
        cheap = next((name for name in frame.columns if name not in images), frame.columns[0])
        rows = select_columns(frame, [cheap])
        if (known := known_lengths(rows.expr)) is not None:
            return np.array(known, np.int64)
        unindexed = unindexed_remote(rows.expr)
        worker = worker_of_loader()
        if unindexed is not None and (worker is None or worker[0] == 0):
            warn_user(
                "rows are counted before the first batch, and each process reads all of a shard "
                f"for that if it has no index, as {unindexed}. Run write_index() once: then each "
                "process fetches only the images of its rows"
            )
        lengths = rows.map_partitions(_length, meta=pd.Series([], dtype="int64"))
        at_once = unindexed is None and reads_remote(rows.expr)
        counts = _computed(lengths, self._client, _INDEXES_AT_ONCE if at_once else 1)
        result: np.ndarray = counts.to_numpy(np.int64)
        return result

    def row_bytes(self, number: int, held: Callable[[], PendingPartition] | None = None) -> float:
        images = image_columns(self.meta)
        if not images:
            return 1.0
        key = (f"bytes of a row of {number}", self._frame._name)
        return self._once_if_versioned(key, lambda: self._measure(number, images))

    def _measure(self, number: int, images: list[str]) -> float:
        sizes = (
            self._rows[images]
            .partitions[number]
            .map_partitions(_row_bytes, meta=pd.Series([], dtype="float64"))
        )
        return max(1.0, float(_computed(sizes, self._client).iloc[0]))


class ReferenceSource(LazySource):
    """Source of partitions of references, of which `take` decodes rows.

    The references are in host memory on both backends. The index of a decoded frame is the place of
    each row in the order that was asked for.
    """

    def __init__(self, decode: LastDecode, image: str | None) -> None:
        super().__init__(new_collection(rows_on_host(decode.rows)), image)
        self._backend = backend_of(decode.rows._meta)  # of what is decoded
        self._last = decode
        # A cluster's workers fetch what they decode.
        self.fetches_ahead = self._client is None and decode.is_remote
        self._ahead: EncodedAhead | None = None
        # The thread that takes rows from partitions, while another one decodes.
        self._gathering: Executor

    def __enter__(self) -> ReferenceSource:
        super().__enter__()
        # A failure is logged once in a loop, not for each group of rows.
        images = tuple(replace(image, told=set()) for image in self._last.images)
        self._last = replace(self._last, images=images)
        set_up = self._backend.thread_setup()
        self._gathering = DaemonThreads(1, thread_name_prefix="iter-batches-rows")
        self._gathering.submit(set_up)
        self._reading = self._gathering
        if self.fetches_ahead:
            self._reading = ThreadPoolExecutor(_INDEXES_AT_ONCE, "iter-batches-references", set_up)
            self._ahead = EncodedAhead(self._last.images)
        return self

    def __exit__(self, *error: object) -> None:
        is_ours = self._process == os.getpid()
        if is_ours and self._ahead is not None:
            self._ahead.close()
        super().__exit__(*error)
        if is_ours:
            self._gathering.shutdown(wait=False)
            self._reading.shutdown(wait=False)

    def encoded_bytes(self, part: PendingPartition) -> float:
        assert self._ahead is not None
        return self._ahead.mean_size(part())

    def fetch(self, part: PendingPartition, rows: np.ndarray) -> None:
        ahead = self._ahead
        assert ahead is not None
        self._gathering.submit(lambda: ahead.request(part().iloc[rows]))

    def row_bytes(self, number: int, held: Callable[[], PendingPartition] | None = None) -> float:
        """Estimate of the decoded bytes of a row; at least 1. For use while it is open."""
        assert held is not None
        rows = held()()
        nbytes = self._last.pixels(rows) if len(rows) else 0
        return _UNKNOWN_BYTES if nbytes is None else max(1.0, nbytes / max(1, len(rows)))

    def hold(self, pending: PendingPartition, rows_of: RowsOf) -> PendingPartition:
        return pending

    def take(
        self,
        parts: Sequence[tuple[PendingPartition, np.ndarray]],
        order: np.ndarray,
        draws: np.ndarray,
        shape: tuple[int, int] | None,
        rows_of: RowsOf,
    ) -> PendingRows:
        decode = (self._last if shape is None else self._last.resized(shape)).function
        seeds = draws if self._last.is_random and draws.any() else None
        rows = self._gathering.submit(_gather, parts, order)
        ahead = self._ahead
        if self._client is not None:
            sent = self._gathering.submit(lambda: self._submit(decode, rows.result(), seeds))
            name = f"{len(order)} rows of several partitions"
            decoded = self._threads.submit(lambda: self._fetch(sent.result(), lambda: name))
        elif ahead is None:
            decoded = self._threads.submit(lambda: decode(rows.result(), seeds))
        else:
            fetch = self._gathering.submit(lambda: ahead.take(rows.result()))
            decoded = self._threads.submit(
                lambda: decode(rows.result(), seeds, fetch_bytes=fetch.result())
            )

        def result() -> tuple[BatchRows, np.ndarray]:
            frame = decoded.result()
            batch, present = rows_of(frame)
            return batch, frame.index.to_numpy()[present]

        return result

    def _submit(
        self, decode: Callable[..., Any], rows: DataFrame, draws: np.ndarray | None
    ) -> RemoteFuture:
        assert self._client is not None
        future = self._client.submit(decode, rows, draws, pure=False)
        self._futures.add(future)
        return future


def _gather(parts: Sequence[tuple[PendingPartition, np.ndarray]], order: np.ndarray) -> Any:
    frames = [part().iloc[rows] for part, rows in parts]
    rows = frames[0] if len(frames) == 1 else concat(frames)
    return rows.iloc[order].reset_index(drop=True)


def source_of(
    frame: AnyFrame, columns: Sequence[str] | None, image: str | None = None
) -> FrameSource:
    """Source of the images of a frame and some of its other columns, None for all.

    ``image`` is the name of the image column; None for the frame's default, if it has images.
    """
    if image is None and image_columns(frame):
        image = image_column(frame)
    existing = list(frame.columns)
    chosen = existing if columns is None else column_names(columns, existing)
    check_unique(chosen, existing)
    names = [*([] if image is None else [image]), *(n for n in chosen if n != image)]
    if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ArgumentError(
            f"iter_batches: {', '.join(map(repr, repeated))} would be in a batch twice: name "
            "each column once in columns="
        )
    if not names:
        raise ArgumentError("iter_batches: the batches would have no column: name some")
    if not isinstance(frame, FrameBase):
        return FrameSource(frame[names], image, column=lambda name: values_or_shapes(frame[name]))
    shape = None if image is None else image_shape(frame.expr, image)
    column = functools.partial(_column, frame, names)
    return LazySource(_numbered(frame, names, names), image, shape, column)


def _column(frame: FrameBase, columns: list[str], name: str) -> pd.Series:
    """A column of all rows that the source of ``columns`` numbers, in its order."""
    rows = _numbered(frame, columns, list(dict.fromkeys([*columns, name])))
    meta = values_or_shapes(rows._meta[name])
    values = rows[name].map_partitions(values_or_shapes, meta=meta)
    threads = CPU_COUNT if worker_of_loader() is None else 1
    return as_pandas(_computed(values, client_that_computes(), threads))


def _numbered(frame: FrameBase, columns: list[str], names: list[str]) -> Any:
    return new_collection(with_bad_rows(select_columns(frame, names).expr, columns))


def _computed(collection: FrameBase, client: Client | None, threads: int = 1) -> Any:
    """Compute on a cluster, or here: not on Dask's threads, which a fork does not have."""
    with dask.config.set(_NUMBERED):
        if client is not None or threads == 1:
            return collection.compute(scheduler=client or "synchronous")
        with ThreadPoolExecutor(threads) as pool:
            return collection.compute(scheduler="threads", pool=pool)


def _length(frame: DataFrame) -> pd.Series:
    return pd.Series([len(frame)])


def _has_image(encoded: pd.Series) -> pd.Series:
    """True for a partition with bytes of an image, or a reference to some."""
    images = encoded.dropna()
    return pd.Series([any(getattr(each, "nbytes", 0) is not None or each.bytes for each in images)])


def _row_bytes(images: DataFrame) -> pd.Series:
    arrays = backend_of(images).arrays
    nbytes = sum(
        array.nbytes for name in images for array in arrays(images[name]) if array is not None
    )
    return pd.Series([nbytes / max(1, len(images))])


async def _set_up_threads(set_up: Callable[[], None]) -> None:
    """Call a function in both threads in which a client deserializes what it receives."""
    set_up()
    await offload(set_up)


#: What an order needs to know of the rows of its frames, such as their number.
Facts = MutableMapping[tuple[str, Any], Any]

Value = TypeVar("Value")

# Facts of the latest queries whose names have the versions of all their files: each epoch needs
# them.
_query_facts: Facts = {}
_MOST_KNOWN = 64


def once(facts: Facts, key: tuple[str, Any], compute: Callable[[], Value]) -> Value:
    """A fact, which is computed when it is first asked for."""
    value: Value | None = facts.get(key)
    if value is None:
        value = facts[key] = compute()
    return value


def check_count(frame: DataFrame, counted: int, describe: Callable[[], str]) -> DataFrame:
    """A partition that was read, if it has as many rows as were counted."""
    if len(frame) != counted:
        _query_facts.clear()
        raise ArgumentError(
            f"iter_batches: {describe()} has {len(frame):,} rows, and had {counted:,} when they "
            "were counted: its file has changed, or the query gives other rows each time. Begin "
            "again with a new iterator or loader, or write the rows once, with checkpoint"
        )
    return frame
