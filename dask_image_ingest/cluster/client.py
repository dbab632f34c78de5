"""Clients that close their cluster when they are closed."""

from __future__ import annotations

import contextlib
from typing import Any

import dask
from distributed import Client, LocalCluster, Status

THREADS = "image-ingest.decode-threads"

_CLOSE_TIMEOUT = 10  # seconds for a second attempt


class ClusterClient(Client):
    """Client that closes its cluster when it is closed."""

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client, then the cluster."""
        cluster = self.cluster
        try:
            return super().close(*args, **kwargs)
        finally:
            if cluster is not None and not self.asynchronous:
                _close(cluster)


class ThreadsClient(ClusterClient):
    """Client of workers in this process; sets the process's decode threads until it is closed.

    Parameters
    ----------
    cluster
        Cluster with ``processes=False``.
    threads
        Number of decode threads.
    """

    def __init__(self, cluster: LocalCluster, threads: int, **kwargs: Any) -> None:
        _use_threads(self, threads)
        try:
            super().__init__(cluster, **kwargs)
        except BaseException:
            _restore_threads(self)
            raise

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client and the cluster; restore the number of decode threads."""
        try:
            return super().close(*args, **kwargs)
        finally:
            _restore_threads(self)


def _close(cluster: LocalCluster) -> None:
    """Close a cluster, also if its workers are slow to end because the machine is busy."""
    if cluster.status == Status.closing:
        return  # an earlier close() failed, and Dask would wait forever
    try:
        cluster.close()
    except TimeoutError:
        # Workers that were killed did not end in time. Their nannies are closed already (but not
        # before dask 2026.8): close the rest.
        cluster.status = Status.failed
        with contextlib.suppress(TimeoutError):
            cluster.close(timeout=_CLOSE_TIMEOUT)


# Decode threads by id of each open client, and the setting before the first one.
_client_threads: dict[int, int] = {}
_original_threads: list[int | None] = []


def _use_threads(client: ThreadsClient, threads: int) -> None:
    if not _client_threads:
        _original_threads[:] = [dask.config.get(THREADS, None)]
    _client_threads[id(client)] = threads
    _set_threads(threads)


def _restore_threads(client: ThreadsClient) -> None:
    if _client_threads.pop(id(client), None) is not None:
        _set_threads(next(reversed(_client_threads.values()), _original_threads[0]))


def _set_threads(threads: int | None) -> None:
    """Configure the number of decode threads of this process; None removes the setting."""
    if threads is not None:
        dask.config.set({THREADS: threads})
        return
    dask.config.pop(THREADS, None)
    section = THREADS.partition(".")[0]
    if not dask.config.get(section, None):
        dask.config.pop(section, None)
