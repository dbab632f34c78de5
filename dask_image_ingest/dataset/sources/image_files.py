"""``read_images``: image files as a lazy Dask dataframe, one row per file."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import pyarrow as pa
from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import shown
from dask_image_ingest.dataset.late.fetch import fetch_headers
from dask_image_ingest.dataset.late.headers import HEADERS, ReadHeaders
from dask_image_ingest.dataset.late.nodes import Decode
from dask_image_ingest.dataset.options import ErrorPolicy, checked_backend, refuse_decoding
from dask_image_ingest.dataset.plan.nodes import Read
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode, error_filter
from dask_image_ingest.dataset.scan.partitioning import parse_partition_size
from dask_image_ingest.dataset.schema.columns import METADATA_COLUMNS
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.decode import MAX_PIXELS, Mode, Resize, make_decode_spec
from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.frames import (
    REFERENCE,
    BackendName,
    ImageReference,
    get_backend,
    references_of_fields,
)
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.storage import (
    FileKind,
    Shard,
    common_root,
    find_shards,
    folders_in,
    is_web,
)
from dask_image_ingest.tar import IMAGE_EXTENSIONS


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The image files of a collection.

    Attributes
    ----------
    files
        The listed files, in the order of the rows.
    edges
        First row of each partition, then the number of rows.
    root
        The common root: a file's key is its path below it.
    classes
        Folders that are classes, in order; None without ``label="folder"``.
    images
        How images are decoded; with ``decode=False`` only used for headers.
    has_error
        Whether there is an error column, for a decode to fill.
    backend
        The name of the dataframe library.
    token
        Digest of all of this, with sizes and modification times of the files.
    """

    files: tuple[Shard, ...]
    edges: tuple[int, ...]
    root: str
    classes: tuple[str, ...] | None
    images: ImageDecode
    has_error: bool
    backend: BackendName
    token: str

    def __dask_tokenize__(self) -> str:
        return self.token

    def __str__(self) -> str:
        return without_passwords(f"{len(self.files)} files below {self.root}")

    __repr__ = __str__

    @functools.cached_property
    def types(self) -> dict[str, pa.DataType]:
        """The columns, in order, with their Arrow types."""
        types = {name: t for name, t in METADATA_COLUMNS.items() if name != "error"}
        if self.has_error:
            types["error"] = METADATA_COLUMNS["error"]
        if self.classes is not None:
            types |= {"label": pa.int64(), "class_name": pa.string()}
        return types | {"image": REFERENCE}

    @functools.cached_property
    def meta(self) -> Any:
        """An empty frame with these columns."""
        return get_backend(self.backend).meta(self.types)

    @property
    def divisions(self) -> tuple[int, ...]:
        """Known: rows are numbered across partitions."""
        return (*self.edges[:-1], self.edges[-1] - 1)

    @property
    def lengths(self) -> list[int]:
        """Number of files of each partition."""
        return [stop - start for start, stop in itertools.pairwise(self.edges)]

    def part(self, number: int) -> FileGroup:
        """The files of one partition."""
        start, stop = self.edges[number : number + 2]
        return FileGroup(self.files[start:stop], start, self.root, self.classes, self.backend)


@dataclass(frozen=True)
class FileGroup:
    """The files of one partition, as its task carries them; ``first`` is its first row number."""

    files: tuple[Shard, ...]
    first: int
    root: str
    classes: tuple[str, ...] | None
    backend: BackendName

    def frame(self, types: dict[str, pa.DataType]) -> Any:
        """A row per file, without opening any: header columns are null."""
        count = len(self.files)
        table = pa.table({"": pa.nulls(count)}).select([])
        for name, type_ in types.items():
            table = table.append_column(name, self._column(name, type_))
        return get_backend(self.backend).frame(
            table, np.arange(self.first, self.first + count), None
        )

    def _column(self, name: str, type_: pa.DataType) -> pa.Array:
        if name == "image":
            return self._references()
        if name == "__key__":
            return pa.array([key_of(file.url, self.root) for file in self.files], type_)
        if name == "__url__":
            return pa.array([file.url for file in self.files], type_)
        if name == "offset":
            return pa.array(np.zeros(len(self.files), np.int64))
        if name == "nbytes":
            return pa.array([file.size for file in self.files], type_)
        if name in ("label", "class_name"):
            numbers = {folder: number for number, folder in enumerate(self.classes or ())}
            folders = [class_of(file.url, self.root) for file in self.files]
            labels = [None if each is None else numbers[each] for each in folders]
            return pa.array(labels if name == "label" else folders, type_)
        return pa.nulls(len(self.files), type_)

    def _references(self) -> pa.StructArray:
        fields = {
            "url": self._column("__url__", pa.string()),
            "shard_size": self._column("nbytes", pa.int64()),
            "version": pa.array([file.version for file in self.files], pa.string()),
            "key": self._column("__key__", pa.string()),
            "offset": self._column("offset", pa.int64()),
            "nbytes": self._column("nbytes", pa.int64()),
        }
        return references_of_fields(len(self.files), fields)


