"""``make_thumbnails``: sample rows, decode them at thumbnail size, build cards.

Labels of a mask are drawn over its image, in colours.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import dask
import numpy as np
import pandas as pd
from dask.dataframe.dispatch import concat
from dask.utils import format_bytes

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import (
    check_storage_options,
    check_unique,
    column_names,
    whole_number,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan import MapColumns, RowsAt, datasets_of, select_columns
from dask_image_ingest.dataset.references import (
    LOCATION_COLUMNS,
    Decode,
    add_references,
    decode_partition,
    location_columns,
    point_to_images,
)
from dask_image_ingest.dataset.scan import ColumnDecode
from dask_image_ingest.dataset.schema import image_field
from dask_image_ingest.decode import LARGEST_SIZE, MAX_PIXELS, DecodeSpec, make_decode_spec
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, image_columns, pandas_type
from dask_image_ingest.ops import encode, small_images
from dask_image_ingest.storage import shard_name
from dask_image_ingest.typedefs import AnyFrame, DataFrame
from dask_image_ingest.url_secrets import without_secrets
from dask_image_ingest.view.page import Card, Thumbnails


def first_rows(frame: AnyFrame, n: int) -> DataFrame:
    """The first ``n`` rows, computed from few partitions."""
    if not isinstance(frame, FrameBase):
        return frame.head(n)
    parts: list[Any] = []
    # Double the number of partitions each time: a filter may leave many of them empty.
    start, count = 0, 1
    while start < frame.npartitions and (not parts or sum(map(len, parts)) < n):
        stop = min(start + count, frame.npartitions)
        parts += dask.compute(*_heads(frame, range(start, stop), n))
        start, count = stop, 2 * count
    return concat(parts).head(n)


def _heads(frame: FrameBase, partitions: Sequence[int], n: int) -> list[Any]:
    return [frame.partitions[number].head(n, compute=False) for number in partitions]


def spread_rows(frame: AnyFrame, n: int, lengths: Sequence[int]) -> DataFrame:
    """Compute ``n`` rows at even distances, in order: the same ones for any partitions.

    ``lengths`` has the number of rows of each partition. Like any filter by metadata, the choice
    comes before the decode.
    """
    total = sum(lengths)
    chosen = np.arange(min(n, total)) * total // max(min(n, total), 1)
    if not isinstance(frame, FrameBase):
        return frame.iloc[chosen]
    ends = np.cumsum(lengths)
    parts = np.searchsorted(ends, chosen, "right")
    needed = np.unique(parts).tolist()
    if not needed:
        return first_rows(frame, n)
    positions = tuple((chosen - (ends - lengths)[parts])[parts == part] for part in needed)
    part = frame.partitions[needed]
    mask = RowsAt(part[[]].expr, positions)
    # Dask would join small files of parquet to other partitions than those of the lengths.
    with dask.config.set({"optimization.tune.active": False}):
        return dx.new_collection(dx.Filter(part.expr, mask)).compute()


def overlay_labels(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Blend the colours of a mask's labels into an image, at 50 %; label 0 is transparent.

    The mask is scaled by the nearest pixel. The result has three channels.
    """
    if labels.shape[2] != 1 or labels.dtype != np.uint8:
        raise ArgumentError(
            f"mask= names a column of {labels.dtype} with {labels.shape[2]} channels: read it with "
            "ImageColumn(..., mode='labels')"
        )
    height, width = image.shape[:2]
    rows, columns = (
        (np.arange(length) * 2 + 1) * stored // (2 * length)
        for length, stored in zip((height, width), labels.shape[:2], strict=True)
    )
    label = labels[rows[:, None], columns[None], 0]
    rgb = image[:, :, :3] if image.shape[2] >= 3 else image[:, :, :1].repeat(3, axis=2)
    blended = (rgb.astype(np.uint16) + palette()[label]) // 2
    return np.where(label[:, :, None] > 0, blended, rgb).astype(np.uint8)


