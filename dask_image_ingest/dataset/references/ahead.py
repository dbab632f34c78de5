"""Encoded images of remote shards that are fetched before the rows that need them are decoded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from dask_image_ingest.dataset.references.fetch import (
    Fetch,
    encoded_sizes,
    fetch_encoded,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.scan.decode_rows import ColumnDecode
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ShardError
from dask_image_ingest.frames import ImageReference

# Bytes between two images that are fetched with them: their headers, captions and labels. Images
# between them are not, since another process decodes these.
_GAP = 8 << 10

# Ranges that are fetched at once.
_AT_ONCE = 16

_Bytes: TypeAlias = bytes | memoryview | Header


def fetch_rows(
    references: Sequence[ImageReference], storage_options: dict[str, Any] | None
) -> list[_Bytes]:
    """Fetch encoded images as `fetch_encoded` does, and next to nothing between them."""
    return fetch_encoded(references, storage_options, gap=_GAP)


class EncodedAhead:
    """Fetches encoded images in background threads, and holds them until they are taken.

    Calls come from one thread.
    """

    def __init__(self, images: Sequence[ColumnDecode]) -> None:
        self._images = images
        self._threads = ThreadPoolExecutor(_AT_ONCE, "image-ingest-ahead")
        self._requested: dict[ImageReference, Future[_Bytes]] = {}
        # No request begins after `close`: nothing would end its futures.
        self._lock = threading.Lock()
        self._closed = False

    def mean_size(self, rows: Any) -> float:
        """Encoded bytes of a row of a frame, on average."""
        sizes = [encoded_sizes(rows, each) for each in self._images]
        return float(sum(nbytes.sum() for nbytes in sizes)) / max(1, len(rows))

    def request(self, rows: Any) -> None:
        """Start fetching the images of a frame, by one request for all that are adjacent."""
        for storage_options, references in self._by_options(rows):
            new = {each: Future[_Bytes]() for each in references if each not in self._requested}
            with self._lock:
                if new and not self._closed:
                    self._threads.submit(self._fetch, storage_options, new)
                    self._requested |= new

    def take(self, rows: Any) -> Fetch:
        """Hand over the images of a frame: a function for `FetchedImages`, which waits for them.

        Those that were not requested are fetched by that function.
        """
        taken = {
            reference: self._requested.pop(reference)
            for _, references in self._by_options(rows)
            for reference in references
            if reference in self._requested
        }

        def fetch(
            references: Sequence[ImageReference], storage_options: dict[str, Any] | None
        ) -> list[_Bytes]:
            self._check_open()
            others = [each for each in references if each not in taken]
            fetched = dict(zip(others, fetch_rows(others, storage_options), strict=True))
            return [taken[each].result() if each in taken else fetched[each] for each in references]

        return fetch

    def close(self) -> None:
        """Drop all images, and end the threads without waiting for them."""
        with self._lock:
            self._closed = True
            self._requested.clear()
        self._threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise ShardError("the iteration was closed while images were fetched")

    def _by_options(
        self, rows: Any
    ) -> list[tuple[dict[str, Any] | None, dict[ImageReference, None]]]:
        """Distinct references of images that are in some shard, by their ``storage_options``."""
        groups: list[tuple[dict[str, Any] | None, dict[ImageReference, None]]] = []
        for each in self._images:
            found = {
                reference: None
                for reference in reference_rows(references_of(rows, each.image))
                if reference is not None and reference.bytes is None
            }
            same = [group for options, group in groups if options == each.storage_options]
            if same:
                same[0].update(found)
            else:
                groups.append((each.storage_options, found))
        return groups

    def _fetch(
        self,
        storage_options: dict[str, Any] | None,
        futures: dict[ImageReference, Future[_Bytes]],
    ) -> None:
        try:
            self._check_open()
            fetched = fetch_rows(list(futures), storage_options)
        except BaseException as error:
            for future in futures.values():
                future.set_exception(error)
        else:
            for future, image in zip(futures.values(), fetched, strict=True):
                future.set_result(image)