def key_of(url: str, root: str) -> str:
    """The path of a file below the root, without its suffix."""
    path = url.removeprefix(root).lstrip("/")
    if is_web(url):
        path = path.partition("?")[0]
    folder, slash, name = path.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}{slash}{stem if dot and stem else name}"


def class_of(url: str, root: str) -> str | None:
    """The folder directly below the root that contains a file; None if there is none."""
    folder, slash, _ = key_of(url, root).partition("/")
    return folder if slash else None


def _read(group: FileGroup, types: dict[str, pa.DataType]) -> Any:
    return group.frame(types)


class ReadImageFiles(Read):
    """Rows of image files, with references in place of images; opens no file."""

    _parameters: ClassVar = ["files", "columns", "_partitions"]

    files: ImageFiles

    @property
    def files_read(self) -> Iterator[str]:
        """The files."""
        return (file.url for file in self.files.files)

    @property
    def first_url(self) -> str:
        """The first of the files."""
        return self.files.files[0].url

    def _filtered_task(self, name: Any, index: int) -> dx.Task:
        types = {name: self.files.types[name] for name in self.columns}
        return dx.Task(name, _read, self.files.part(index), types, _data_producer=True)


_IMAGES: Final = FileKind(
    "image file",
    tuple(f".{extension}" for extension in IMAGE_EXTENSIONS.split(";")),
    hidden=(".",),
    single=True,
)

# Files of a partition at most, however small: a second of work or less.
_MOST_FILES = 256

# Headers sampled to estimate the decoded size.
_SAMPLED_HEADERS = 8


