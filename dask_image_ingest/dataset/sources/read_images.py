"""``read_images``: image files, each a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from dask.base import tokenize

from dask_image_ingest.arguments import shown
from dask_image_ingest.dataset.late.decode import ImageDecode
from dask_image_ingest.dataset.late.headers import HEADERS
from dask_image_ingest.dataset.late.resolve import fetch_headers
from dask_image_ingest.dataset.options import ErrorPolicy
from dask_image_ingest.dataset.sources.decoded import decode_options, with_images
from dask_image_ingest.dataset.sources.image_files import ImageFiles, ReadImageFiles, class_of
from dask_image_ingest.dataset.splits import parse_partition_size
from dask_image_ingest.decode import MAX_PIXELS, Mode
from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.frames import ImageReference
from dask_image_ingest.storage import FileKind, Shard, common_root, find_shards
from dask_image_ingest.tar import IMAGE_EXTENSIONS

__all__ = ["read_images"]

_IMAGES: Final = FileKind("image file", tuple(f".{e}" for e in IMAGE_EXTENSIONS.split(";")))

# Files of a partition at most, however small they are: the work of a second or less.
_MOST_FILES = 256

# How many headers are read to know what images decode to.
_LOOKED_AT = 8


def read_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    label: Literal["folder"] | None = None,
    size: int | tuple[int, int] | None = None,
    resize: Literal["stretch", "crop", "pad", "shorter", "longer"] = "stretch",
    transform: Callable[..., Any] | None = None,
    mode: Mode = "RGB",
    errors: ErrorPolicy = "null",
    max_pixels: int | None = MAX_PIXELS,
    backend: Literal["cudf", "pandas"] | None = None,
    partition_size: int | str | None = "auto",
    storage_options: dict[str, Any] | None = None,
    decode: bool = True,
) -> Any:
    """Read image files as a lazy Dask dataframe: one row a file, one task a few hundred files.

    Paths are listed, and the headers of eight files read unless ``size`` tells how large images
    are. Nothing else is opened before a query asks for headers or pixels, and then only the files
    whose rows are left.

    Parameters
    ----------
    paths
        Files: a path or URL, with braces or globs (``"photos/**/*.jpg"``), a folder, or a list of
        these. Taken in natural order, each once. A folder is searched to the bottom for the
        suffixes of images: ``.jpg``, ``.jpeg``, ``.png``, ``.webp``, ``.gif``, ``.bmp``, ``.tif``
        and the others that ``read_webdataset_images`` takes for images.
    label
        ``"folder"``: a column ``label``, numbered as torchvision's ``ImageFolder`` does. The
        folders right below the common root that have images in them are the classes, sorted by
        name, from 0 on. A file that lies in none has null.
    size, resize, transform, mode, errors, max_pixels, backend
        As for :func:`read_webdataset_images`.
    partition_size
        Decoded bytes that a partition may hold, for example ``"512 MiB"``; ``"auto"`` as for
        :func:`read_webdataset_images`. No partition has more than 256 files, nor with None.
    storage_options
        For the fsspec filesystem behind remote paths.
    decode
        Whether to decode images. With False ``image`` holds references, of the dtype
        ``image_reference``, and there is no column ``error``.

    Returns
    -------
    dask.dataframe.DataFrame
        Columns ``__key__`` (string: the path below the common root, without its suffix),
        ``__url__`` (string), ``offset`` (int64: 0), ``nbytes`` (int64), ``format`` (string),
        ``height``, ``width``, ``channels`` (int32), ``error`` (string), ``label`` (int64) if it is
        asked for, and ``image``: struct<data: large_binary, height, width, channels: int32>. The
        index numbers the files. The common root is the folder that is searched, or that all files
        and globs have in common before their first wildcard.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing; later, if a file is gone.
    ShardError
        If a folder can't be listed, or a server tells no sizes; later, if a file can't be read or
        has changed since it was listed.
    ArgumentError
        For arguments that are unknown or contradict each other; for ``label="folder"`` where no
        file lies in a folder below the common root.
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
    backend_, images = decode_options(
        backend,
        size=size,
        resize=resize,
        transform=transform,
        mode=mode,
        errors=errors,
        max_pixels=max_pixels,
        storage_options=storage_options,
        decode=decode,
    )
    if label not in (None, "folder"):
        raise ArgumentError(f"label={shown(label)}: pass 'folder', or None for no labels")
    largest = parse_partition_size(partition_size, backend_)
    paths = list(paths) if isinstance(paths, Iterator) else paths
    files = find_shards(paths, storage_options, _IMAGES)
    unknown = next((file.url for file in files if file.size < 0), None)
    if unknown is not None:
        raise ShardError(
            f"{unknown}: its server does not tell its size, by which an image is fetched. Download "
            "it, and read the copy"
        )
    root = common_root(paths, (file.url for file in files))
    classes = _classes(files, root) if label == "folder" else None
    edges = _edges(files, images, largest)
    listed = [(file.url, file.size, file.version) for file in files]
    token = tokenize(listed, edges, root, classes, images, decode, backend_.name)
    found = ImageFiles(tuple(files), edges, root, classes, images, decode, backend_.name, token)
    return with_images(ReadImageFiles(found), images, HEADERS, decode)


def _classes(files: Sequence[Shard], root: str) -> tuple[str, ...]:
    folders = {class_of(file.url, root) for file in files} - {None}
    if not folders:
        raise ArgumentError(
            f'label="folder": no file lies in a folder below {root or "/"}, and its folders are '
            "the classes. Pass the folder that has one folder for each class"
        )
    return tuple(sorted(folder for folder in folders if folder is not None))


def _edges(files: Sequence[Shard], images: ImageDecode, largest: int | None) -> tuple[int, ...]:
    """At which file each partition begins, all of about as many, and how many files there are."""
    most = _MOST_FILES
    if largest is not None:
        most = max(1, min(most, largest // max(1, _decoded_bytes(files, images))))
    parts = -(-len(files) // most)
    return tuple(len(files) * part // parts for part in range(parts + 1))


def _decoded_bytes(files: Sequence[Shard], images: ImageDecode) -> int:
    """What an image decodes to, by what the headers of some tell."""
    height, width, channels = images.decoding.shape
    if height and width and channels:
        return height * width * channels
    some = sorted({len(files) * n // _LOOKED_AT for n in range(_LOOKED_AT)})
    references = [
        ImageReference(each.url, each.size, each.version, offset=0, nbytes=each.size)
        for each in (files[n] for n in some)
    ]
    headers = fetch_headers(references, images.decoding, images.storage_options)
    sizes = [size for header in headers if (size := images.decoding.nbytes(header))]
    return sum(sizes) // max(1, len(sizes))
