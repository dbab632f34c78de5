"""``read_webdataset_images``: check arguments, open the first shard, build the query."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from dask.base import tokenize

from dask_image_ingest.arguments import (
    check_choice,
    check_columns,
    check_storage_options,
    list_of_names,
    shown,
)
from dask_image_ingest.dask_internals import Expr, new_collection
from dask_image_ingest.dataset.plan.base_nodes import FilterRows
from dask_image_ingest.dataset.plan.scan_node import (
    Dataset,
    Scan,
    ScanFiles,
    ScanShards,
    ScanTables,
)
from dask_image_ingest.dataset.predicates import Filters, Predicate, columns_of, only, parse_filters
from dask_image_ingest.dataset.read_options import (
    ErrorPolicy,
    ReadOptions,
    ShardErrorPolicy,
    checked_backend,
    parse_images,
    parse_max_member_bytes,
)
from dask_image_ingest.dataset.references.decode_node import Decode
from dask_image_ingest.dataset.scan.partitioning import (
    make_partitions,
    open_first,
    parse_partition_size,
    parse_shards_per_partition,
)
from dask_image_ingest.dataset.scan.rows import ColumnDecode, error_filter
from dask_image_ingest.dataset.schema.annotations import (
    BoxFormat,
    Coordinates,
    check_annotations,
    parse_annotations,
)
from dask_image_ingest.dataset.schema.columns import (
    ImageChoice,
    Schema,
    augmented,
    make_schema,
    region_field,
)
from dask_image_ingest.dataset.schema.file_columns import (
    SidecarChoice,
    check_sidecar,
    sidecar_columns,
    with_sidecars,
)
from dask_image_ingest.decode import MAX_PIXELS, Augment, Interpolation, Mode, Resize
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.index import UnusableIndexError, find_indexes, parse_index
from dask_image_ingest.storage import (
    Listings,
    Shard,
    find_shards,
    searches_of,
    with_pipes_allowed,
)
from dask_image_ingest.tar import IMAGE_EXTENSIONS, MAX_MEMBER_BYTES
from dask_image_ingest.typedefs import TypeLike


def read_webdataset_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    *,
    image: ImageChoice = IMAGE_EXTENSIONS,
    members: str | Mapping[str, TypeLike] = "infer",
    json_fields: Mapping[str, TypeLike] | None = None,
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
    shard_errors: ShardErrorPolicy = "raise",
    max_pixels: int | None = MAX_PIXELS,
    max_member_bytes: int | str | None = MAX_MEMBER_BYTES,
    backend: Literal["cudf", "pandas"] | None = None,
    partition_size: int | str | None = "auto",
    shards_per_partition: int | Literal["auto"] = 1,
    scaled_decode: bool = False,
    sidecar: SidecarChoice = "auto",
    allow_pipes: bool = False,
    index: Literal["auto"] | bool | str | os.PathLike[str] = "auto",
    storage_options: dict[str, Any] | None = None,
    decode: bool = True,
) -> ImageDataFrame:
    """Read WebDataset tar shards of images as a lazy Dask dataframe.

    One row per sample; one task per shard unless ``partition_size`` or ``shards_per_partition``
    change that. The call itself reads only the first shard's tar headers, and some of its image
    headers and labels. Each task reads what the query needs, and decodes the images of the
    remaining rows with DALI, on the worker's GPU if it has one.

    Parameters
    ----------
    paths
        Shards: a path or URL, with braces (``"{00000..00099}.tar"``) or globs, a folder, or a list
        of these. Taken in natural order, each once. ``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.zst``.
    columns
        Columns to read, in this order; all by default.
    filters
        Rows to read, as for ``dask.dataframe.read_parquet``: ``[("width", ">=", 512)]``, or a list
        of such lists of which one must hold. Applied before any image is decoded, except filters on
        ``error``. Operators: ``== != < <= > >= in``, ``not in``. Numbers are compared by value,
        whatever their types. A comparison with null is never true; ``in`` is true for null if None
        is in the list, ``not in`` if it is not. For NaN, ``!=`` and ``not in`` are true.
    image
        Member extensions of the image in order of preference, separated by ``;``. By default
        ``IMAGE_EXTENSIONS``: ``"jpg;jpeg;png;webp;..."`` and sixteen others that Pillow reads. For
        several image columns a mapping of their names to extensions, or to an :class:`ImageColumn`
        with options of its own. One is ``"image"``:
        ``{"image": "jpg", "mask": ImageColumn("seg.png", mode="labels")}``. A transform draws the
        same random numbers for all images of a sample.
    members
        ``"infer"`` makes a column of every other extension in the first shard: ``txt`` and ``json``
        are strings, ``cls``, ``index`` and ``id`` int64, all others binary. Or a mapping of
        extension to type, for example ``{"txt": "string", "cls": int}``. Types are those of Arrow
        (or their names), Python and NumPy: numbers, text, bytes, times, lists, structs. Lists of
        numbers are read from JSON and from ``.npy`` files: ``{"npy": "list<float32>"}``.
    json_fields
        Fields of the ``json`` member that become columns ``json.<field>``, with their types:
        ``{"similarity": "float32", "user.name": "string"}``.
    size
        Size in pixels to resize to, from 1 to 32767: an int, or (height, width). By default images
        keep their size.
    resize
        ``"stretch"`` to ``size``; cover it and ``"crop"``; fit inside and ``"pad"`` with black; or
        scale the ``"shorter"`` or ``"longer"`` edge to it. Sizes and places are rounded as those of
        torchvision's ``Resize`` and ``CenterCrop``.
    interpolation
        ``"bilinear"``, ``"bicubic"`` or ``"lanczos"``, always antialiased, as Pillow's filters.
        Also for ``augment``. Labels and stored values take the nearest pixel.
    crop_from
        With ``resize="crop"``, the shorter edge of the image from which ``size`` is cut, at least
        the edges of ``size``: ``size=224, resize="crop", crop_from=256`` is torchvision's
        ``Resize(256)`` and ``CenterCrop(224)``. By default the image just covers ``size``.
    augment
        An augmentation, or a list of them. ``"random_resized_crop"`` or a
        :class:`RandomResizedCrop` comes first: a random region of each image is decoded, resized to
        ``size`` and mirrored at random. After the resize follow, in the order of the list,
        ``"random_horizontal_flip"``, ``"rand_augment"``, ``"auto_augment"``, ``"random_erasing"``,
        or their classes with other numbers, and a :class:`ColorJitter`. All image columns of a
        sample that come from different members, such as an image and its mask, get the same
        numbers, and regions in proportion to their own height and width; the second column of one
        member gets others, and so does the second of other members. Labels and stored values follow
        what moves pixels only. With a crop or a flip, the column ``image.region`` tells both:
        struct<top, left, height, width: int32, flipped: bool>, in pixels of the upright image.
    boxes
        A column of boxes of the image column ``image``: a list of lists whose first four numbers
        are a box of the upright image, such as ``"json.boxes"`` of
        ``json_fields={"boxes": "list<float32[4]>"}``. It becomes that of boxes of the decoded
        image, which follow ``augment``, ``resize`` and ``size`` (a ``transform`` is not known), and
        are cut at its edges. Whole numbers become float32. Null where the image has no header, and
        where a row holds no boxes by this description.
    box_format
        ``"xyxy"`` (left, top, right, bottom) or ``"xywh"`` (left, top, width, height).
    box_labels
        Columns of lists with an item for each box. A box of which nothing is left, or less than
        ``min_visibility``, is removed, together with these items. None, the default, removes no
        box: it becomes four zeros, so that lists which are not named here stay aligned. ``()`` if
        there are no such lists.
    min_visibility
        Least share of a box's area that has to be left in the decoded image, 0 to 1.
    points
        Columns of points, as ``boxes``: lists, nested at will, whose first two numbers are x and y.
        Points are neither cut nor removed; those that leave lie outside of the decoded image.
    coordinates
        ``"pixels"``, or ``"shares"`` of width and height, for boxes and points, before and after.
    transform
        A function of DALI operators, from images to uint8 images of layout HWC. Runs after the
        resize.
    mode
        ``"RGB"`` (3 channels), ``"RGBA"`` (4, alpha 255 if the image has none), ``"L"`` (1, luma),
        or ``"labels"`` (1) for class masks: stored grey values or palette indices, resized to the
        nearest pixel, so that no new class appears; an image in colours, or with labels above 255,
        is an ``error``. ``"raw"`` gives the stored values, 1 to 4 channels of uint8, uint16 (grey
        of 9 to 16 bits: depth, X-rays) or float32 (TIFF), without ``transform``, and ``size`` only
        with ``augment``, by the nearest pixel. For TIFFs it needs the extra ``tiff``.
    errors
        What to do with an image that can't be decoded: ``"null"`` keeps the row, with the reason in
        ``error``; ``"drop"`` drops the row, so that even ``len`` has to decode; ``"raise"`` raises.
    shard_errors
        What to do with a shard that can't be read at all: ``"raise"``, or ``"drop"``, which makes
        it an empty partition, with a warning. A damaged shard keeps its complete samples, and
        columns of a sidecar that can't be read are null for its shard.
    max_pixels
        Larger images are an error, before any memory is allocated for them. None: no limit.
    max_member_bytes
        Larger members, other than the image, are null, with a warning: 256 MiB by default. None:
        2 GiB, as many bytes as a column can hold. If all members that a query needs of a partition
        are more than it can hold, a ``MemoryError`` is raised.
    backend
        ``"cudf"`` or ``"pandas"``. By default Dask's ``dataframe.backend`` if that is set, else
        cuDF if this machine has it and a GPU.
    partition_size
        Decoded bytes that a partition may hold, for example ``"512 MiB"``. A shard that would
        decode to more becomes several partitions, at most one per image. ``"auto"``: a sixteenth of
        a worker's memory, on cuDF a thirty-second of the GPU's and at most 2^30 bytes. None: shards
        are never split.
    shards_per_partition
        Number of consecutive small shards in one partition; fewer if they would decode to more than
        ``partition_size``. ``"auto"``: up to about 10,000 samples and 128 MiB of pixels, judged by
        the first shard. Useful for thousands of shards that a task reads faster than Dask schedules
        it. In a partition of several shards the index is the number of a sample in its shard, plus
        2^32 for each shard of the partition before it.
    scaled_decode
        Decode a JPEG that is at least twice as large as ``size`` at a reduced scale: up to three
        times faster, at 30 to 50 dB PSNR to the full decode. On the CPU, with resize ``"stretch"``,
        ``"crop"`` or ``"pad"``.
    sidecar
        ``"auto"`` adds the columns of the parquet file beside each shard (``00000.parquet`` for
        ``00000.tar``), as img2dataset and :func:`to_webdataset` write it, joined by its column
        ``key`` or ``__key__``. The files are found by one listing per folder, the same as indexes.
        Shards without a file have nulls, and so have shards whose file has no such column, repeats
        a key, or is no parquet file, with a warning. ``"parquet"``: as that, but such shards are an
        error. None or False: no such columns. See Notes.
    allow_pipes
        Whether paths may be commands: ``"pipe:curl -s https://host/{00..99}.tar"`` is run by the
        shell, as in webdataset, once per partition that is read. A partition is then a whole shard,
        and the command's output is held in memory. Only for lists of paths that you would run as
        programs.
    index
        Where to look for indexes, with which no shard is opened before its pixels are needed.
        ``"auto"``: those of :func:`write_index` beside the shards, by one listing per folder. A
        folder: in there. True: beside the shards, without a listing; a shard without an index is an
        error. False: none is used. A stale index is not used, with a warning.
    storage_options
        For the fsspec filesystem of remote paths.
    decode
        Whether to decode images. With False, ``image`` holds references of the dtype
        ``image_reference``: small values that survive filters, joins, shuffles and parquet files.
        :func:`decode_images` turns them into pixels, at any time and in any process. There is no
        column ``error``.

    Returns
    -------
    dask.dataframe.DataFrame
        Columns ``__key__``, ``__url__``, ``offset``, ``nbytes``, ``format``, ``height``, ``width``,
        ``channels``, ``error``, those of members and of the sidecar, and ``image``: struct<data:
        large_binary, height, width, channels: int32> (on cuDF, which has no type for bytes, data:
        list<uint8>), null if there is an error. The index is unique, and the same in all reads. See
        ``.images`` for the pixels.

    Raises
    ------
    ShardNotFoundError
        If a path matches nothing.
    ShardError
        If the first shard can't be read; with ``shard_errors="drop"``, if none can.
    ArgumentError
        For arguments that are unknown or contradict each other, columns that don't exist, filters
        that can't be evaluated, sidecars that are missing or have no keys, commands that are not
        allowed.
    MissingDependencyError
        If the backend's library is not installed.

    Notes
    -----
    Keys are webdataset's: the path up to the first dot of its last part. If a key occurs again
    later in a shard, its members join the earlier sample (webdataset makes a second sample), unless
    that has such members already.

    Rows of a sidecar without a sample (failed downloads) are left out; samples without a row have
    nulls, with a warning. Columns and types are those of the first sidecar. A column whose name is
    taken is called ``sidecar.<name>``. A file of ``to_webdataset`` repeats columns of its shard:
    these are left out, but with ``"parquet"`` only those that every collection has. Columns that a
    later file lacks are null, columns that only it has are left out, and other types are cast if
    that changes no value; else a ``ShardError`` is raised. With ``"parquet"``, a key on two rows is
    also a ``ShardError``, once a column of that file is needed.

    Examples
    --------
    >>> import dask_image_ingest as dii
    >>> ddf = dii.read_webdataset_images("train-{000..003}.tar", size=224)
    >>> len(ddf)
    52
    >>> ddf[ddf.width >= 512].images.stack().compute().shape
    (16, 224, 224, 3)
    """
    backend_ = checked_backend(backend, errors, decode)
    storage_options = check_storage_options(storage_options)
    check_choice("shard_errors", shard_errors, ("raise", "drop"))
    check_sidecar(sidecar)
    storage_options = with_pipes_allowed(storage_options, allow_pipes)
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
        scaled_decode=scaled_decode,
    )
    annotations = parse_annotations(
        boxes, box_format, box_labels, min_visibility, points, coordinates, decode
    )
    largest = parse_partition_size(partition_size, backend_)
    together = parse_shards_per_partition(shards_per_partition, largest)
    options = ReadOptions(
        images=images,
        errors=errors,
        shard_errors=shard_errors,
        backend=backend_.name,
        storage_options=storage_options,
        needs_sidecars=sidecar == "parquet",
        max_member_bytes=parse_max_member_bytes(max_member_bytes),
        annotations=annotations,
    )
    extensions = {member.column: member.extensions for member in images}
    index_source = parse_index(index)
    paths = list(paths) if isinstance(paths, Iterator) else paths
    shards = find_shards(paths, storage_options)
    searches = searches_of(paths, shards)
    listings: Listings = {}
    shards = with_sidecars(shards, sidecar, storage_options, listings)
    indexes = find_indexes(shards, index_source, storage_options, listings)
    skip = shard_errors == "drop"
    while True:
        try:
            with open_first(shards, storage_options, skip, indexes) as first:
                schema = make_schema(
                    first.index,
                    first.content,
                    images=extensions,
                    members=members,
                    json_fields=json_fields,
                )
                schema = replace(schema, augmented=augmented(images))
                added = sidecar_columns(shards, sidecar, schema.types, storage_options, backend_)
                if added is None:
                    shards = [replace(shard, sidecar=None) for shard in shards]
                schema = replace(schema, sidecar=added or ())
                check_annotations(annotations, schema.types, images[0].decoding)
                selected, predicate = asked_for(schema, columns, filters, decode)
                first.warn_of_unknown(schema, extensions)
                partitions = make_partitions(shards, first, options, largest, together, indexes)
            break
        except UnusableIndexError:  # of the first shard: it was removed from `indexes`
            continue
    columns_token = str((schema.member_columns, schema.sidecar))
    # Indexes are part of the token: of two datasets with equal tokens, Dask keeps the older one.
    index_versions = sorted(
        (url, index.url, index.required, index.file.version if index.file else "")
        for url, index in indexes.items()
    )
    token = tokenize(
        fingerprint_of(shards), columns_token, options, largest, together, index_versions, searches
    )
    dataset = Dataset(partitions, tuple(shards), schema, options, searches, token)
    return new_collection(read_of(dataset, selected, predicate, decode))


def read_of(
    dataset: Dataset, columns: list[str] | None, filters: Predicate | None, decode: bool
) -> Expr:
    """Build the query: a scan, and a decode above it if pixels or errors are needed.

    Filters on metadata go into the scan. If some are on errors, the images of these errors are
    decoded first, and the others after the filter.
    """
    options, schema = dataset.options, dataset.schema
    kind: type[Scan] = ScanTables if options.is_table else ScanShards
    kind = kind if options.root is None else ScanFiles
    if not decode:
        return kind(dataset, columns, filters)
    filtered = columns_of(filters)
    kept = error_filter(options.errors)
    wanted = list(schema.types) if columns is None else columns
    needed = {*wanted, *(filtered & schema.made)}
    first, *_ = options.images
    every = (
        ColumnDecode(
            member.column,
            schema.field(member.column, "error"),
            member.decoding,
            options.errors,
            options.storage_options,
            region=region if (region := region_field(member.column)) in schema.made else None,
            annotations=options.annotations if member is first else None,
        )
        for member in options.images
    )
    images = [image.selected(needed) for image in every if kept or image.columns & needed]
    if not images:
        return kind(dataset, columns, filters)
    below = {name for image in images for name in image.columns}
    by_made = filtered & schema.made
    if by_made:
        below |= filtered
    scanned = columns if below <= {*wanted} else [*wanted, *below.difference(wanted)]
    scan: Expr = kind(dataset, scanned, only(filters, filtered - schema.made))
    if by_made:
        first_ones = tuple(image for image in images if image.columns & by_made)
        scan = FilterRows(Decode(scan, first_ones, kept), filters)
        images = [image for image in images if image not in first_ones]
    frame = Decode(scan, tuple(images), kept) if images else scan
    return frame if frame.columns == wanted else frame[wanted]


def filter_rows(frame: ImageDataFrame, predicate: Predicate) -> ImageDataFrame:
    """The rows of a lazy frame for which a predicate on its metadata columns holds.

    Raises
    ------
    ArgumentError
        If the frame lacks a column of the predicate, or can't compare it.
    """
    schema = backend_of(frame._meta).to_arrow(frame._meta).schema
    types = dict(zip(schema.names, schema.types, strict=True))
    return new_collection(FilterRows(frame.expr, parse_filters(predicate, types)))


def asked_for(
    schema: Schema,
    columns: Sequence[str] | None,
    filters: Filters | Predicate | None,
    decode: bool,
) -> tuple[list[str] | None, Predicate | None]:
    """The arguments ``columns=``, None for all, and ``filters=``."""
    types = {n: t for n, t in schema.types.items() if decode or n not in schema.made}
    predicate = parse_filters(filters, types)
    if columns is None:
        return None if decode else list(types), predicate
    selected = list_of_names("columns", columns, "column names")
    check_columns(selected, list(types), "the columns of the first shard are")
    if len(set(selected)) < len(selected):
        raise ArgumentError(f"columns={shown(selected)} names a column twice")
    return selected, predicate


def fingerprint_of(shards: Sequence[Shard]) -> str:
    """A digest of shards and sidecars, with their sizes and versions."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        for file in filter(None, (shard, shard.sidecar)):
            digest.update(f"{file.url}\0{file.size}\0{file.version}\n".encode())
    return digest.hexdigest()
