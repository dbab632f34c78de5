"""Rows of image files: one per file, or one per key of several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.predicates import Predicate, only
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.partitioning import ShardSplit, digest_of_url
from dask_image_ingest.dataset.scan.rows import NO_MEMBER, ImageRows
from dask_image_ingest.decode import Header, Origin
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.frames import references_of_fields
from dask_image_ingest.storage import Shard, is_pipe, is_web, local_path, open_file
from dask_image_ingest.tar import HEAD, ShardIndex, open_member

Self = TypeVar("Self", bound="FileRows")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Columns with a class, of ``label="folder"``.
CLASS_COLUMNS: Final = {"label": pa.int64(), "class_name": pa.string()}

#: Encoded bytes of a partition at most: some hundred photographs, a second of work or less. A
#: larger file is a partition of its own.
MOST_ENCODED = 32 << 20

# Columns that the listing tells.
_LISTED = frozenset({"__key__", "__url__", "offset", "nbytes", *CLASS_COLUMNS})

# Remote files fetched concurrently.
_REMOTE_AT_ONCE = 8

_NO_INDEX = ShardIndex()


class FileRows(ImageRows):
    """The files of one partition, opened when headers or pixels are needed.

    The ``part`` of each split is the number of its row; files of one row are neighbours.
    """

    cached = frozenset({"_keys", "_urls", "files", "headers", "encoded"})
    of_image = frozenset({"files", "headers", "encoded"})

    def __init__(self, splits: Sequence[ShardSplit], options: ReadOptions) -> None:
        super().__init__(options.root or "", 0, options)
        rows: dict[int, list[Shard]] = {}
        for split in splits:
            rows.setdefault(split.part, []).append(split.shard)
        self.numbers = np.array(list(rows), np.int64)
        self._classes = options.classes
        self._storage_options = options.storage_options
        _, *others = options.images
        every = [e for each in options.images for e in each.extensions] if others else []
        by_extension = [
            {extension_of(file.url, every): file for file in files} for files in rows.values()
        ]

        def files_of(extensions: Sequence[str]) -> list[Shard | None]:
            if not every:
                return [files[0] for files in rows.values()]
            return [next((f[e] for e in extensions if e in f), None) for f in by_extension]

        #: The file of each row that is its image, and the row's key and URL.
        self.files = files_of(self.extensions)
        self._keys = [key_of(files[0].url, self.url, every) for files in rows.values()]
        self._urls = [
            (file or files[0]).url for file, files in zip(self.files, rows.values(), strict=True)
        ]
        for member in others:
            self.of(member).files = files_of(member.extensions)

    @property
    def keys(self) -> list[str]:
        return self._keys

    @property
    def labels(self) -> np.ndarray:
        """A digest of each URL; two of a million are equal once in ten million reads."""
        return np.array(list(map(digest_of_url, self._urls)), np.int64)

    @cached_property
    def headers(self) -> list[Header]:
        return [header for header, _ in self._open(self.files, whole=False)]

    @cached_property
    def encoded(self) -> list[bytes | None]:
        """The encoded images; None for a file that is no image. Sets ``headers``, too."""
        opened = self._open(self.files, whole=True)
        self.headers = [header for header, _ in opened]
        return [data for _, data in opened]

    def expect_images(self) -> None:
        self.encoded  # noqa: B018 # opens each file once, for header and pixels

    def image_bytes(self, row: int) -> bytes | None:
        return self.encoded[row]

    def origin(self, row: int) -> Origin:
        return origin_of_key(self.keys[row], self._url(row))

    def _url(self, row: int) -> str:
        file = self.files[row]
        return self._urls[row] if file is None else file.url

    def keep(self: Self, filters: Predicate | None) -> Self:
        """The rows for which ``filters`` hold. Filters on what the listing tells run first."""
        rows = super().keep(only(filters, _LISTED))
        return super(FileRows, rows).keep(filters)

    def column(self, name: str) -> pa.Array:
        if name == "__key__":
            return pa.array(self.keys, pa.string())
        if name == "__url__":
            return pa.array(self._urls, pa.string())
        if name == "offset":
            return pa.array([None if file is None else 0 for file in self.files], pa.int64())
        if name == "nbytes":
            return pa.array([file and file.size for file in self.files], pa.int64())
        if name in CLASS_COLUMNS:
            numbers = {folder: number for number, folder in enumerate(self._classes or ())}
            folders = [class_of(url, self.url) for url in self._urls]
            labels = [None if each is None else numbers[each] for each in folders]
            return pa.array(labels if name == "label" else folders, CLASS_COLUMNS[name])
        return super().column(name)

    def references(self) -> pa.StructArray:
        sizes = self.column("nbytes")
        fields = {
            "url": pa.array(map(self._url, range(len(self))), pa.string()),
            "shard_size": sizes,
            "version": pa.array([file and file.version for file in self.files], pa.string()),
            "key": self.column("__key__"),
            "offset": self.column("offset"),
            "nbytes": sizes,
        }
        return references_of_fields(len(self), fields)

    def _open(
        self, files: Sequence[Shard | None], whole: bool
    ) -> list[tuple[Header, bytes | None]]:
        """Header and, if ``whole``, bytes of each file; a file that is no image has no bytes."""

        def read(file: Shard | None) -> tuple[Header, bytes | None]:
            if file is None:
                return NO_MEMBER, None
            # The header of a large file tells whether the rest is worth reading.
            at_once = whole and file.size <= MOST_ENCODED
            try:
                with open_file(file.url, self._storage_options, file) as content:
                    content.prefetch([(0, file.size if at_once else min(file.size, HEAD))])
                    data = bytes(content[:]) if at_once else None
                    head = open_member(content, _NO_INDEX, (0, file.size)) if data is None else data
                    header = self._decoding.read_header(head)
                    if whole and not at_once and header.error is None:
                        data = bytes(content[:])
            except (ShardError, ShardNotFoundError) as error:
                return missing_file(file.url, error), None
            return header, data if header.error is None else None

        return for_each(read, files, [file.url for file in files if file is not None])


def missing_file(url: str, error: ShardError | ShardNotFoundError) -> Header:
    """The header of an image file that is gone or can't be read; raises any other error."""
    if isinstance(error, ShardNotFoundError):
        why = "the file is gone since it was listed"
    elif local_path(url) is not None and isinstance(error.__cause__, OSError):
        why = f"the file can't be read: {error.__cause__.strerror}"
    else:
        raise error
    return Header(None, None, None, None, f"missing: {why}", needs_pillow=True)