@functools.cache
def palette() -> np.ndarray:
    """Colours of labels 0 to 255, uint8 (256, 3), as in Pascal VOC.

    https://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html
    """
    colors = np.zeros((256, 3), np.uint8)
    for label in range(256):
        for bit in range(8):
            colors[label, bit % 3] |= (label >> bit & 1) << (7 - bit // 3)
    return colors


_HEADER = ("format", "height", "width", "nbytes")


def make_thumbnails(
    frame: AnyFrame,
    n: int,
    size: int,
    columns: Sequence[str] | None,
    storage_options: dict[str, Any] | None = None,
    lengths: Sequence[int] | None = None,
    *,
    image: str | None = None,
    mask: str | None = None,
    key: str = "__key__",
) -> Thumbnails:
    """Thumbnails of the first ``n`` rows; of `spread_rows` with the ``lengths`` of partitions.

    ``key`` is the column by whose values rows are marked, if the frame has it.
    """
    if columns is None:
        columns = [name for name in frame.columns if name == "__key__"]
    columns = column_names([columns] if isinstance(columns, str) else columns, frame.columns)
    n = whole_number("n", n, 1, "pass a positive number of images")
    advice = f"pass the longer edge in pixels, from 1 to {LARGEST_SIZE}"
    size = whole_number("size", size, 1, advice, LARGEST_SIZE)
    storage_options = check_storage_options(storage_options)
    # A frame without images, whose locations are known.
    has_locations = not image_columns(frame) and {*LOCATION_COLUMNS} <= {*frame.columns}
    if has_locations:
        image = "image"
    elif image is None:
        image = frame.images.column
    # Images and their errors are shown in the place of the thumbnail, not as text.
    not_text = {*image_columns(frame), *(("image", "error") if has_locations else ())}
    texts = [name for name in columns if name not in not_text]
    facts = [*(image_field(image, name) for name in (*_HEADER, "error")), "__url__", key]
    facts = [name for name in facts if name in frame.columns and name not in not_text]
    images = [] if has_locations else [image, *({mask} - {None})]
    needed = list(dict.fromkeys([*texts, *facts, *images]))
    check_unique(needed, frame.columns)
    sample = first_rows if lengths is None else functools.partial(spread_rows, lengths=lengths)
    referenced = references_of_images(frame, needed, storage_options)
    decodes = None if referenced is None else at_size(referenced[1], image, size, mask)
    if referenced is None or decodes is None:
        rows = sample(_simplify(select_columns(frame, needed)), n)
    else:
        rows = decode_small(sample(referenced[0], n), decodes)
    masks = None if mask is None else rows.images[mask].arrays()
    rows = rows if mask is None else rows.drop(columns=mask)
    if decodes is None:
        rows = small_images(rows, image, size, "longer", smooth=True)
    return Thumbnails(_cards(rows, texts, facts, size, masks, image, key), size)


def _simplify(frame: AnyFrame) -> AnyFrame:
    """Push projections down now: Dask does not push them through a head of a concatenation."""
    return frame.simplify() if isinstance(frame, FrameBase) else frame


def _cards(
    rows: DataFrame,
    texts: list[str],
    facts: list[str],
    size: int,
    masks: list[Any] | None,
    image: str,
    key: str,
) -> list[Card]:
    backend = backend_of(rows)
    arrays = [array if array is None else backend.host(array) for array in rows.images.arrays()]
    for row, (array, labels) in enumerate(zip(arrays, masks or (), strict=False)):
        if array is not None and labels is not None:
            arrays[row] = overlay_labels(array, backend.host(labels))
    names = list(dict.fromkeys([*texts, *facts, *(["error"] if "error" in rows.columns else [])]))
    values = []
    if names:
        table = rows[names]
        table.columns = list(map(str, range(len(names))))  # Arrow takes no other names than texts
        values = [column.to_pylist() for column in backend.to_arrow(table).columns]
    cards = []
    for row, array in enumerate(arrays):
        record = {name: column[row] for name, column in zip(names, values, strict=True)}
        facts_of_image = {name: record.get(image_field(image, name)) for name in _HEADER}
        facts_of_image["__url__"] = record.get("__url__")
        error = record.get(image_field(image, "error")) or record.get("error")
        texts_of_row = {name: without_secrets(_value_text(record[name])) for name in texts}
        mark = record.get(key)
        if not isinstance(mark, (str, int)) or without_secrets(str(mark)) != str(mark):
            mark = None
        cards.append(_card(array, facts_of_image, error, texts_of_row, size, mark))
    return cards


def _card(
    array: np.ndarray | None,
    record: dict[str, Any],
    error: str | None,
    texts: dict[str, str],
    size: int,
    key: str | int | None,
) -> Card:
    error = error or (None if array is not None else "missing: no image")
    shape = None
    if array is not None:
        # Show an image that is smaller than a thumbnail at its own size.
        stored = max(_number(record, "height") or size, _number(record, "width") or size)
        scale = min(1.0, stored / max(array.shape[:2]))
        shape = (max(1, round(array.shape[0] * scale)), max(1, round(array.shape[1] * scale)))
    return Card(
        jpeg=None if array is None else encode(_displayable(array), "jpeg", 85),
        shape=shape,
        error=error,
        texts=texts,
        facts=_facts_text(record),
        key=key,
    )


def _displayable(array: np.ndarray) -> np.ndarray:
    """The channels to show: without alpha, and the first three of more."""
    return array[:, :, :3] if array.shape[2] >= 3 else array[:, :, :1]


def _facts_text(record: dict[str, Any]) -> str:
    height, width, nbytes = (_number(record, name) for name in ("height", "width", "nbytes"))
    size = f"{width} × {height}" if height and width else None
    shard = record["__url__"]
    shard = shard_name(shard) if isinstance(shard, str) else None
    parts = (size, record.get("format"), None if nbytes is None else _short_bytes(nbytes), shard)
    return " · ".join(part for part in parts if part and isinstance(part, str))


def _number(record: dict[str, Any], name: str) -> int | None:
    """A number of pixels or bytes; None for anything else in a table's own column of this name."""
    value = record.get(name)
    return int(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else None


def _short_bytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _value_text(value: object) -> str:
    if value is None or value is pd.NA:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bytes):
        return str(format_bytes(len(value)))
    if isinstance(value, list):
        shown = ", ".join(_value_text(item) for item in itertools.islice(value, 8))
        return f"[{shown}{', …' if len(value) > 8 else ''}]"
    return str(value)


#: A frame (or expression) with references, and the decode of each reference column.
Referenced: TypeAlias = tuple[Any, Mapping[Any, ColumnDecode]]


def references_of_images(
    frame: AnyFrame, columns: Sequence[Hashable], storage_options: dict[str, Any] | None
) -> Referenced | None:
    """Select columns of a frame, with references in place of images.

    For a frame without images, references are made from its location columns. None if there are no
    references: images that are in memory, or were computed.
    """
    if not image_columns(frame):
        return _references_of_location_columns(frame, columns, storage_options)
    if not isinstance(frame, FrameBase):
        return None
    found = _below_decode(_decoded_last(select_columns(frame, columns)))
    if found is None:
        return None
    rows, images = found
    if storage_options is not None:
        images = {
            name: replace(image, storage_options=storage_options) for name, image in images.items()
        }
    return dx.new_collection(rows), images


def _references_of_location_columns(
    frame: AnyFrame, columns: Sequence[Hashable], storage_options: dict[str, Any] | None
) -> Referenced | None:
    if not {*LOCATION_COLUMNS} <= {*frame.columns}:
        return None
    needed = {*columns, *location_columns(frame.columns)} - {"image", "error"}
    names = [name for name in frame.columns if name in needed]
    options, max_pixels = _options_of_reads(frame)
    images = ColumnDecode(
        "image", "error", _rgb_decoding(max_pixels), storage_options=storage_options or options
    )
    if not isinstance(frame, FrameBase):
        return add_references(select_columns(frame, names), "image", "error"), {"image": images}
    rows = point_to_images(select_columns(frame, names).expr, "image", "error")
    return dx.new_collection(rows), {"image": images}


def _options_of_reads(frame: AnyFrame) -> tuple[dict[str, Any] | None, int | None]:
    """Storage options and ``max_pixels`` of the first read in a frame's query."""
    if not isinstance(frame, FrameBase):
        return None, MAX_PIXELS
    for dataset in datasets_of(frame.expr):
        return dataset.options.storage_options, dataset.options.images[0].decoding.max_pixels
    return None, MAX_PIXELS


def _decoded_last(frame: FrameBase) -> dx.Expr:
    """The query with its decode lifted above everything that needs no pixels.

    Optimising does so, except for functions of other columns (`MapColumns`): between a read and its
    decode, they would keep both from being one task.
    """
    while True:
        expr: dx.Expr = frame.simplify().expr
        lifted = None
        for step in expr.find_operations(MapColumns):
            decode = step.frame
            if isinstance(decode, Decode) and decode.added.isdisjoint(
                (*step.inputs, *step.outputs)
            ):
                references = decode.as_references()
                if references is not None:
                    rows, decodes = references
                    lifted = Decode(MapColumns(rows, *step.operands[1:]), decodes)
                    frame = dx.new_collection(expr.substitute(step, lifted[step.columns]))
                    break
        if lifted is None:
            return expr


def _below_decode(expr: dx.Expr) -> Referenced | None:
    """The expression below the decode at the top of a query, and the decodes; None if none is."""
    if isinstance(expr, Decode):
        references = expr.as_references()
        if references is None:
            return None
        rows, decodes = references
        return rows, {decode.image: decode for decode in decodes}
    if isinstance(expr, dx.Projection) and expr.ndim == 2:
        found = _below_decode(expr.frame)
        if found is None:
            return None
        rows, images = found
        return rows[[n for n in expr.columns if n in rows.columns]], images
    if isinstance(expr, dx.Repartition):
        found = _below_decode(expr.frame)
        return found and (expr.substitute(expr.frame, found[0]), found[1])
    if isinstance(expr, dx.Concat):
        frames = [frame for frame in expr._frames if image_columns(frame._meta)]
        parts = [part for frame in frames if (part := _below_decode(frame)) is not None]
        if len(parts) == len(frames) and all(part[1] == parts[0][1] for part in parts):
            for frame, part in zip(frames, parts, strict=True):
                expr = expr.substitute(frame, part[0])
            return expr, parts[0][1]
    return None


def decode_small(rows: DataFrame, images: Sequence[ColumnDecode]) -> pd.DataFrame:
    """Decode a few rows of references to a pandas frame, on the CPU: a client may have no GPU."""
    frame = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
    decodes = [
        replace(image, decoding=replace(image.decoding, device="cpu"), errors="null")
        for image in images
    ]
    decoded: pd.DataFrame = decode_partition(frame, decodes)
    return decoded


def at_size(
    images: Mapping[Hashable, ColumnDecode],
    image: Hashable,
    longer: int,
    mask: Hashable | None = None,
) -> list[ColumnDecode] | None:
    """Decodes of thumbnails of an image column, and of its masks at full size.

    None if the stored image would not look like the decoded one.
    """
    if image not in images or mask not in (None, *images):
        return None
    decoding = images[image].decoding
    # Raw values are scaled by the range of each image, which a resize would change.
    if decoding.is_random or decoding.mode == "raw":
        return None
    small = replace(
        images[image], error="error", decoding=_rgb_decoding(decoding.max_pixels, longer)
    )
    return [small] if mask is None else [small, replace(images[mask], error=None)]


def _rgb_decoding(max_pixels: int | None, longer: int | None = None) -> DecodeSpec:
    return make_decode_spec(
        device="cpu",
        size=longer,
        resize="stretch" if longer is None else "longer",
        mode="RGB",
        transform=None,
        max_pixels=max_pixels,
    )
