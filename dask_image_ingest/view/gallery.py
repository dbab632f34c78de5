"""``gallery``: an HTML page with a contact sheet and histograms of a collection."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.arguments import (
    check_flag,
    check_frame,
    check_path,
    check_storage_options,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import files_read, searches_of_frame
from dask_image_ingest.dataset.plan import datasets_of, select_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.image_counts import (
    add_counts,
    count_images,
    reduce_partitions,
    total_images,
)
from dask_image_ingest.storage import shard_name
from dask_image_ingest.storage.output import refuse_sources
from dask_image_ingest.typedefs import AnyFrame, DataFrame
from dask_image_ingest.view.page import (
    Thumbnails,
    bars_chart,
    columns_chart,
    refuse_no_page,
)
from dask_image_ingest.view.thumbnails import (
    make_thumbnails,
)

# Bins of the histograms: lower edges of sizes in pixels, and aspect ratios.
_EDGES = (0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_ASPECTS = {
    "1:3": 1 / 3, "1:2": 1 / 2, "9:16": 9 / 16, "2:3": 2 / 3, "3:4": 3 / 4, "4:5": 4 / 5,
    "1:1": 1.0,
    "5:4": 5 / 4, "4:3": 4 / 3, "3:2": 3 / 2, "16:9": 16 / 9, "2:1": 2.0, "3:1": 3.0,
}  # fmt: skip
_HEADER = ("format", "height", "width", "nbytes")


def gallery(
    frame: AnyFrame,
    path: str | PathLike[str] | None = None,
    n: int = 200,
    *,
    columns: Sequence[str] | None = None,
    mask: str | None = None,
    size: int = 160,
    title: str | None = None,
    storage_options: dict[str, Any] | None = None,
    decode: bool = False,
) -> Thumbnails:
    """A contact sheet of a collection, and histograms of all its images: a page, or in a notebook.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe of :func:`read_webdataset_images`.
    path
        The file to write, which needs no other file; None, for a notebook that shows the result,
        writes none.
    n
        Images on the contact sheet, at even distances over all rows, whatever the partitions are.
        Only these are decoded.
    columns
        Columns to show below each thumbnail: its title, then captions or scores. By default
        ``__key__``, if the frame has it.
    mask
        An image column of labels, which are drawn over the thumbnails.
    size
        The longer edge of a thumbnail, in pixels.
    title
        The page's title; by default the names of the first and the last shard.
    storage_options
        For the filesystem of remote shards; by default those of the read.
    decode
        Decode every image of the frame and count those that fail, by its column ``error``.
        Otherwise errors are counted among the ``n`` shown. The histograms come from headers alone.

    Returns
    -------
    Thumbnails
        The contact sheet below the histograms, which a notebook displays.

    Raises
    ------
    ArgumentError
        If a column does not exist, or an argument is invalid; if ``path`` is a file that the frame
        reads, or that is no HTML page; with ``decode=True`` if the frame has no column ``error``.
    ExportError
        If the page can't be written.

    Examples
    --------
    >>> gallery(ddf, "out.html", columns=("__key__", "txt"))
    <52 thumbnails, 1 without an image: shown in a notebook, or save()>
    """
    check_frame(frame)
    if path is not None:
        check_path("path", path)
    check_flag("decode", decode)
    storage_options = check_storage_options(storage_options)
    if path is not None:
        refuse_source(frame, path)
    if decode and "error" not in frame.columns:
        raise ArgumentError("decode=True counts the column 'error', which the frame has not")
    counts, lengths = count_headers(frame, decode)
    sheet = make_thumbnails(frame, n, size, columns, storage_options, lengths, mask=mask)
    encoded = f"{format_bytes(counts['nbytes'].sum())} encoded · " if "nbytes" in frame else ""
    title = title or _default_title(frame)
    sheet = sheet.below(
        f'<p class="dii-lead">{counts["samples"].sum():,} samples · {encoded}{len(sheet):,} shown'
        f'</p><div class="dii-charts">{_charts(counts, sheet, decode)}</div>'
    )
    if path is not None:
        sheet.save(path, title)
    return sheet


def refuse_source(frame: AnyFrame, path: str | PathLike[str]) -> None:
    """Raise an ``ArgumentError`` if a page would overwrite a file that the frame reads."""
    refuse_sources(
        files_read(frame),
        [os.path.abspath(path)],
        "page",
        searches=searches_of_frame(frame),
        advice=": write the page to another file",
        error=ArgumentError,
    )
    refuse_no_page(path)


def count_headers(frame: AnyFrame, decode: bool = False) -> tuple[pd.DataFrame, list[int]]:
    """Counts of images by header, with ``decode`` also by error; and the rows of each partition."""
    names = [*_HEADER, *(["error"] if decode else [])]
    narrow = select_columns(frame, [name for name in frame.columns if name in names])
    return reduce_partitions(narrow, _count_partition, _merge_counts)


def _count_partition(frame: DataFrame) -> tuple[pd.DataFrame, list[int]]:
    return count_images(backend_of(frame).to_arrow(frame).to_pandas()), [len(frame)]


def _merge_counts(
    results: Sequence[tuple[pd.DataFrame, list[int]]],
) -> tuple[pd.DataFrame, list[int]]:
    tables, lengths = zip(*results, strict=True)
    return add_counts(tables), list(itertools.chain(*lengths))


def histograms(counts: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Numbers of images by size, aspect, format and error."""
    readable = counts[counts["height"].notna()]
    height, width = readable["height"].to_numpy(), readable["width"].to_numpy()
    distance = np.abs(np.log(width / height)[:, None] - np.log([*_ASPECTS.values()]))
    bins = {
        "size": (np.digitize(np.maximum(height, width), _EDGES) - 1, map(str, _EDGES)),
        "aspect": (distance.argmin(axis=1), _ASPECTS),
    }
    found = {
        name: dict(
            zip(labels, np.bincount(bin_, readable["samples"], 17).astype(int), strict=False)
        )
        for name, (bin_, labels) in bins.items()
    }
    for name in ("format", "error"):
        found[name] = counts.groupby(name)["samples"].sum().to_dict()
    return found


def _charts(counts: pd.DataFrame, sheet: Thumbnails, decode: bool) -> str:
    found = histograms(counts)
    charts = []
    if any(found["size"].values()):
        charts.append(columns_chart("Size", "longer edge in pixels, from", found["size"]))
        charts.append(columns_chart("Aspect", "width : height, the nearest", found["aspect"]))
    if found["format"]:
        charts.append(bars_chart("Format", "from the first bytes", found["format"]))
    errors = found["error"] if decode else _shown_errors(sheet)
    counted = "all images" if decode else f"the {len(sheet):,} shown"
    note = f"{sum(errors.values()):,} of {counted}" if errors else f"none among {counted}"
    unreadable = total_images(counts)["unreadable_headers"]
    if unreadable and not decode:
        note += f"; {unreadable:,} unreadable headers in all"
    charts.append(bars_chart("Errors", note, errors, "dii-errors"))
    return "".join(charts)


def _shown_errors(sheet: Thumbnails) -> Counter[str]:
    return Counter(card.error.split(":")[0] for card in sheet.cards if card.error)


def _default_title(frame: AnyFrame) -> str:
    dataset = next(datasets_of(frame.expr), None) if isinstance(frame, FrameBase) else None
    if dataset is None:
        return "Images"
    return title_of_shards([shard.url for shard in dataset.shards])


def title_of_shards(urls: Sequence[str]) -> str:
    """The names of the first and the last shard."""
    first, last = shard_name(urls[0]), shard_name(urls[-1])
    return first if first == last else f"{first} … {last}"
