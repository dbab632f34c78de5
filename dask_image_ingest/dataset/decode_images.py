"""``decode_images``: add pixels to rows that were filtered, joined or shuffled without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dask_image_ingest.arguments import (
    check_choice,
    check_frame,
    check_storage_options,
    list_of_names,
    shown,
)
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset.from_arrow import from_arrow, is_arrow_table
from dask_image_ingest.dataset.read_options import ErrorPolicy
from dask_image_ingest.dataset.references.decode_node import Decode
from dask_image_ingest.dataset.references.fetch import decode_partition
from dask_image_ingest.dataset.references.make_references import (
    LOCATION_COLUMNS,
    add_references,
    carry_images,
    check_encoded,
    point_to_images,
    references_of_locations,
    with_encoded,
)
from dask_image_ingest.dataset.references.parts import check_box, cut_boxes, with_boxes
from dask_image_ingest.dataset.scan.rows import ColumnDecode, error_filter
from dask_image_ingest.dataset.schema.annotations import (
    BoxFormat,
    Coordinates,
    check_annotations,
    parse_annotations,
)
from dask_image_ingest.dataset.schema.columns import image_field, part_names, region_field
from dask_image_ingest.decode import (
    MAX_PIXELS,
    Augment,
    Interpolation,
    Mode,
    Outside,
    Resize,
    make_decode_spec,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, image_columns, reference_columns
from dask_image_ingest.storage import with_pipes_allowed
from dask_image_ingest.typedefs import DataFrame

# A dataframe of Dask, pandas or cuDF.
Frame = TypeVar("Frame", bound=Any)


def decode_images(
    frame: Frame,
    *,
    image: str | Sequence[str] | Mapping[str, str] | None = None,
    box: str | None = None,
    margin: float = 0.0,
    outside: Outside = "clip",
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
    view: int = 0,
    mode: Mode = "RGB",
    errors: ErrorPolicy = "null",
    max_pixels: int | None = MAX_PIXELS,
    allow_pipes: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Frame:
    """Decode the images that the rows of a frame refer to, or hold as encoded bytes.

    Filter, join, sort, sample or shuffle the metadata first, which decodes no image; then decode
    the remaining rows. Only the bytes of their images are read, shard by shard, in the order of
    their offsets. References name the version of their shard: if it was replaced since, a
    `ShardError` is raised. The columns ``__url__``, ``offset`` and ``nbytes`` name none: rows get
    the bytes that are there now.

    Parameters
    ----------
    frame
        A Dask, pandas or cuDF dataframe, or a table that :func:`from_arrow` takes: with columns of
        references, as ``read_webdataset_images(..., decode=False)`` gives them; or with the columns
        ``__url__``, ``offset`` and ``nbytes`` of :func:`read_webdataset_images`; or any frame with
        a column of encoded images.
    image
        What to decode: a column of references or a list of these, by default all. Or a column of
        encoded images: bytes (Arrow's ``binary``, or Python objects), or ``struct<bytes, path>`` as
        in Hugging Face tables. Rows without bytes are ``missing``: a path alone is not opened. The
        images take its place, or with a mapping, ``{"image": "jpg"}``, are a new column. To decode
        several columns with different options, call the function once for each.
    box
        Column with four numbers in each row: only this part of each picture is decoded. Make a row
        of each box by ``frame.explode``. ``box_format`` and ``coordinates`` apply, in pixels of the
        upright picture; edges are rounded as Pillow's ``crop`` does. A reference that has a part
        already, such as a tile, gets the box in that part. A box that is null, or has no area, has
        the error ``box``.
    margin
        Share of its own width and height by which a box grows on each side.
    outside
        What becomes of a part that reaches beyond its picture: ``"clip"`` cuts it off, ``"pad"``
        makes black pixels, and with ``"error"`` the row has the error ``box``, as it always has if
        the part lies outside altogether.
    size, resize, interpolation, crop_from, augment
        As for :func:`read_webdataset_images`.
    boxes, box_format, box_labels, min_visibility, points, coordinates
        As for :func:`read_webdataset_images`; they follow the first of the image columns.
    transform
        As for :func:`read_webdataset_images`.
    view
        Which random numbers of a sample: images of one view get the same region and the same random
        transform, as an image and its mask should, and those of another view others.
    mode, errors, max_pixels
        As for :func:`read_webdataset_images`.
    allow_pipes, storage_options
        As for :func:`read_webdataset_images`.

    Returns
    -------
    dataframe
        ``frame`` with images in place of references or encoded images; or with a new column, of
        locations ``image``, which replaces one of that name. The errors of ``image``, and of the
        only image column of a frame without a column ``error``, are in ``error``, others in
        ``<name>.error``. Lazy if ``frame`` is: projections and filters of the result are pushed
        below the decode. Of a table of another engine it is a frame in memory.

    Raises
    ------
    ArgumentError
        If a column is missing or of another type, or arguments contradict each other.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    PartitionTooLargeError
        Before the decode, if the images of a partition exceed what it can hold.

    Examples
    --------
    >>> table = read_webdataset_images("train-{000..003}.tar").drop(columns=["image", "error"])
    >>> cats = table[table.txt.str.contains("cat")]
    >>> decode_images(cats, size=224).images.stack().compute().shape
    (4, 224, 224, 3)

    Encoded images in any dataframe, here two made by ``.images.encode``:

    >>> files = frame.head(2).images.encode("png").to_frame("png")
    >>> decode_images(files, image="png").images.arrays()[0].shape
    (224, 224, 3)
    """
    if is_arrow_table(frame):
        frame = from_arrow(frame)
    lazy = isinstance(frame, FrameBase)
    check_frame(frame)
    meta = frame._meta if lazy else frame
    references, into, encoded = _parse_image(image, reference_columns(frame))
    if encoded is not None:
        check_encoded(meta, encoded)
    elif not references:
        _check_locations(meta)
    check_box(meta, box, margin)
    check_choice("errors", errors, ("null", "raise", "drop"))
    storage_options = check_storage_options(storage_options)
    storage_options = with_pipes_allowed(storage_options, allow_pipes)
    decoding = make_decode_spec(
        device=backend_of(meta).device,
        size=size,
        resize=resize,
        interpolation=interpolation,
        crop_from=crop_from,
        mode=mode,
        augment=augment,
        transform=transform,
        max_pixels=max_pixels,
        view=view,
        outside=outside,
    )
    annotations = parse_annotations(
        boxes, box_format, box_labels, min_visibility, points, coordinates
    )
    if annotations is not None:
        known = [name for name in annotations.columns if name in meta.columns]
        schema = backend_of(meta).to_arrow(meta[known]).schema
        types = dict(zip(schema.names, schema.types, strict=True))
        check_annotations(annotations, types, decoding)
    names = tuple(references or (into,))
    images = tuple(
        ColumnDecode(
            name,
            _error_column(name, meta),
            decoding,
            errors,
            storage_options,
            region=region_field(name) if decoding.is_placed_at_random else None,
            annotations=None if number else annotations,
            part=() if box is None else part_names(name, meta.columns, [name] == references[:1]),
        )
        for number, name in enumerate(names)
    )
    if not lazy:
        if encoded is not None:
            frame = with_encoded(frame, encoded, into, images[0].error)
        elif not references:
            frame = add_references(frame, into, images[0].error)
        if box is not None:
            frame = with_boxes(frame, names, box, box_format, margin, coordinates)
        return decode_partition(frame, images, error_filter(errors))
    rows = frame.expr
    if encoded is not None:
        rows = carry_images(rows, encoded, into, images[0].error)
    elif not references:
        rows = point_to_images(rows, into, images[0].error)
    if box is not None:
        rows = cut_boxes(rows, names, box, box_format, margin, coordinates)
    return new_collection(Decode(rows, images, error_filter(errors)))


def _error_column(image: str, meta: DataFrame) -> str:
    """The name of an image column's error column: ``error`` if free, and it is the only image."""
    others = {*image_columns(meta), *reference_columns(meta)} - {image}
    only_one = not others and "error" not in meta.columns
    return "error" if only_one else image_field(image, "error")


def _parse_image(
    image: str | Sequence[str] | Mapping[str, str] | None, references: list[str]
) -> tuple[list[str], str, str | None]:
    """The argument ``image=``: columns of references to decode; else a new column, and its source.

    The source is a column of encoded images; None for locations.
    """
    if image is None:
        return references, "image", None
    if isinstance(image, Mapping):
        names = list_of_names("image", [*image, *image.values()], "names")
        if len(names) != 2 or not names[0] or names[1] in references:
            raise ArgumentError(
                f"image={shown(image)}: a mapping has one item, a new column and the column of "
                "encoded images that it is made of"
            )
        return [], names[0], names[1]
    names = list_of_names("image", [image] if isinstance(image, str) else image, "column names")
    if names and {*names} <= {*references}:
        return [name for name in references if name in names], "image", None
    if len(names) != 1:
        raise ArgumentError(
            f"image={shown(image)}: the frame's columns of references are "
            f"{', '.join(map(repr, references)) or 'none'}. Of encoded images, pass one column"
        )
    return [], names[0], names[0]


def _check_locations(meta: DataFrame) -> None:
    missing = [name for name in LOCATION_COLUMNS if name not in meta.columns]
    if missing:
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}: decode_images needs "
            f"{', '.join(LOCATION_COLUMNS)}, which say where each image is, or a column of "
            "references, as read_webdataset_images(decode=False) gives it, or image= with the "
            "name of a column of encoded images"
        )
    references_of_locations(meta.iloc[:0])
