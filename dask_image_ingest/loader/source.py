"""Sources of partitions: a frame in memory, or a dask dataframe that is computed part by part."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as await_futures
from typing import Any

import dask
import pandas as pd
from dask.base import get_scheduler
from distributed import Client, secede, wait
from distributed import Future as RemoteFuture
from distributed.scheduler import KilledWorker
from distributed.threadpoolexecutor import ThreadPoolExecutor as DaemonThreads

from dask_image_ingest.computing import killed_by
from dask_image_ingest.dask_internals import convert_legacy_graph, cull, new_collection
from dask_image_ingest.dataset import (
    LastDecode,
    last_decode,
    persist_moves,
    shard_of_partition,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, is_fork
from dask_image_ingest.loader.order import Size
from dask_image_ingest.loader.shared_memory import map_remote, share_pixels

logger = logging.getLogger("dask_image_ingest")

# Partitions that a cluster reads ahead by default: one for each thread, up to a number that bounds
# the memory, and some more, so that no thread is idle until a partition is used.
_MORE_THAN_THREADS = 2
_MOST_THREADS = 8

# Seconds in which workers, that may have to import the package first, are asked for memory that can
# be mapped; those that answer later send their first partitions.
_SHARE_SECONDS = 5.0


class Source:
    """A pandas or cuDF frame, as one partition or as several of equal length."""

    def __init__(self, frame: Any, image: str, partitions: int = 1) -> None:
        self._frame = frame
        self._image = image
        self.partitions = partitions

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check_process(self) -> None:
        """Refuse to go on in a fork of the process that reads ahead.

        Raises
        ------
        ArgumentError
        """

    def prefetch(self) -> int:
        """Default number of partitions to read ahead."""
        return 1

    def read(self, number: int) -> Future[Any]:
        """Start reading a partition."""
        done: Future[Any] = Future()
        done.set_result(self._part(number))
        return done

    def size(self, number: int) -> Size:
        """Rows of a partition, and bytes of its images."""
        return _size(self._part(number), self._image)

    def references(self) -> ReferenceSource | None:
        """The same rows before their decode; None where that is not the last that is done."""
        return None

    def _part(self, number: int) -> Any:
        if self.partitions == 1:
            return self._frame
        rows = len(self._frame)
        first, last = (rows * edge // self.partitions for edge in (number, number + 1))
        return self._frame.iloc[first:last]


class LazySource(Source):
    """Partitions of a dask dataframe, computed by a cluster or on a thread of this process."""

    def __init__(self, frame: Any, image: str) -> None:
        super().__init__(frame, image)
        self._client = _client(frame)
        # The process that this belongs to, while it has a thread or a client.
        self._process = os.getpid() if self._client else None
        self._backend = backend_of(frame._meta)
        share = dask.config.get("image-ingest.share-pixels", True)
        self._maps = share and self._backend.name == "pandas"
        self._threads: Executor | None = None
        self._reader = 0  # the thread that asked for a partition last
        self._futures: set[RemoteFuture] = set()
        unfused = frame.optimize(fuse=False).expr
        self._let_others_run()
        # Rows are moved once, or each partition would do so to be read, by itself and for all.
        moved = persist_moves(unfused, self._scheduler)
        self._plan(frame if moved is None else new_collection(moved))

    def _plan(self, frame: Any) -> None:
        """Have the graph of a frame ready, of which each partition is asked for by itself."""
        nothing = pd.Series([], dtype="int64")
        self._sizes = frame[[self._image]].map_partitions(self._measure, self._image, meta=nothing)
        optimized = frame.optimize()
        self._keys = optimized.__dask_keys__()
        graph = optimized.__dask_graph__()
        if self._client is None:
            _refuse_remote(graph)
        self._graph = convert_legacy_graph(graph)
        self.partitions = len(self._keys)

    def check_process(self) -> None:
        """Refuse to go on in a fork of the process that reads ahead: its threads are not there.

        Raises
        ------
        ArgumentError
        """
        if self._process not in (None, os.getpid()):
            raise ArgumentError(
                "iter_batches: this iterator belongs to the process of which this one is a fork, "
                "and its threads do not read here. Make another in the fork; the position of this "
                "one is .position, and with start= another goes on from there"
            )

    def __enter__(self) -> LazySource:
        self.check_process()
        self._process = os.getpid()
        self._let_others_run()
        set_up = self._backend.thread_setup()
        if self._client is None:
            self._threads = ThreadPoolExecutor(1, "iter-batches", set_up)
        else:
            # A script that ends does not wait for what a cluster still computes, or never will.
            self._threads = DaemonThreads(1, thread_name_prefix="iter-batches")
            self._threads.submit(set_up)
            if self._maps:
                self._ask_for_mappings()
        return self

    def _ask_for_mappings(self) -> None:
        # On a thread of its own: a worker that never answers holds nobody up for long.
        thread = DaemonThreads(1, thread_name_prefix="share-pixels")
        asked = thread.submit(share_pixels, self._client)
        thread.shutdown(wait=False)
        await_futures([asked], timeout=_SHARE_SECONDS)

    def _let_others_run(self) -> None:
        if self._client is not None:
            # Within a task, as dask's compute(): let the worker run other tasks meanwhile, of which
            # some are the partitions that this one waits for.
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                secede()

    @staticmethod
    def _measure(frame: Any, image: str) -> pd.Series:
        return pd.Series(_size(frame, image))

    def __exit__(self, *_: object) -> None:
        assert self._threads is not None
        if self._process != os.getpid():
            return  # the thread and what it reads are not of this process
        if self._client is None:
            self._process = None
        for future in tuple(self._futures):
            future.release()
        self._futures.clear()
        if isinstance(self._threads, DaemonThreads):
            self._threads.shutdown(wait=False)
        else:
            # The collector may close this on any thread, also on one that is waited for.
            own = self._reader == threading.get_ident()
            self._threads.shutdown(wait=own, cancel_futures=True)

    def prefetch(self) -> int:
        """Default number of partitions to read ahead."""
        if self._client is None:
            return super().prefetch()
        threads: int = sum(self._client.nthreads().values())
        return _MORE_THAN_THREADS + min(threads, _MOST_THREADS)

    def read(self, number: int) -> Future[Any]:
        """Start reading a partition."""
        assert self._threads is not None
        self._reader = threading.get_ident()
        key = self._keys[number]
        graph = cull(self._graph, [key])
        if self._client is None:
            return self._threads.submit(dask.get, graph, key)
        (future,) = self._client.get(graph, [key], sync=False)
        return self._fetched(future, functools.partial(self._describe, number))

    def _fetched(self, future: RemoteFuture, describe: Callable[[], str]) -> Future[Any]:
        assert self._threads is not None
        self._futures.add(future)
        return self._threads.submit(self._fetch, future, describe)

    def _describe(self, number: int) -> str:
        shard = shard_of_partition(self._frame.expr, number)
        return f"partition {number}" + (f", {shard}" if shard else "")

    def references(self) -> ReferenceSource | None:
        """The same rows before their decode; None where that is not the last that is done."""
        decode = last_decode(self._frame.expr)
        return None if decode is None else ReferenceSource(decode, self._image)

    def size(self, number: int) -> Size:
        """Rows of a partition, and bytes of its images."""
        rows, nbytes = self._sizes.partitions[number].compute(scheduler=self._scheduler)
        return Size(int(rows), int(nbytes))

    @property
    def _scheduler(self) -> Any:
        return "synchronous" if self._client is None else self._client

    def _fetch(self, future: Any, describe: Callable[[], str]) -> Any:
        if future not in self._futures:
            raise CancelledError  # closed meanwhile
        try:
            frame = self._mapped(future) if self._maps else None
            if frame is not None:
                return frame
            # Directly from the worker, where the client can reach it, not through the scheduler.
            return future.client.gather(future, direct=True)
        except KilledWorker as error:
            raise killed_by(error, describe()) from error
        finally:
            self._futures.discard(future)
            future.release()

    def _mapped(self, future: Any) -> Any:
        with future.client.as_current():
            wait([future])
        try:
            return map_remote(future)
        except Exception:
            # A cluster may forbid running functions on its workers; the transfer still works.
            logger.debug("pixels are sent and not mapped", exc_info=True)
            self._maps = False
            return None


class ReferenceSource(LazySource):
    """Partitions of references, any rows of which can be decoded together."""

    def __init__(self, decode: LastDecode, image: str) -> None:
        super().__init__(new_collection(decode.rows), image)
        self._decode = decode.function
        self.pieces = decode.pieces
        self._pixels = decode.pixels

    def decoded_size(self, number: int) -> Size | None:
        """Rows of a partition, and about how many bytes they decode to; None if they hold files."""
        with self:
            rows = self.read(number).result()
        nbytes = self._pixels(rows)
        return None if nbytes is None else Size(len(rows), nbytes)

    def decode(self, rows: Any) -> Future[Any]:
        """Start decoding rows of any partitions."""
        assert self._threads is not None
        if self._client is None:
            return self._threads.submit(self._decode, rows)
        future = self._client.submit(self._decode, rows, pure=False)
        return self._fetched(future, lambda: f"{len(rows)} rows of several partitions")

    @staticmethod
    def _measure(frame: Any, image: str) -> pd.Series:
        return pd.Series([len(frame), 0])


def _size(frame: Any, image: str) -> Size:
    arrays = backend_of(frame).arrays(frame[image])
    present = [array.nbytes for array in arrays if array is not None]
    return Size(len(present), sum(present))


def _client(frame: Any) -> Client | None:
    """The client of the cluster on which dask would compute this frame."""
    if is_fork():
        return None
    client = getattr(get_scheduler(collections=[frame]), "__self__", None)
    return client if isinstance(client, Client) else None


def _refuse_remote(graph: Any) -> None:
    if any(isinstance(task, RemoteFuture) for task in graph.values()):
        raise ArgumentError(
            "iter_batches: the frame was persisted on a cluster of which this process has no "
            "client, as a worker of a torch DataLoader has none: iterate over the frame as it was "
            "before persist(), or in the process of the client"
        )
