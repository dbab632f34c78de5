"""``read_images``: image files as a lazy Dask dataframe, one row per file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, Final, Literal

from dask.base import tokenize

from dask_image_ingest.arguments import check_storage_options, shown
from dask_image_ingest.dask_internals import new_collection
from dask_image_ingest.dataset.plan.scan_node import Dataset
from dask_image_ingest.dataset.predicates import Filters
from dask_image_ingest.dataset.read import asked_for, fingerprint_of, read_of
from dask_image_ingest.dataset.read_options import (
    ErrorPolicy,
    ReadOptions,
    checked_backend,
    parse_images,
)
from dask_image_ingest.dataset.scan.file_rows import (
    CLASS_COLUMNS,
    MOST_ENCODED,
    FileRows,
    class_of,
    extension_of,
    path_key,
)
from dask_image_ingest.dataset.scan.partitioning import (
    Partition,
    ShardSplit,
    parse_partition_size,
)
from dask_image_ingest.dataset.schema.columns import (
    FileColumn,
    ImageChoice,
    Schema,
    augmented,
)
from dask_image_ingest.decode import MAX_PIXELS, Augment, Interpolation, Mode, Resize
from dask_image_ingest.errors import ArgumentError, ShardError, warn_user
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.storage import (
    FileKind,
    Shard,
    common_root,
    find_shards,
    folders_in,
    searches_of,
)
from dask_image_ingest.tar import IMAGE_EXTENSIONS

_IMAGES: Final = FileKind("image file", (), hidden=(".",), single=True)

# Files of a partition at most, however small: a second of work or less.
_MOST_FILES = 256

# Headers sampled to estimate the decoded size.
_SAMPLED_HEADERS = 8


def read_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    *,
    image: ImageChoice = IMAGE_EXTENSIONS,
    label: Literal["folder"] | None = None,
    size: int | tuple[int, int] | None = None,
    resize: Resize = "stretch",
    interpolation: Interpolation = "bilinear",
    crop_from: int | None = None,
    augment: Augment | None = None,
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
        are in, pipes, sockets and devices, and what there is no permission to list.
    columns, filters
        As for :func:`read_webdataset_images`. Filters on keys, URLs, sizes and labels open no file.
    image
        Extensions that a search takes, separated by ``;``. For several image columns a mapping, as
        for :func:`read_webdataset_images`: files that differ in these extensions alone, ``1.jpg``
        and ``1.seg.png``, are one row then, and others are left out.
    label
        ``"folder"``: columns ``label``, numbered as torchvision's ``ImageFolder`` does, and
        ``class_name``. The folders directly below the common root are the classes, sorted by name
        and numbered from 0. If the root itself is not searched (``"pets/{cat,dog}"``), only
        those with images are. A file in none of them has nulls.
    size, resize, interpolation, crop_from, augment, transform, mode, errors, max_pixels, backend
        As for :func:`read_webdataset_images`.
    partition_size
        Decoded bytes that a partition may hold, for example ``"512 MiB"``; ``"auto"`` as for
        :func:`read_webdataset_images`. No partition has more than 256 rows, or more than 32 MiB of
        files if it has several, even with None.
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
        height, width, channels: int32>. The index is unique. The common root is the folder
        that is searched, or the deepest one that contains all files and all globs' fixed parts.
        A file that is gone when it is read, or can't be read, is a row with an ``error``.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing.
    ShardError
        If a path can't be listed, or its disk fails; if a server sends no sizes; later, if a server
        fails, or a file has changed since it was listed.
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
    >>> print(pets[["__key__", "label"]].compute().to_string(index=False))
    __key__  label
      cat/0      0
      cat/2      0
      dog/1      1
      dog/3      1
    >>> pets[pets.label == 1].images.stack().compute().shape
    (2, 64, 64, 3)
    """
    backend_ = checked_backend(backend, errors, decode)
    storage_options = check_storage_options(storage_options)
    images = parse_images(
        image,
        errors=errors,
        decode=decode,
        size=size,
        resize=resize,
        interpolation=interpolation,
        crop_from=crop_from,
        mode=mode,
        augment=augment,
        transform=transform,
        device=backend_.device,
        max_pixels=max_pixels,
    )
    if label not in (None, "folder"):
        raise ArgumentError(f"label={shown(label)}: pass 'folder', or None for no labels")
    largest = parse_partition_size(partition_size, backend_)
    paths = list(paths) if isinstance(paths, Iterator) else paths
    every = tuple(extension for member in images for extension in member.extensions)
    kind = replace(_IMAGES, suffixes=tuple(f".{extension}" for extension in every))
    files = find_shards(paths, storage_options, kind)
    unknown = next((file.url for file in files if file.size < 0), None)
    if unknown is not None:
        raise ShardError(
            f"{unknown}: its server sends no size, which is needed to fetch an image. Download it, "
            "and read the copy"
        )
    root, is_searched = common_root(paths, files, kind)
    classes = None
    if label == "folder":
        folders = folders_in(root, storage_options, kind) if is_searched else set()
        classes = _classes(files, root, folders)
    options = ReadOptions(
        images=images,
        errors=errors,
        backend=backend_.name,
        storage_options=storage_options,
        root=root,
        classes=classes,
    )
    columns_of_class = () if classes is None else CLASS_COLUMNS.items()
    schema = Schema(
        (),
        sidecar=tuple(FileColumn(name, name, type_) for name, type_ in columns_of_class),
        images=tuple(member.column for member in images),
        augmented=augmented(images),
    )
    selected, predicate = asked_for(schema, columns, filters, decode)
    partitions = _partitions(_rows(files, options, every), options, largest)
    searches = searches_of(paths, files, kind)
    rows = [len(partition) for partition in partitions]
    token = tokenize(fingerprint_of(files), options, rows, searches)
    dataset = Dataset(partitions, tuple(files), schema, options, searches, token)
    return new_collection(read_of(dataset, selected, predicate, decode))


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


