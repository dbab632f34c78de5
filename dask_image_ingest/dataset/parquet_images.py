"""``read_parquet_images``: columns of encoded images in parquet files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa
from dask.base import tokenize

from dask_image_ingest.arguments import check_storage_options, shown
from dask_image_ingest.dask_internals import new_collection
from dask_image_ingest.dataset.from_arrow import is_arrow_table
from dask_image_ingest.dataset.plan.scan_node import Dataset
from dask_image_ingest.dataset.predicates import Filters
from dask_image_ingest.dataset.read import asked_for, fingerprint_of, read_of
from dask_image_ingest.dataset.read_options import (
    ErrorPolicy,
    ReadOptions,
    checked_backend,
    parse_images,
)
from dask_image_ingest.dataset.references.make_references import LOCATION_COLUMNS
from dask_image_ingest.dataset.scan.file_rows import MOST_ENCODED
from dask_image_ingest.dataset.scan.partitioning import (
    Partition,
    ShardSplit,
    first_labels,
    parse_partition_size,
)
from dask_image_ingest.dataset.schema.annotations import (
    BoxFormat,
    Coordinates,
    check_annotations,
    parse_annotations,
)
from dask_image_ingest.dataset.schema.columns import (
    FileColumn,
    ImageColumn,
    TableSchema,
    augmented,
)
from dask_image_ingest.dataset.schema.file_columns import (
    check_encoded_type,
    column_type,
    frame_names,
)
from dask_image_ingest.decode import MAX_PIXELS, Augment, Interpolation, Mode, Resize
from dask_image_ingest.errors import ArgumentError, ShardError, warn_user
from dask_image_ingest.frames import Backend
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.storage import PARQUET, Shard, find_shards, open_parquet, searches_of
from dask_image_ingest.storage.output import refuse_unfinished

# Decoded bytes per encoded byte if they are not resized, about that of photographs as JPEG.
_EXPANSION = 10


def read_parquet_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    *,
    image: str | Mapping[str, str | ImageColumn] = "image",
    key: str | None = None,
    size: int | tuple[int, int] | None = None,
    resize: Resize = "stretch",
    interpolation: Interpolation = "bilinear",
    crop_from: int | None = None,
    augment: Augment | None = None,
    boxes: str | None = None,
    box_format: BoxFormat = "xyxy",
    box_labels: str | Sequence[str] | None = None,
    min_visibility: float = 0.0,
    points: str | Sequence[str] | None = None,
    coordinates: Coordinates = "pixels",
    transform: Callable[..., Any] | None = None,
    mode: Mode = "RGB",
    errors: ErrorPolicy = "null",
    max_pixels: int | None = MAX_PIXELS,
    backend: Literal["cudf", "pandas"] | None = None,
    partition_size: int | str | None = "auto",
    storage_options: dict[str, Any] | None = None,
    decode: bool = True,
) -> ImageDataFrame:
    """Read parquet files with columns of encoded images as a lazy Dask dataframe.

    For tables of Hugging Face (``struct<bytes, path>``), LAION, Daft and others. Each task reads
    the columns that the query needs from some row groups, and decodes the images of the remaining
    rows.

    Parameters
    ----------
    paths
        Parquet files: a path or URL, with braces or globs, a folder, or a list of these. Taken in
        natural order, each once.
    columns
        Columns to read, in this order; all by default.
    filters
        Rows to read, as for :func:`read_webdataset_images`. Images of row groups without remaining
        rows are not read.
    image
        The column of encoded images: ``binary``, ``large_binary``, or ``struct<bytes, path>``. A
        row without bytes is ``missing``: a path alone is not opened. For several image columns, or
        another name, a mapping of names to columns of the files, or to an :class:`ImageColumn` with
        options of its own. One is ``"image"``:
        ``{"image": "photo", "mask": ImageColumn("seg", mode="labels")}``.
    key
        The column of the files with the key of each row, for ``__key__``. By default a column
        ``__key__`` if there is one, else the names of the files and the numbers of the rows:
        ``train-00000/00000000`` is the first of ``train-00000.parquet``.
    size, resize, interpolation, crop_from, augment
        As for :func:`read_webdataset_images`.
    boxes, box_format, box_labels, min_visibility, points, coordinates
        As for :func:`read_webdataset_images`.
    transform, mode, errors, max_pixels, backend
        As for :func:`read_webdataset_images`.
    partition_size
        Decoded bytes that a partition may hold, for example ``"512 MiB"``; ``"auto"`` as for
        :func:`read_webdataset_images`. Without ``size``, an image is taken to decode to ten times
        its bytes. No partition is more than 32 MiB of a file with several rows, even with None.
    storage_options
        For the fsspec filesystem of remote paths.
    decode
        Whether to decode images. With False, image columns hold references of the dtype
        ``image_reference``, which carry the encoded images, and there is no column ``error``.

    Returns
    -------
    dask.dataframe.DataFrame
        ``__key__`` and ``__url__`` (string: the file), then the columns of the files, with images
        in place of bytes: struct<data: large_binary, height, width, channels: int32>. After these
        ``error`` (string), ``nbytes`` (int64), ``format`` (string), ``height``, ``width``,
        ``channels`` (int32), and for each further image column the same with its name
        (``mask.error``). A column of the files takes precedence over one of these with its name.
        But columns of the files named ``__url__``, ``offset`` or ``nbytes`` are called
        ``table.__url__`` and so on: nothing opens what they locate, for example in an export. The
        index is unique, and the same in all reads of a file.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing.
    ShardError
        If the first file can't be read; later, if a file can't be read, lacks a column of the
        first, or has it in a type whose values are not all of the first file's type.
    ArgumentError
        For arguments that are unknown or contradict each other, columns that don't exist, a column
        that holds no encoded images, files with a column ``error`` of their own.
    MissingDependencyError
        If the backend's library is not installed.

    Examples
    --------
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> files = [{"bytes": data, "path": None} for data in frame.images.encode("png")[:3]]
    >>> pq.write_table(pa.table({"image": files, "label": [0, 1, 0]}), "photos.parquet")
    >>> photos = read_parquet_images("photos.parquet", size=64)
    >>> photos[photos.label == 0].images.stack().compute().shape
    (2, 64, 64, 3)
    """
    if is_arrow_table(paths):
        raise ArgumentError(
            f"paths={shown(paths)} is a table in memory: pass it to decode_images, with image= for "
            "its column of encoded images; or to from_arrow, for a frame to cut into partitions"
        )
    backend_ = checked_backend(backend, errors, decode)
    storage_options = check_storage_options(storage_options)
    images = parse_images(
        image,
        _parse_column,
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
    annotations = parse_annotations(
        boxes, box_format, box_labels, min_visibility, points, coordinates, decode
    )
    largest = parse_partition_size(partition_size, backend_)
    paths = list(paths) if isinstance(paths, Iterator) else paths
    files = find_shards(paths, storage_options, PARQUET)
    searches = searches_of(paths, files, PARQUET)
    refuse_unfinished(file.url for file in files)
    with open_parquet(files[0], storage_options) as first:
        file_schema, rows = first.schema_arrow, first.metadata.num_rows
    if isinstance(image, str):
        images = (replace(images[0], column=image),)
    sources = {member.column: member.extensions[0] for member in images}
    schema = _schema(file_schema, sources, key, backend_, files[0].url)
    options = ReadOptions(
        images=images,
        errors=errors,
        backend=backend_.name,
        storage_options=storage_options,
        is_table=True,
        annotations=annotations,
    )
    schema = replace(schema, augmented=augmented(images))
    if decode and (columns is None or "error" in columns) and "error" in file_schema.names:
        raise ArgumentError(
            f"the files have a column 'error' of their own, as {files[0].url} has, and that of a "
            "decode would take its place: pass columns= without it, or decode=False"
        )
    check_annotations(annotations, schema.types, images[0].decoding)
    selected, predicate = asked_for(schema, columns, filters, decode)
    partitions = _partitions(files, rows, options, largest)
    token = tokenize(fingerprint_of(files), str(schema), options, partitions, searches)
    dataset = Dataset(partitions, tuple(files), schema, options, searches, token)
    return new_collection(read_of(dataset, selected, predicate, decode))


def _parse_column(name: object) -> tuple[str, ...]:
    if not isinstance(name, str):
        raise ArgumentError(f"{shown(name)} is not the name of a column of encoded images")
    return (name,)


def _schema(
    file_schema: pa.Schema, images: Mapping[str, str], key: str | None, backend: Backend, url: str
) -> TableSchema:
    """The columns of a collection from those of its first file; ``images``: name → file column."""
    if len(set(file_schema.names)) < len(file_schema):
        raise ShardError(f"{url} has two columns of one name")
    for name in (*images.values(), *([] if key is None else [key])):
        if name not in file_schema.names:
            argument = "key=" if name == key else "image="
            raise ArgumentError(
                f"{argument}{shown(name)}: {url} has {', '.join(map(repr, file_schema.names))}"
            )
    for name in images.values():
        try:
            check_encoded_type(file_schema.field(name).type)
        except TypeError as error:
            raise ArgumentError(
                f"the column {name!r} of {url} holds no encoded images ({error}): it needs bytes, "
                "or structs of bytes and path as Hugging Face has them"
            ) from error
    sources = [*images.values()]
    types = {f.name: column_type(f.type, backend) for f in file_schema if f.name not in sources}
    supported = [name for name, type_ in types.items() if type_ is not None]
    # Nothing that looks for locations takes a table's word for them.
    names = frame_names(supported, LOCATION_COLUMNS, "table.")
    if taken := {*names.values()} & {*images}:
        raise ArgumentError(
            f"image=: the files have a column {min(taken)!r} of their own: call the image column "
            "something else"
        )
    left_out = [f"{n!r} ({file_schema.field(n).type})" for n, t in types.items() if t is None]
    if left_out:
        warn_user(f"{url} has columns of unsupported types, left out: {', '.join(left_out)}")
    columns = {names[name]: FileColumn(names[name], name, types[name]) for name in supported}
    if key is not None or "__key__" in supported:
        columns["__key__"] = FileColumn("__key__", key or "__key__", pa.string())
    order = [
        name
        for stored in file_schema.names
        for name in (
            *filter(None, [names.get(stored)]),
            *(image for image, source in images.items() if source == stored),
        )
    ]
    return TableSchema(
        (), False, tuple(columns.values()), tuple(images), tuple(order), file_schema.metadata
    )


def _partitions(
    files: Sequence[Shard], rows: int, options: ReadOptions, largest: int | None
) -> tuple[Partition, ...]:
    """Each file, or parts of it that decode to about ``largest`` bytes, if all are as the first.

    At most one part for each of the ``rows`` of the first file.
    """
    most = MOST_ENCODED
    if largest is not None and files[0].size > 0:
        shapes = [member.decoding.shape for member in options.images]
        decoded = files[0].size * _EXPANSION
        if all(map(all, shapes)):
            decoded = max(1, rows * sum(math.prod(filter(None, shape)) for shape in shapes))
        most = max(1, min(most, largest * files[0].size // decoded))
    partitions: list[Partition] = []
    labels = first_labels(file.url for file in files)
    for file in files:
        known = file.size > 0 and files[0].size > 0
        bound = -(-rows * file.size // files[0].size) if known else 1
        parts = max(1, min(-(-file.size // most), bound))
        whole = ShardSplit(file, 0, parts, first_label=labels[file.url])
        partitions += [(replace(whole, part=part),) for part in range(parts)]
    return tuple(partitions)
