"""Shards that are not on this machine.

In: a URL and the options of its file system. Out: its bytes, as something that is fetched where it
is sliced. From the ground up: ranges (which requests to make), source (what a protocol has to
give: `http`, `other`), modified, pace, retry, threads, extents (what is here), remote_bytes,
connect.
"""

from dask_image_ingest.storage.remote.connect import open_remote
from dask_image_ingest.storage.remote.other import asked, version_of
from dask_image_ingest.storage.remote.remote_bytes import RemoteBytes

__all__ = ["RemoteBytes", "asked", "open_remote", "version_of"]