def _rows(
    files: Sequence[Shard], options: ReadOptions, every: Sequence[str]
) -> list[list[ShardSplit]]:
    """The files of each row, in order: a file, or with several image columns those of a key."""
    if len(options.images) == 1:
        return [[ShardSplit(file, number)] for number, file in enumerate(files)]
    by_key: dict[str, list[Shard]] = {}
    for file in files:
        if extension_of(file.url, every):
            by_key.setdefault(path_key(file.url, options.root or "", every), []).append(file)
    if not by_key:
        raise ArgumentError(f"image=: none of the files has an extension of {', '.join(every)}")
    return [
        [ShardSplit(file, number) for file in row] for number, row in enumerate(by_key.values())
    ]


def _partitions(
    rows: Sequence[list[ShardSplit]], options: ReadOptions, largest: int | None
) -> tuple[Partition, ...]:
    """Partitions of consecutive rows, with at most about `MOST_ENCODED` and ``largest`` bytes.

    Each begins where the one before is full, so files appended later change none before them.
    """
    encoded = [sum(split.shard.size for split in row) for row in rows]
    # Decoded bytes are judged by the headers of some rows: for each row and for each encoded byte.
    some = sorted({len(rows) * n // _SAMPLED_HEADERS for n in range(_SAMPLED_HEADERS)})
    most_rows, most_bytes = _MOST_FILES, MOST_ENCODED
    height, width, channels = options.images[0].decoding.shape
    only_one = len(options.images) == 1
    if largest is not None and height and width and channels and only_one:
        most_rows = max(1, min(most_rows, largest // (height * width * channels)))
    elif largest is not None:
        sample = FileRows([split for row in some for split in rows[row]], options)
        decoded = max(1, sample.decoded_bytes(sample.numbers))
        most_rows = max(1, min(most_rows, largest * len(some) // decoded))
        most_bytes = min(most_bytes, largest * sum(encoded[row] for row in some) // decoded)
    partitions: list[Partition] = []
    start = nbytes = 0
    for number, size in enumerate(encoded):
        if number > start and (number - start == most_rows or nbytes + size > most_bytes):
            partitions.append(tuple(itertools.chain.from_iterable(rows[start:number])))
            start, nbytes = number, 0
        nbytes += size
    return (*partitions, tuple(itertools.chain.from_iterable(rows[start:])))
