"""Rows of image files: one per file, or one per key of several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.predicates import Predicate, only
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.partitioning import ShardSplit, digest_of_url
from dask_image_ingest.dataset.scan.rows import NO_MEMBER, ImageRows, missing_image
from dask_image_ingest.dataset.schema.columns import ImageMember
from dask_image_ingest.decode import EncodedImages, Header, Origin
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.frames import references_of_fields
from dask_image_ingest.storage import (
    Shard,
    is_pipe,
    local_path,
    open_file,
    request_all,
    without_query,
)
from dask_image_ingest.tar import HEAD, ShardIndex, open_member

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Columns with a class, of ``label="folder"``.
CLASS_COLUMNS: Final = {"label": pa.int64(), "class_name": pa.string()}

#: Encoded bytes of a partition at most: some hundred photographs, a second of work or less. A
#: larger file is a partition of its own.
MOST_ENCODED = 32 << 20

# Columns that the listing tells.
_LISTED = frozenset({"__key__", "__url__", "offset", "nbytes", *CLASS_COLUMNS})

_NO_INDEX = ShardIndex()


class FileRows(ImageRows):
    """The files of one partition, opened when headers or pixels are needed.

    The ``part`` of each split is the number of its row; files of one row are neighbours.
    """

    def __init__(self, splits: Sequence[ShardSplit], options: ReadOptions) -> None:
        #: Number of a row → its files.
        self._rows: dict[int, list[Shard]] = {}
        for split in splits:
            self._rows.setdefault(split.part, []).append(split.shard)
        super().__init__(options.root or "", np.array(list(self._rows), np.int64), options)
        several = len(options.images) > 1
        #: All extensions of images, if there are several image columns.
        self._every = [e for member in options.images for e in member.extensions] if several else []
        #: Image column → number of a row → encoded image; None for a file that is no image.
        self._encoded: dict[str, dict[int, bytes | None]] = {}

    def _file(self, member: ImageMember, number: int) -> Shard | None:
        """The file of a row that is its image."""
        files = self._rows[number]
        if not self._every:
            return files[0]
        by_extension = {extension_of(file.url, self._every): file for file in files}
        return next((by_extension[e] for e in member.extensions if e in by_extension), None)

    def _url(self, member: ImageMember, number: int) -> str:
        return (self._file(member, number) or self._rows[number][0]).url

    def images(self, member: ImageMember, numbers: np.ndarray) -> EncodedImages:
        self.expect(member, numbers)
        return super().images(member, numbers)

    def _read_headers(self, member: ImageMember, numbers: np.ndarray) -> list[Header]:
        files = [self._file(member, number) for number in numbers.tolist()]
        return [header for header, _ in self._open(member, files, whole=False)]

    def expect(self, member: ImageMember, numbers: np.ndarray) -> None:
        """Open each file once, for header and pixels."""
        known = self._encoded.setdefault(member.column, {})
        new = [number for number in numbers.tolist() if number not in known]
        opened = self._open(member, [self._file(member, number) for number in new], whole=True)
        headers = self._headers.setdefault(member.column, {})
        for number, (header, data) in zip(new, opened, strict=True):
            headers[number], known[number] = header, data

    def _reader(
        self, member: ImageMember, numbers: np.ndarray
    ) -> tuple[Callable[[int], Any], Callable[[], None]]:
        known, rows = self._encoded[member.column], numbers.tolist()
        return lambda row: known[rows[row]], lambda: None

    def _origin(self, member: ImageMember, number: int, key: str) -> Origin:
        return origin_of_key(key, self._url(member, number))

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """A digest of each URL; two of a million are equal once in ten million reads."""
        first = self.options.images[0]
        digests = [digest_of_url(self._url(first, number)) for number in numbers.tolist()]
        return np.array(digests, np.int64)

    def keep(self, numbers: np.ndarray, filters: Predicate | None) -> np.ndarray:
        """The rows for which ``filters`` hold. Filters on what the listing tells run first."""
        return super().keep(super().keep(numbers, only(filters, _LISTED)), filters)

    def column(self, name: str, numbers: np.ndarray) -> pa.Array:
        first, rows = self.options.images[0], numbers.tolist()
        if name == "__key__":
            keys = [path_key(self._rows[row][0].url, self.url, self._every) for row in rows]
            return pa.array(keys, pa.string())
        if name == "__url__":
            return pa.array([self._url(first, row) for row in rows], pa.string())
        if name in CLASS_COLUMNS:
            classes = {folder: label for label, folder in enumerate(self.options.classes or ())}
            folders = [class_of(self._url(first, row), self.url) for row in rows]
            labels = [None if folder is None else classes[folder] for folder in folders]
            return pa.array(labels if name == "label" else folders, CLASS_COLUMNS[name])
        return super().column(name, numbers)

    def field(self, member: ImageMember, name: str, numbers: np.ndarray) -> pa.Array:
        if name in ("offset", "nbytes"):
            files = [self._file(member, number) for number in numbers.tolist()]
            sizes = [file and (file.size if name == "nbytes" else 0) for file in files]
            return pa.array(sizes, pa.int64())
        return super().field(member, name, numbers)

    def references(self, member: ImageMember, numbers: np.ndarray) -> pa.StructArray:
        sizes, rows = self.field(member, "nbytes", numbers), numbers.tolist()
        versions = [file and file.version for file in (self._file(member, row) for row in rows)]
        fields = {
            "url": pa.array([self._url(member, row) for row in rows], pa.string()),
            "shard_size": sizes,
            "version": pa.array(versions, pa.string()),
            "key": self.column("__key__", numbers),
            "offset": self.field(member, "offset", numbers),
            "nbytes": sizes,
        }
        return references_of_fields(len(numbers), fields)

    def _open(
        self, member: ImageMember, files: Sequence[Shard | None], whole: bool
    ) -> list[tuple[Header, bytes | None]]:
        """Header and, if ``whole``, bytes of each file; a file that is no image has no bytes."""

        def read(file: Shard | None) -> tuple[Header, bytes | None]:
            if file is None:
                return NO_MEMBER, None
            # The header of a large file tells whether the rest is worth reading.
            at_once = whole and file.size <= MOST_ENCODED
            try:
                with open_file(file.url, self.options.storage_options, file) as content:
                    content.prefetch([(0, file.size if at_once else min(file.size, HEAD))])
                    data = bytes(content[:]) if at_once else None
                    head = open_member(content, _NO_INDEX, (0, file.size)) if data is None else data
                    header = member.decoding.read_header(head)
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
    return missing_image(why)


def for_each(
    function: Callable[[_Item], _Result], items: Iterable[_Item], urls: Iterable[str]
) -> list[_Result]:
    """Call a function that reads an item: concurrently if some of their URLs are remote."""
    # Local files would only compete for the disk. The output of a pipe is held in memory as a
    # whole: a second one at a time would double that.
    items = list(items)
    if len(items) < 2 or all(local_path(url) is not None or is_pipe(url) for url in urls):
        return list(map(function, items))
    return request_all(function, items)


def path_key(url: str, root: str, extensions: Sequence[str] = ()) -> str:
    """The path of a file below the root, without its suffix: the longest of ``extensions``."""
    folder, slash, name = without_query(url.removeprefix(root)).removeprefix("/").rpartition("/")
    stem = name[: -len(extension_of(name, extensions) or name.rpartition(".")[2]) - 1]
    return f"{folder}{slash}{stem or name}"


def extension_of(url: str, extensions: Sequence[str]) -> str | None:
    """The longest of the extensions that a file has; None if it has none of them."""
    path = without_query(url).lower()
    return max((e for e in extensions if path.endswith(f".{e}")), key=len, default=None)


def class_of(url: str, root: str) -> str | None:
    """The folder directly below the root that contains a file; None if there is none."""
    folder, slash, _ = path_key(url, root).partition("/")
    return folder if slash else None


def origin_of_key(key: str, url: str) -> Origin:
    """The identity of an image that is no part of a shard: its key seeds random transforms."""
    data = key.encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    where = f" of {url}" if url else ""
    return Origin("", int.from_bytes(digest, "little"), f"sample {key!r}{where}")
