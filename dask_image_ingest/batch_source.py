"""Where ``iter_batches`` has its partitions from: a frame in memory, or one that is read ahead."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import dask
import pandas as pd
from dask._task_spec import convert_legacy_graph, cull
from dask.base import get_scheduler
from distributed import Client, wait

from dask_image_ingest.frames import backend_of
from dask_image_ingest.shared_pixels import borrow

logger = logging.getLogger("dask_image_ingest")

# What a cluster reads ahead where nothing is said: so many more than its workers have threads, that
# none has to wait until a partition is used. The pixels of many more would not be a few.
_MORE_THAN_THREADS = 2
_MOST_THREADS = 8


class Source:
    """Partitions that are already here: one pandas or cuDF frame."""

    partitions = 1

    def __init__(self, frame: Any, image: str) -> None:
        self._frame = frame
        self._image = image

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prefetch(self, buffered: int) -> int:
        """How many partitions to read ahead by default, beside so many that wait to be used."""
        return 1

    def read(self, number: int) -> Future:
        """Begin to read a partition."""
        done: Future = Future()
        done.set_result(self._frame)
        return done

    def count(self, number: int) -> int:
        """How many images a partition has."""
        return count_images(self._frame, self._image)


class LazySource(Source):
    """Partitions of a dask dataframe, read ahead on a cluster's workers or on a thread here."""

    def __init__(self, frame: Any, image: str) -> None:
        super().__init__(frame, image)
        nothing = pd.Series([], dtype="int64")
        self._counts = frame[[image]].map_partitions(_counted, image, meta=nothing)
        optimized = frame.optimize()
        self._keys = optimized.__dask_keys__()
        self._graph = convert_legacy_graph(optimized.__dask_graph__())
        self._client = _client(frame)
        self._lends = backend_of(frame._meta).name == "pandas"
        self.partitions = len(self._keys)
        self._threads: ThreadPoolExecutor | None = None
        self._futures: set = set()

    def __enter__(self) -> LazySource:
        self._threads = ThreadPoolExecutor(1, "iter-batches")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._threads is not None
        for future in tuple(self._futures):
            future.release()
        self._futures.clear()
        self._threads.shutdown(wait=self._client is None, cancel_futures=True)

    def prefetch(self, buffered: int) -> int:
        """How many partitions to read ahead by default, beside so many that wait to be used."""
        if self._client is None:
            return super().prefetch(buffered)
        threads = sum(self._client.nthreads().values())
        return _MORE_THAN_THREADS + min(threads, _MOST_THREADS) + buffered

    def read(self, number: int) -> Future:
        """Begin to read a partition."""
        assert self._threads is not None
        key = self._keys[number]
        graph = cull(self._graph, [key])
        if self._client is None:
            return self._threads.submit(dask.get, graph, key)
        (future,) = self._client.get(graph, [key], sync=False)
        self._futures.add(future)
        return self._threads.submit(self._fetch, future)

    def count(self, number: int) -> int:
        """How many images a partition has."""
        return int(self._counts.partitions[number].compute().sum())

    def _fetch(self, future: Any) -> Any:
        try:
            frame = self._borrowed(future) if self._lends else None
            if frame is not None:
                return frame
            # From the worker itself, not through the scheduler, wherever the client can reach it.
            return future.client.gather(future, direct=True)
        finally:
            self._futures.discard(future)
            future.release()

    def _borrowed(self, future: Any) -> Any:
        with future.client.as_current():
            wait([future])
        try:
            return borrow(future)
        except Exception:
            # A cluster may let nobody ask its workers; sending works all the same.
            logger.debug("pixels are sent and not mapped", exc_info=True)
            self._lends = False
            return None


def count_images(frame: Any, image: str) -> int:
    """How many rows of a partition have an image."""
    return int(frame[image].notna().sum())


def _counted(frame: Any, image: str) -> pd.Series:
    return pd.Series([count_images(frame, image)])


def _client(frame: Any) -> Client | None:
    """The client of the cluster on which dask would compute this frame."""
    client = getattr(get_scheduler(collections=[frame]), "__self__", None)
    return client if isinstance(client, Client) else None
