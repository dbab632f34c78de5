"""``make_thumbnails``: sample rows, decode them at thumbnail size, build cards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.arguments import (
    check_storage_options,
    check_unique,
    column_names,
    whole_number,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import LOCATION_COLUMNS
from dask_image_ingest.decode import LARGEST_SIZE
from dask_image_ingest.frames import backend_of, image_columns
from dask_image_ingest.ops import encode, small_images
from dask_image_ingest.url_secrets import without_secrets
from dask_image_ingest.view.cards import Card, Thumbnails
from dask_image_ingest.view.labels import overlay_labels
from dask_image_ingest.view.references import at_size, decode_small, references_of_images
from dask_image_ingest.view.sample import first_rows, spread_rows

_HEADER = ("format", "height", "width", "nbytes")


def make_thumbnails(
    frame: Any,
    n: int,
    size: int,
    columns: Sequence[str] | None,
    storage_options: dict[str, Any] | None = None,
    spread: bool = False,
    *,
    image: str | None = None,
    mask: str | None = None,
) -> Thumbnails:
    """Thumbnails of the first ``n`` rows, or, with ``spread``, of rows from all over the frame."""
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
    facts = [name for name in (*_HEADER, "error") if name in frame.columns and name not in not_text]
    images = [] if has_locations else [image, *({mask} - {None})]
    needed = list(dict.fromkeys([*texts, *facts, *images]))
    check_unique(needed, frame.columns)
    sample = spread_rows if spread else first_rows
    referenced = references_of_images(frame, needed, storage_options)
    decodes = None if referenced is None else at_size(referenced[1], image, size, mask)
    if referenced is None or decodes is None:
        rows = sample(_simplify(frame[needed]), n)
    else:
        rows = decode_small(sample(referenced[0], n), decodes)
    masks = None if mask is None else rows.images[mask].arrays()
    rows = rows if mask is None else rows.drop(columns=mask)
    if decodes is None:
        rows = small_images(rows, image, size, "longer", smooth=True)
    return Thumbnails(_cards(rows, texts, facts, size, masks), size)


def _simplify(frame: Any) -> Any:
    """Push projections down now: Dask does not push them through a head of a concatenation."""
    return frame.simplify() if isinstance(frame, FrameBase) else frame


def _cards(
    rows: Any, texts: list[str], facts: list[str], size: int, masks: list[Any] | None
) -> list[Card]:
    backend = backend_of(rows)
    arrays = [array if array is None else backend.host(array) for array in rows.images.arrays()]
    for row, (array, labels) in enumerate(zip(arrays, masks or (), strict=False)):
        if array is not None and labels is not None:
            arrays[row] = overlay_labels(array, backend.host(labels))
    names = list(dict.fromkeys([*texts, *facts, *(["error"] if "error" in rows.columns else [])]))
    records = backend.to_arrow(rows[names]).to_pylist() if names else [{}] * len(arrays)
    return [
        _card(array, record, texts, size) for array, record in zip(arrays, records, strict=True)
    ]


def _card(array: Any, record: dict[str, Any], texts: list[str], size: int) -> Card:
    error = record.get("error") or (None if array is not None else "missing: no image")
    shape = None
    if array is not None:
        # Show an image that is smaller than a thumbnail at its own size.
        stored = max(record.get("height") or size, record.get("width") or size)
        scale = min(1.0, stored / max(array.shape[:2]))
        shape = (max(1, round(array.shape[0] * scale)), max(1, round(array.shape[1] * scale)))
    return Card(
        jpeg=None if array is None else encode(_displayable(array), "jpeg", 85),
        shape=shape,
        error=error,
        texts={name: without_secrets(_value_text(record[name])) for name in texts},
        facts=_facts_text(record),
    )


def _displayable(array: Any) -> Any:
    """The channels to show: without alpha, and the first three of more."""
    return array[:, :, :3] if array.shape[2] >= 3 else array[:, :, :1]


def _facts_text(record: dict[str, Any]) -> str:
    height, width = record.get("height"), record.get("width")
    size = f"{width} × {height}" if height and width else None
    nbytes = record.get("nbytes")
    parts = (size, record.get("format"), None if nbytes is None else _short_bytes(nbytes))
    return " · ".join(part for part in parts if part)


def _short_bytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _value_text(value: Any) -> str:
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