def for_each(
    function: Callable[[_Item], _Result], items: Iterable[_Item], urls: Iterable[str]
) -> list[_Result]:
    """Call a function that reads an item: concurrently if some of their URLs are remote."""
    # Local files would only compete for the disk. The output of a pipe is held in memory as a
    # whole: a second one at a time would double that.
    items = list(items)
    if len(items) < 2 or all(local_path(url) is not None or is_pipe(url) for url in urls):
        return list(map(function, items))
    with ThreadPoolExecutor(_REMOTE_AT_ONCE) as threads:
        return list(threads.map(function, items))


def key_of(url: str, root: str, extensions: Sequence[str] = ()) -> str:
    """The path of a file below the root, without its suffix: the longest of ``extensions``."""
    folder, slash, name = _path(url.removeprefix(root)).removeprefix("/").rpartition("/")
    stem = name[: -len(extension_of(name, extensions) or name.rpartition(".")[2]) - 1]
    return f"{folder}{slash}{stem or name}"


def extension_of(url: str, extensions: Sequence[str]) -> str | None:
    """The longest of the extensions that a file has; None if it has none of them."""
    path = _path(url).lower()
    return max((e for e in extensions if path.endswith(f".{e}")), key=len, default=None)


def _path(url: str) -> str:
    return url.partition("?")[0] if is_web(url) else url


def class_of(url: str, root: str) -> str | None:
    """The folder directly below the root that contains a file; None if there is none."""
    folder, slash, _ = key_of(url, root).partition("/")
    return folder if slash else None


def origin_of_key(key: str, url: str) -> Origin:
    """The identity of an image that is no part of a shard: its key seeds random transforms."""
    data = key.encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    where = f" of {url}" if url else ""
    return Origin("", int.from_bytes(digest, "little"), f"sample {key!r}{where}")
