"""Shards on the Hugging Face Hub: ranges from where a file's bytes are, once the Hub has told.

The Hub answers a request for a file with a redirect to a storage that needs no token, by an address
that is valid for some minutes. It is kept, so that each range takes one round trip, and asked for
again when the storage refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit

import urllib3

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.fetch import RetryableError, Settings
from dask_image_ingest.storage.http_source import HTTPSource
from dask_image_ingest.storage.shard import FileSystem

# Kinds of repositories that are the first name of a path; one without is a model.
_KINDS = ("datasets", "spaces", "buckets")


class HubSource(HTTPSource):
    """A shard on the Hub; requests as in `HTTPSource`.

    The token goes to the Hub alone: that of ``storage_options``, or of the process's environment.
    """

    def __init__(self, url: str, fs: FileSystem, path: str, settings: Settings) -> None:
        super().__init__(url, lambda: self._hub, {}, settings)
        self._hub = hub_address(fs.endpoint, path)
        self._token = fs.token
        self._location: str | None = None

    def _target(self) -> tuple[str, Mapping[str, str]]:
        if self._location is not None:
            return self._location, self._headers
        from huggingface_hub.utils import build_hf_headers

        return self._hub, self._headers | build_hf_headers(token=self._token)

    def _answered(self, address: str, response: urllib3.BaseHTTPResponse) -> None:
        if address != self._hub:
            return
        history = response.retries.history if response.retries is not None else ()
        last = history[-1].redirect_location if history else None
        if last and urlsplit(last).netloc not in ("", urlsplit(self._hub).netloc):
            self._location = last

    def _raise_for_status(self, address: str, response: urllib3.BaseHTTPResponse) -> None:
        try:
            super()._raise_for_status(address, response)
        except (ShardError, ShardNotFoundError) as error:
            if address == self._hub:
                raise
            # Another thread may have asked again already.
            if self._location == address:
                self._location = None
            raise RetryableError("the address that the Hub gave is not valid any more") from error


def hub_address(endpoint: str, path: str) -> str:
    """The address of a file on the Hub; without a request, which fsspec's file system makes.

    Examples
    --------
    >>> hub_address("https://huggingface.co", "datasets/org/name@v1/train/000.tar")
    'https://huggingface.co/datasets/org/name/resolve/v1/train/000.tar'
    """
    kind = path.partition("/")[0]
    prefix = f"{kind}/" if kind in _KINDS else ""
    owner, name, file = path.removeprefix(prefix).split("/", 2)
    name, _, revision = name.partition("@")
    if revision == "refs":  # refs/pr/1, refs/convert/parquet
        first, second, file = file.split("/", 2)
        revision = f"refs/{first}/{second}"
    revision = "" if kind == "buckets" else quote(unquote(revision) or "main", safe="") + "/"
    return f"{endpoint}/{prefix}{owner}/{name}/resolve/{revision}{quote(file)}"
