"""Thumbnails of some rows, made from their encoded bytes: what ``show()`` shows."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

import dask
import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.arguments import check_storage_options, column_names, whole_number
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import POINTER, ReadWebDataset, decode_frame
from dask_image_ingest.decode import make_decoding
from dask_image_ingest.frames import backend_of, pandas_type
from dask_image_ingest.ops import encode, small_images
from dask_image_ingest.view.page import STYLE, page

_FACTS = ("format", "height", "width", "nbytes")

# Partitions that a sample spread over a dataset is taken from.
_SPREAD = 25

# Texts longer than this are folded, and unfold at a click.
_FOLDED = 90


@dataclass(frozen=True)
class Card:
    """One row: its thumbnail or the reason why it has none, and what stands below."""

    jpeg: bytes | None
    shape: tuple[int, int] | None
    error: str | None
    texts: dict[str, str]
    facts: str

    def html(self) -> str:
        """A ``figure``."""
        names = list(self.texts)
        first = escape(self.texts[names[0]]) if names else ""
        return (
            f'<figure class="dii-card{"" if self.jpeg else " dii-bad"}">'
            f'<div class="dii-picture">{self._picture(first)}</div><figcaption>'
            + (f'<span class="dii-key" title="{first}">{first}</span>' if names else "")
            + (f'<span class="dii-facts">{escape(self.facts)}</span>' if self.facts else "")
            + "".join(_text(name, self.texts[name]) for name in names[1:])
            + "</figcaption></figure>"
        )

    def _picture(self, alternative: str) -> str:
        if self.jpeg is None or self.shape is None:
            code, _, detail = (self.error or "no image").partition(": ")
            return (
                f'<div class="dii-error" role="img" aria-label="error"><strong>{escape(code)}'
                f"</strong><span>{escape(detail)}</span></div>"
            )
        height, width = self.shape
        data = base64.b64encode(self.jpeg).decode()
        return (
            f'<img src="data:image/jpeg;base64,{data}" alt="{alternative}" width="{width}" '
            f'height="{height}" loading="lazy" decoding="async">'
        )


class Thumbnails:
    """Thumbnails that a notebook shows.

    Attributes
    ----------
    cards : list of Card
        One for each row.
    """

    def __init__(self, cards: list[Card], thumbnail: int) -> None:
        self.cards = cards
        self._thumbnail = thumbnail

    def __len__(self) -> int:
        return len(self.cards)

    def __repr__(self) -> str:
        bad = sum(card.error is not None for card in self.cards)
        return f"<{len(self)} thumbnails, {bad} without an image: shown in a notebook, or save()>"

    def _repr_html_(self) -> str:
        return f"<style>{STYLE}</style>{self.html()}"

    def html(self) -> str:
        """The sheet without its style."""
        cards = "".join(card.html() for card in self.cards) or "<p>No rows.</p>"
        return f'<div class="dii-sheet" style="--dii-size: {self._thumbnail}px">{cards}</div>'

    def save(self, path: str | PathLike[str]) -> None:
        """Write a page that needs no other file."""
        Path(path).write_text(page("Images", self.html()), encoding="utf-8")


def make_thumbnails(
    frame: Any,
    n: int,
    thumbnail: int,
    columns: Sequence[str] | None,
    storage_options: dict[str, Any] | None = None,
    spread: bool = False,
) -> Thumbnails:
    """Thumbnails of the first ``n`` rows, or of rows from all over the frame.

    Raises
    ------
    ArgumentError
    """
    if columns is None:
        columns = [name for name in frame.columns if name == "__key__"]
    columns = column_names([columns] if isinstance(columns, str) else columns, frame.columns)
    n = whole_number("n", n, 1, "pass a positive number of images")
    thumbnail = whole_number("thumbnail", thumbnail, 1, "pass the longer edge in pixels")
    check_storage_options(storage_options)
    pointed = set(POINTER) <= set(frame.columns)
    image = [] if pointed else [frame.images.column]
    texts = [name for name in columns if name not in image and not (pointed and name == "error")]
    facts = [name for name in _FACTS if name in frame.columns]
    needed = list(dict.fromkeys([*texts, *facts, *(POINTER if pointed else image)]))
    narrow = frame[needed]
    rows = (_spread_rows if spread else _first_rows)(narrow, n)
    if pointed:
        options = storage_options or _storage_options(frame)
        rows = _decoded_small(rows, thumbnail, options)
    else:
        rows = small_images(rows, image[0], thumbnail, "longer")
    return Thumbnails(_cards(rows, texts, facts, thumbnail), thumbnail)


def _storage_options(frame: Any) -> dict[str, Any] | None:
    if not isinstance(frame, FrameBase):
        return None
    read = next(iter(frame.expr.find_operations(ReadWebDataset)), None)
    return None if read is None else read.dataset.storage_options


def _first_rows(frame: Any, n: int) -> Any:
    """The first rows, from as few partitions as have them."""
    if not isinstance(frame, FrameBase):
        return frame.head(n)
    parts: list = []
    start, count = 0, 1
    while start < frame.npartitions and (not parts or sum(map(len, parts)) < n):
        parts += _heads(frame, range(start, min(start + count, frame.npartitions)), n)
        start, count = start + count, 2 * count
    return _concat(parts).head(n)


def _spread_rows(frame: Any, n: int) -> Any:
    """Rows from partitions all over the frame, in order."""
    if not isinstance(frame, FrameBase):
        step = max(1, len(frame) // n)
        return frame.iloc[::step].head(n)
    count = min(frame.npartitions, n, _SPREAD)
    chosen = [frame.npartitions * i // count for i in range(count)]
    parts = _heads(frame, chosen, n)
    # What some have too few of, the others give.
    lengths = [0] * count
    wanted = n
    while wanted and any(length < len(part) for length, part in zip(lengths, parts, strict=True)):
        for i, part in enumerate(parts):
            if wanted and lengths[i] < len(part):
                lengths[i], wanted = lengths[i] + 1, wanted - 1
    rows = _concat([part.head(length) for length, part in zip(lengths, parts, strict=True)])
    return rows if len(rows) == n else _first_rows(frame, n)


def _heads(frame: Any, partitions: Sequence[int], n: int) -> list:
    return list(dask.compute(*(frame.partitions[p].head(n, compute=False) for p in partitions)))


def _concat(parts: list) -> Any:
    from dask.dataframe.dispatch import concat

    return parts[0] if len(parts) == 1 else concat(parts)


def _decoded_small(rows: Any, thumbnail: int, storage_options: dict[str, Any] | None) -> Any:
    # On the CPU: a handful of images, on a client that may have no GPU.
    frame = backend_of(rows).to_arrow(rows).to_pandas(types_mapper=pandas_type)
    decoding = make_decoding(
        device="cpu", size=thumbnail, resize="longer", mode="RGB", transform=None, max_pixels=None
    )
    return decode_frame(frame, decoding, storage_options)


def _cards(rows: Any, texts: list[str], facts: list[str], thumbnail: int) -> list[Card]:
    backend = backend_of(rows)
    arrays = rows.images.arrays()
    names = list(dict.fromkeys([*texts, *facts, *(["error"] if "error" in rows.columns else [])]))
    records = backend.to_arrow(rows[names]).to_pylist() if names else [{}] * len(arrays)
    return [
        _card(None if array is None else backend.host(array), record, texts, thumbnail)
        for array, record in zip(arrays, records, strict=True)
    ]


def _card(array: Any, record: dict[str, Any], texts: list[str], thumbnail: int) -> Card:
    error = record.get("error") or (None if array is not None else "missing: no image")
    shape = None
    if array is not None:
        # A small image is shown as large as it is.
        stored = max(record.get("height") or thumbnail, record.get("width") or thumbnail)
        scale = min(1.0, stored / max(array.shape[:2]))
        shape = (max(1, round(array.shape[0] * scale)), max(1, round(array.shape[1] * scale)))
    return Card(
        jpeg=None if array is None else encode(array, "jpeg", 85),
        shape=shape,
        error=error,
        texts={name: _to_text(record[name]) for name in texts},
        facts=_facts(record),
    )


def _facts(record: dict[str, Any]) -> str:
    height, width = record.get("height"), record.get("width")
    size = f"{width} × {height}" if height and width else None
    nbytes = record.get("nbytes")
    parts = (size, record.get("format"), None if nbytes is None else _short_bytes(nbytes))
    return " · ".join(part for part in parts if part)


def _short_bytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _to_text(value: Any) -> str:
    if value is None or value is pd.NA:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bytes):
        return format_bytes(len(value))
    if isinstance(value, list):
        shown = ", ".join(_to_text(item) for item in itertools.islice(value, 8))
        return f"[{shown}{', …' if len(value) > 8 else ''}]"
    return str(value)


def _text(name: str, text: str) -> str:
    label = f'<span class="dii-name">{escape(name)}</span>'
    if len(text) <= _FOLDED:
        return f'<span class="dii-text">{label} {escape(text)}</span>'
    return (
        f'<details class="dii-text"><summary>{label} {escape(text[: _FOLDED - 10])}…</summary>'
        f"{escape(text)}</details>"
    )
