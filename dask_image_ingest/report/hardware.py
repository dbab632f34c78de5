"""Images that hardware JPEG decoders take, and reasons why others are not taken."""

from __future__ import annotations

from typing import Any

from dask_image_ingest.dataset import SampleRows
from dask_image_ingest.decode import read_jpeg_frame


def not_in_hardware(rows: SampleRows) -> list[str | None]:
    """For each row, why a hardware decoder does not take its image; None if one does.

    By headers alone: see ``JpegFrame.not_in_hardware`` for what NVIDIA says of its own. A row
    without an image has None too.
    """
    return [_why_not(rows, row) for row in range(len(rows))]


def hardware_summary(images: int, others: dict[str, int]) -> dict[str, Any]:
    """For machines: how many of the images are taken, and the others by reason."""
    by_count = dict(sorted(others.items(), key=lambda item: (-item[1], item[0])))
    return {"taken": images - sum(others.values()), "of": images, "others": by_count}


def hardware_in_words(summary: dict[str, Any]) -> str:
    """For people: the share that is taken, and the others by reason."""
    taken, images = summary["taken"], summary["of"]
    share = f" ({taken / images:.0%})" if images else ""
    others = ", ".join(f"{why} {count:,}" for why, count in summary["others"].items())
    told = f"{taken:,} of {images:,} images{share} are what hardware JPEG decoders take"
    return told + (f"; others: {others}" if others else "")


def _why_not(rows: SampleRows, row: int) -> str | None:
    header = rows.headers[row]
    if rows.spans[row] is None:
        return None
    if header.error is not None:
        return header.error.partition(":")[0]
    if header.format != "jpeg":
        return header.format
    frame = read_jpeg_frame(rows.opened(row))
    return "corrupt" if frame is None else frame.not_in_hardware
