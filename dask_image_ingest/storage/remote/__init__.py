"""Shards that are not on this machine.

In: a URL and the options of its file system. Out: a reader of its bytes. From the ground up: fetch
(requests, latencies, retries), http and fsspec_source (the protocols), page_cache, reader.
"""

from dask_image_ingest.storage.remote.fsspec_source import call_fsspec, version_of
from dask_image_ingest.storage.remote.reader import open_remote

__all__ = ["call_fsspec", "open_remote", "version_of"]