def read_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    label: Literal["folder"] | None = None,
    size: int | tuple[int, int] | None = None,
    resize: Resize = "stretch",
    transform: Callable[..., Any] | None = None,
    mode: Mode = "RGB",
    errors: ErrorPolicy = "null",
    max_pixels: int | None = MAX_PIXELS,
    backend: Literal["cudf", "pandas"] | None = None,
    partition_size: int | str | None = "auto",
    storage_options: dict[str, Any] | None = None,
    decode: bool = True,
) -> ImageDataFrame:
    """Read image files as a lazy Dask dataframe: one row per file, a few hundred files per task.

    The call lists the paths, and reads the headers of eight files unless ``size`` says how large
    images are. Other files are opened when a query needs headers or pixels, and then only those of
    the remaining rows.

    Parameters
    ----------
    paths
        Files: a path or URL, with braces or globs (``"photos/**/*.jpg"``), a folder, or a list of
        these. Taken in natural order, each once. A folder is searched recursively, through links
        too, for the suffixes of images: ``.jpg``, ``.jpeg``, ``.png``, ``.webp``, ``.gif``,
        ``.bmp``, ``.tif`` and the others of ``IMAGE_EXTENSIONS``. Left out, with a warning, are
        names that begin with ``.`` or are not UTF-8, links to nothing or back to a folder that they
        are in, pipes, sockets and devices, and folders that can't be listed.
    label
        ``"folder"``: columns ``label``, numbered as torchvision's ``ImageFolder`` does, and
        ``class_name``. The folders directly below the common root are the classes, sorted by name
        and numbered from 0. If the root itself is not searched (``"pets/{cat,dog}"``), only
        those with images are. A file in none of them has nulls.
    size, resize, transform, mode, errors, max_pixels, backend
        As for :func:`read_webdataset_images`.
    partition_size
        Decoded bytes that a partition may hold, for example ``"512 MiB"``; ``"auto"`` as for
        :func:`read_webdataset_images`. No partition has more than 256 files, even with None.
    storage_options
        For the fsspec filesystem of remote paths.
    decode
        Whether to decode images. With False, ``image`` holds references of the dtype
        ``image_reference``, and there is no column ``error``.

    Returns
    -------
    dask.dataframe.DataFrame
        Columns ``__key__`` (string: the path below the common root, without its suffix),
        ``__url__`` (string), ``offset`` (int64: 0), ``nbytes`` (int64), ``format`` (string),
        ``height``, ``width``, ``channels`` (int32), ``error`` (string), ``label`` (int64) and
        ``class_name`` (string) with ``label="folder"``, and ``image``: struct<data: large_binary,
        height, width, channels: int32>. The index numbers the files. The common root is the folder
        that is searched, or the deepest one that contains all files and all globs' fixed parts.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing; later, if a file is gone.
    ShardError
        If a path can't be listed, or a server sends no sizes; later, if a file can't be read or
        has changed since it was listed.
    ArgumentError
        For arguments that are unknown or contradict each other; for ``label="folder"`` if no file
        is in a folder below the common root.
    MissingDependencyError
        If the backend's library is not installed.

    Examples
    --------
    >>> from pathlib import Path
    >>> for number, data in enumerate(frame.head(4).images.encode("png")):
    ...     path = Path("pets", ["cat", "dog"][number % 2], f"{number}.png")
    ...     path.parent.mkdir(parents=True, exist_ok=True)
    ...     _ = path.write_bytes(data)
    >>> pets = read_images("pets", label="folder", size=64)
    >>> pets[["__key__", "label"]].compute()
      __key__  label
    0   cat/0      0
    1   cat/2      0
    2   dog/1      1
    3   dog/3      1
    >>> pets[pets.label == 1].images.stack().compute().shape
    (2, 64, 64, 3)
    """
    backend_ = checked_backend(backend, errors, storage_options, decode)
    decoding = make_decode_spec(
        device=backend_.device,
        size=size,
        resize=resize,
        mode=mode,
        transform=transform,
        max_pixels=max_pixels,
    )
    if not decode:
        refuse_decoding(decoding, errors)
    images = ImageDecode("image", "error", decoding, errors, storage_options)
    if label not in (None, "folder"):
        raise ArgumentError(f"label={shown(label)}: pass 'folder', or None for no labels")
    largest = parse_partition_size(partition_size, backend_)
    paths = list(paths) if isinstance(paths, Iterator) else paths
    files = find_shards(paths, storage_options, _IMAGES)
    unknown = next((file.url for file in files if file.size < 0), None)
    if unknown is not None:
        raise ShardError(
            f"{unknown}: its server sends no size, which is needed to fetch an image. Download it, "
            "and read the copy"
        )
    root, is_searched = common_root(paths, (file.url for file in files))
    classes = None
    if label == "folder":
        folders = folders_in(root, storage_options, _IMAGES) if is_searched else set()
        classes = _classes(files, root, folders)
    edges = _edges(files, images, largest)
    listed = [(file.url, file.size, file.version) for file in files]
    token = tokenize(listed, edges, root, classes, images, decode, backend_.name)
    source = ImageFiles(tuple(files), edges, root, classes, images, decode, backend_.name, token)
    rows = ReadHeaders(ReadImageFiles(source), "image", HEADERS, decoding, storage_options)
    return dx.new_collection(Decode(rows, (images,), error_filter(errors)) if decode else rows)


def _classes(files: Sequence[Shard], root: str, folders: Set[str]) -> tuple[str, ...]:
    """The classes in order: the folders with files, and all ``folders`` of a searched root.

    So what is left out of a folder does not change the numbers of the others.
    """
    used = {folder for file in files if (folder := class_of(file.url, root)) is not None}
    if not used:
        raise ArgumentError(
            f'label="folder": no file lies in a folder below {root or "/"}, and its folders are '
            "the classes. Pass the folder that has one folder for each class"
        )
    if empty := sorted(folders - used):
        warn_user(
            f'label="folder": {len(empty)} of {len(folders | used)} folders of {root} hold no '
            f"image, such as {empty[0]!r}. They are classes, too, and have numbers"
        )
    return tuple(sorted(folders | used))


def _edges(files: Sequence[Shard], images: ImageDecode, largest: int | None) -> tuple[int, ...]:
    """First row of each partition, then the number of rows."""
    most = _MOST_FILES
    if largest is not None:
        most = max(1, min(most, largest // max(1, _decoded_bytes(files, images))))
    # Equal counts, not equal sizes: files appended later don't change the partitions before them.
    return (*range(0, len(files), most), len(files))


def _decoded_bytes(files: Sequence[Shard], images: ImageDecode) -> int:
    """Bytes that an image decodes to on average, judged by some headers."""
    height, width, channels = images.decoding.shape
    if height and width and channels:
        return height * width * channels
    some = sorted({len(files) * n // _SAMPLED_HEADERS for n in range(_SAMPLED_HEADERS)})
    references = [
        ImageReference(each.url, each.size, each.version, offset=0, nbytes=each.size)
        for each in (files[n] for n in some)
    ]
    headers = fetch_headers(references, images.decoding, images.storage_options)
    sizes = [size for header in headers if (size := images.decoding.nbytes(header))]
    return sum(sizes) // max(1, len(sizes))
