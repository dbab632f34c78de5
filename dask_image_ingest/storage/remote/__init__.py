"""Remote shards.

In: a URL and its storage options. Out: a reader of its bytes. From the bottom up: fetch (retries,
latencies, thread pool), http and fsspec_source (protocols), page_cache, reader (read-ahead).
"""

from dask_image_ingest.storage.remote.fsspec_source import call_fsspec, version_of
from dask_image_ingest.storage.remote.remote_reader import open_remote

__all__ = ["call_fsspec", "open_remote", "version_of"]
