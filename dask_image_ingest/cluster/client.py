"""Clients that take their cluster with them when they are closed."""

from __future__ import annotations

import contextlib
from typing import Any

import dask
from distributed import Client, LocalCluster, Status

THREADS = "image-ingest.decode-threads"

_SECONDS = 10  # for closing what has failed to close


class ClusterClient(Client):
    """A client that closes its cluster when it is closed."""

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client, then the cluster."""
        cluster = self.cluster
        try:
            return super().close(*args, **kwargs)
        finally:
            if cluster is not None and not self.asynchronous:
                _close(cluster)


class ThreadsClient(ClusterClient):
    """A client of workers in this process, which until it is closed decodes with other threads.

    Parameters
    ----------
    cluster
        Of workers without processes.
    threads
        How many this process decodes with.
    """

    def __init__(self, cluster: LocalCluster, threads: int, **kwargs: Any) -> None:
        _use_threads(self, threads)
        try:
            super().__init__(cluster, **kwargs)
        except BaseException:
            _restore_threads(self)
            raise

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client and the cluster; decode as open clients want it, or as before."""
        try:
            return super().close(*args, **kwargs)
        finally:
            _restore_threads(self)


def _close(cluster: LocalCluster) -> None:
    """Close a cluster whose workers may be slow to end, as where the machine is busy."""
    if cluster.status == Status.closing:
        return  # it has failed to close, and dask would wait for it for ever
    try:
        cluster.close()
    except TimeoutError:
        # Workers were killed and had not ended seconds later. Their nannies are closed already (not
        # so before dask 2026.8), and the rest is closed now.
        cluster.status = Status.failed
        with contextlib.suppress(TimeoutError):
            cluster.close(timeout=_SECONDS)


# How many threads each open client decodes with, and what was configured before the first.
_wanted: dict[int, int] = {}
_before: list[int | None] = []


def _use_threads(client: ThreadsClient, threads: int) -> None:
    if not _wanted:
        _before[:] = [dask.config.get(THREADS, None)]
    _wanted[id(client)] = threads
    _set_threads(threads)


def _restore_threads(client: ThreadsClient) -> None:
    if _wanted.pop(id(client), None) is not None:
        _set_threads(next(reversed(_wanted.values()), _before[0]))


def _set_threads(threads: int | None) -> None:
    """Configure how many threads this process decodes with; None leaves no trace of it."""
    if threads is not None:
        dask.config.set({THREADS: threads})
        return
    dask.config.pop(THREADS, None)
    above = THREADS.partition(".")[0]
    if not dask.config.get(above, None):
        dask.config.pop(above, None)
