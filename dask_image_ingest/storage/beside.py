"""Files that lie beside shards: called as these are, but for the suffix."""

from collections.abc import Iterable
from typing import Any

from dask_image_ingest.listing_progress import listing
from dask_image_ingest.storage.local_listing import find_local_file
from dask_image_ingest.storage.patterns import without_suffix
from dask_image_ingest.storage.pipe import is_pipe
from dask_image_ingest.storage.remote_listing import Listings, find_files
from dask_image_ingest.storage.shard import Shard
from dask_image_ingest.storage.url import local_path, split_url

__all__ = ["find_beside"]


def find_beside(
    shards: Iterable[Shard],
    suffix: str,
    storage_options: dict[str, Any] | None,
    listings: Listings,
) -> list[Shard | None]:
    """Find the file with this suffix beside each shard; None where there is none.

    A folder is listed once, a web page too. A web server that lists nothing is asked for one file,
    and has the others if it has that: their size is -1 then, and no version is known.
    """
    urls = [_beside(shard.url, suffix) for shard in shards]
    named = list(filter(None, urls))
    with listing(f"the {suffix} files beside the shards"):
        found = {url: find_local_file(url) for url in named if local_path(url) is not None}
        remote = [url for url in named if local_path(url) is None]
        found |= find_files(remote, storage_options, listings)
    return [None if url is None else found[url] for url in urls]


def _beside(url: str, suffix: str) -> str | None:
    if is_pipe(url):
        return None
    head, path, tail = ("", url, "") if local_path(url) is not None else split_url(url)
    stem = without_suffix(path)
    return None if stem is None else f"{head}{stem}{suffix}{tail}"
