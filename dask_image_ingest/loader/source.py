"""Sources of partitions: a frame in memory, or a dask dataframe that is computed by partition.

The client maps the pixels of a worker on the same machine, where a socket would copy them four
times. The rest of the partition is pickled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import pandas as pd
from distributed import Future as RemoteFuture
from distributed import Worker, secede, wait
from distributed.scheduler import KilledWorker
from distributed.threadpoolexecutor import ThreadPoolExecutor as DaemonThreads
from distributed.utils import offload

from dask_image_ingest.computing import killed_by
from dask_image_ingest.dask_internals import convert_legacy_graph, cull, new_collection
from dask_image_ingest.dataset import (
    LastDecode,
    last_decode,
    persist_moves,
    shard_of_partition,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    MIN_SHARED_BYTES,
    backend_of,
    image_columns,
    map_block,
    pixel_memory,
    this_machine,
)
from dask_image_ingest.loader.batch_format import rows_of
from dask_image_ingest.loader.order import Size
from dask_image_ingest.scheduler_plugin import client_that_computes


@dataclass(frozen=True)
class _Pixels:
    """A block of pixels in shared memory of another process."""

    file: int  # descriptor in that process
    nbytes: int
    seal: bytes


@dataclass(frozen=True)
class _Mapping:
    """A pickled frame, with its pixels as blocks in shared memory of ``process``."""

    process: int
    frame: bytes
    buffers: list[bytes | _Pixels]


def map_remote(future: RemoteFuture) -> Any:
    """A finished partition with mapped pixels, without a copy; None if they cannot be mapped.

    The worker must be on this machine and run as the same user, and the pixels must be in shared
    memory.
    """
    client, key = future.client, future.key
    for worker in client.who_has([future]).get(key, ()):
        # On errors, such as the death of the worker, the transfer after None raises or retries.
        replies = client.run(
            _export_mapping, key, this_machine(), workers=[worker], on_error="ignore"
        )
        mapping = replies.get(worker)
        if mapping is None:
            continue
        try:
            buffers = [
                map_block(mapping.process, buffer.file, buffer.nbytes, buffer.seal)
                if isinstance(buffer, _Pixels)
                else buffer
                for buffer in mapping.buffers
            ]
        except OSError:
            continue
        # As safe as dask's own transfer: a worker of this cluster pickled it.
        return pickle.loads(mapping.frame, buffers=buffers)
    return None


def _export_mapping(key: Any, machine: str, dask_worker: Worker) -> _Mapping | None:
    """On a worker: describe a partition for the client to map; None if it cannot be mapped."""
    if not machine or machine != this_machine() or key not in dask_worker.data:
        return None
    pickled: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(dask_worker.data[key], protocol=5, buffer_callback=pickled.append)
    buffers: list[bytes | _Pixels] = []
    for buffer in pickled:
        with buffer.raw() as raw:
            buffers.append(_as_pixels(raw) or bytes(raw))
    is_shared = any(isinstance(part, _Pixels) for part in buffers)
    return _Mapping(os.getpid(), frame, buffers) if is_shared else None


def _as_pixels(raw: memoryview) -> _Pixels | None:
    """The shared block of a buffer; None for small buffers and those in other memory."""
    if raw.nbytes <= MIN_SHARED_BYTES:
        return None
    block = pixel_memory.shared_block(np.frombuffer(raw, np.uint8).ctypes.data)
    return None if block is None else _Pixels(block.file, raw.nbytes, block.seal)


logger = logging.getLogger("dask_image_ingest")

# Default read-ahead on a cluster: a partition for each thread, up to a number that bounds the
# memory, and two more, so that no thread is idle until a finished partition is used.
_EXTRA_PARTITIONS = 2
_MAX_THREADS = 8


class Source:
    """Source of a pandas or cuDF frame: one partition, or several of equal length."""

    def __init__(self, frame: Any, image: str, partitions: int = 1) -> None:
        self._frame = frame
        self._image = image
        self.partitions = partitions

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check_process(self) -> None:
        """Raise in a fork of the process that reads ahead.

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
        """Source of the same rows before their decode; None unless the decode is the last step."""
        return None

    def _part(self, number: int) -> Any:
        if self.partitions == 1:
            return self._frame
        rows = len(self._frame)
        first, last = (rows * edge // self.partitions for edge in (number, number + 1))
        return self._frame.iloc[first:last]


async def _set_up_threads(set_up: Callable[[], None]) -> None:
    """Call a function in both threads in which a client deserializes what it receives."""
    set_up()
    await offload(set_up)


class LazySource(Source):
    """Source of a dask dataframe: partitions are computed by a cluster, or on a thread here."""

    def __init__(self, frame: Any, image: str) -> None:
        super().__init__(frame, image)
        self._client = client_that_computes(collections=[frame])
        # The process whose thread or client this uses; None while it has neither.
        self._process = os.getpid() if self._client else None
        self._backend = backend_of(frame._meta)
        share = dask.config.get("image-ingest.share-pixels", True)
        # Whether to map pixels of workers on this machine; False after an attempt failed.
        self._can_map = share and self._backend.name == "pandas"
        self._threads: Executor | None = None
        # The thread that asked for the latest partition.
        self._reader = 0
        # What the cluster is computing or holds for this source.
        self._futures: set[RemoteFuture] = set()
        unfused = frame.optimize(fuse=False).expr
        self._secede()
        # Shuffle rows once, for all partitions: each partition is computed by itself, and would
        # otherwise run the whole shuffle again.
        moved = persist_moves(unfused, self._scheduler)
        self._prepare_graph(frame if moved is None else new_collection(moved))

    def _prepare_graph(self, frame: Any) -> None:
        """Build the graph once, from which `read` cuts out the tasks of each partition."""
        meta = pd.Series([], dtype="int64")
        images = image_columns(frame)
        if self._image not in images:
            images = [self._image]  # references, which are counted without a decode of others
        self._sizes = frame[images].map_partitions(self._measure, self._image, meta=meta)
        optimized = frame.optimize()
        self._keys = optimized.__dask_keys__()
        graph = optimized.__dask_graph__()
        if self._client is None:
            _refuse_remote(graph)
        self._graph = convert_legacy_graph(graph)
        self.partitions = len(self._keys)

    def check_process(self) -> None:
        """Raise in a fork of the process that reads ahead, whose threads a fork does not have.

        Raises
        ------
        ArgumentError
        """
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
            self._threads = ThreadPoolExecutor(1, "iter-batches", set_up)
        else:
            # Daemon threads: a script can end while a cluster is still computing.
            self._threads = DaemonThreads(1, thread_name_prefix="iter-batches")
            self._threads.submit(set_up)
            if self._backend.device == "gpu" and not self._client.asynchronous:
                # Frames arrive in Dask's own threads, which would use the first GPU.
                self._client.sync(_set_up_threads, set_up)
        return self

    def _secede(self) -> None:
        if self._client is not None:
            # Inside a task, as in dask's compute(): free the worker's thread for other tasks, among
            # them the partitions that this one waits for.
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                secede()

    @staticmethod
    def _measure(frame: Any, image: str) -> pd.Series:
        return pd.Series(_size(frame, image))

    def __exit__(self, *_: object) -> None:
        assert self._threads is not None
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

    def prefetch(self) -> int:
        """Default number of partitions to read ahead."""
        if self._client is None:
            return super().prefetch()
        if self._backend.device == "gpu":
            # They lie in this process's GPU, beside a model, and perhaps a worker and DALI.
            return _EXTRA_PARTITIONS
        threads: int = sum(self._client.nthreads().values())
        return _EXTRA_PARTITIONS + min(threads, _MAX_THREADS)

    def read(self, number: int) -> Future[Any]:
        """Start reading a partition."""
        assert self._threads is not None
        self._reader = threading.get_ident()
        key = self._keys[number]
        graph = cull(self._graph, [key])
        if self._client is None:
            return self._threads.submit(dask.get, graph, key)
        (future,) = self._client.get(graph, [key], sync=False)
        return self._fetch_later(future, functools.partial(self._describe, number))

    def _fetch_later(self, future: RemoteFuture, describe: Callable[[], str]) -> Future[Any]:
        assert self._threads is not None
        self._futures.add(future)
        return self._threads.submit(self._fetch, future, describe)

    def _describe(self, number: int) -> str:
        shard = shard_of_partition(self._frame.expr, number)
        return f"partition {number}" + (f", {shard}" if shard else "")

    def references(self) -> ReferenceSource | None:
        """Source of the same rows before their decode; None unless the decode is the last step."""
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

    def _mapped(self, future: Any) -> Any:
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


class ReferenceSource(LazySource):
    """Source of partitions of references; `decode` takes rows of several partitions."""

    def __init__(self, decode: LastDecode, image: str) -> None:
        super().__init__(new_collection(decode.rows), image)
        self._decode = decode.function
        # Splits rows into slices to decode together: `LastDecode.pieces`.
        self.pieces = decode.pieces
        # Estimates the decoded bytes of rows.
        self._pixels = decode.pixels

    def decoded_size(self, number: int) -> Size | None:
        """Rows of a partition, and an estimate of their decoded bytes; None without an estimate."""
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
        return self._fetch_later(future, lambda: f"{len(rows)} rows of several partitions")

    @staticmethod
    def _measure(frame: Any, image: str) -> pd.Series:
        return pd.Series([len(frame), 0])


def _size(frame: Any, image: str) -> Size:
    """Rows that `rows_of` keeps, and bytes of their images."""
    return rows_of(frame[image_columns(frame)], image, backend_of(frame))[0].size


def _refuse_remote(graph: Any) -> None:
    if any(isinstance(task, RemoteFuture) for task in graph.values()):
        raise ArgumentError(
            "iter_batches: the frame was persisted on a cluster of which this process has no "
            "client, as a worker of a torch DataLoader has none: iterate over the frame as it was "
            "before persist(), or in the process of the client"
        )
