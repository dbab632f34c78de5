"""Chained URLs whose first link keeps copies: ``filecache::``, ``simplecache::``, ``blockcache::``.

fsspec says where copies lie and for how long they are good. Whole files are fetched here, since
fsspec's own download leaves half a file behind where it is broken off, and takes it for a whole one
the next time.
"""

from __future__ import annotations

import glob
import os
import shutil
import threading
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from dask_image_ingest.storage.fsspec_compat import file_system, translate_errors
from dask_image_ingest.storage.remote import open_remote
from dask_image_ingest.storage.shard import local_path

_WHOLE_FILES = ("filecache", "simplecache")

_PIECE = 4 << 20

# Seconds for which nothing was written to what is fetched: longer than any timeout.
_ABANDONED = 3600.0

# One for each file that was fetched: who comes second waits, and finds it.
_fetching: dict[str, threading.Lock] = defaultdict(threading.Lock)
os.register_at_fork(after_in_child=_fetching.clear)


def cached_copy(url: str, storage_options: dict[str, Any] | None) -> str | None:
    """The local copy of a shard, fetched if it is not there; None where URLs ask for no such thing.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    protocol, chained, behind = url.partition("::")
    if not chained or protocol not in _WHOLE_FILES:
        return None
    fs, path = file_system(url, storage_options)
    place = os.path.join(fs.storage[-1], fs._mapper(path))
    with _fetching[place]:
        copy = _copy(fs, path)
        if copy is None:
            fs.load_cache()  # what other threads and processes have noted down
            copy = _copy(fs, path)
        if copy is None:
            _fetch(behind, _options_behind(behind, protocol, storage_options), place)
            # This is how filecache knows since when it has it; and simplecache does not care.
            translate_errors(url, fs._make_local_details, path)
            fs.save_cache()
    return copy or place


def _copy(fs: CachingFileSystem, path: str) -> str | None:
    found = fs._check_file(path)
    if not found:
        return None
    copy: str = found[1] if isinstance(found, tuple) else found
    return copy


def _fetch(url: str, storage_options: dict[str, Any], place: str) -> None:
    """Fetch a shard; its copy appears when it is whole."""
    part = f"{place}.{uuid.uuid4().hex}.part"
    os.makedirs(os.path.dirname(place), exist_ok=True)
    _remove_abandoned(place)
    try:
        path = local_path(url)
        if path is not None:
            translate_errors(url, shutil.copyfile, path, part)
        else:
            with open_remote(url, storage_options) as content, open(part, "wb") as file:
                size = len(content)
                content.prefetch([(0, size)])
                pieces = range(0, size, _PIECE)
                file.writelines(content[start : start + _PIECE] for start in pieces)
        os.replace(part, place)
    finally:
        with suppress(FileNotFoundError):
            os.remove(part)


def _remove_abandoned(place: str) -> None:
    """Remove what processes that were killed have left of a copy."""
    for part in glob.glob(f"{glob.escape(place)}.*.part"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if time.time() - os.stat(part).st_mtime > _ABANDONED:
                os.remove(part)


def _options_behind(
    url: str, protocol: str, storage_options: dict[str, Any] | None
) -> dict[str, Any]:
    """The options of the file systems behind a cache: by protocol, as fsspec takes them."""
    options = {k: v for k, v in (storage_options or {}).items() if k != protocol}
    if "::" in url:
        return {k: v for k, v in options.items() if isinstance(v, dict)}
    found = options.get(url.partition("://")[0])
    return found if isinstance(found, dict) else {}
