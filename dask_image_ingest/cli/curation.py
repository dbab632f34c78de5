"""The verbs ``quality`` and ``duplicates``: images that a collection may not need."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.cli.export import skipped_shards
from dask_image_ingest.cli.verbs import BAD_DATA, FINE, read_collection
from dask_image_ingest.computing import compute
from dask_image_ingest.curate import find_duplicates, find_issues, summarize_issues, write_report
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.report import number, printable_text
from dask_image_ingest.storage import shard_name
from dask_image_ingest.view import refuse_source

# Duplicates, and keys for each issue, that the text names; JSON names all.
_MAX_LINES = 20
_WORST_KEYS = 3

# The columns that a page needs to find and describe images.
_COLUMNS = ("__key__", "__url__", "offset", "nbytes", "format", "height", "width")

# Issue → its signal, and whether the highest (True) or the lowest values are the worst.
_SIGNALS = {
    "dark": ("quality.dark", False),
    "light": ("quality.light", False),
    "blurry": ("quality.sharpness", False),
    "low_information": ("quality.entropy", False),
    "odd_aspect": ("quality.aspect", False),
    "grayscale": ("quality.grayscale", True),
}


def quality(args: argparse.Namespace) -> tuple[int, str]:
    """Decode every image; how many have each issue, and the worst of them."""
    with skipped_shards() as reasons:
        frame = find_issues(_read(args))
        signals = [name for name in frame.columns if name.startswith(("quality.", "issue."))]
        columns = [name for name in _COLUMNS if name in frame.columns]
        (table,) = compute(select_columns(frame, [*columns, *signals]))
    skipped = sorted(set(reasons))
    summary = summarize_issues(table)
    unknown = int(table["quality.dark"].isna().sum())
    worst = {name: _worst(table, name) for name in summary.index}
    if args.json:
        result = {
            "samples": len(table),
            "unknown": unknown,
            "skipped": skipped,
            "issues": {
                name: {
                    "images": int(row["rows"]),
                    "share": round(row["share"], 6),
                    "samples": worst[name],
                }
                for name, row in summary.iterrows()
            },
        }
        text = json.dumps(result, indent=2)
    else:
        lines = [f"{number(len(table), 'sample')}, {unknown:,} without an image that decodes", ""]
        lines.append(f"{'issue':<16}{'images':>8}{'share':>8}  worst")
        for name, row in summary.iterrows():
            first = ", ".join(sample["__key__"] for sample in worst[name][:_WORST_KEYS])
            share = f"{row['share']:.1%}"
            lines.append(f"{name:<16}{int(row['rows']):>8,}{share:>8}  {first}".rstrip())
        text = _text([*lines, *_skipped_lines(skipped)])
    _write_page(frame, table, args)
    return BAD_DATA if unknown or skipped or summary["rows"].any() else FINE, text


def duplicates(args: argparse.Namespace) -> tuple[int, str]:
    """The groups of duplicates, and which image of each to keep."""
    started = time.monotonic()
    with skipped_shards() as reasons, _rows_left_out() as left_out:
        frame = find_duplicates(
            _read(args),
            args.by,
            args.distance,
            variants=args.variants.split(",") if args.variants else (),
            keep=args.keep,
            against=args.against,
            memory=args.memory,
            storage_options=args.storage_options,
        )
        added = [name for name in frame.columns if name.startswith("duplicate.")]
        shown = _COLUMNS if args.html else (*_COLUMNS[:2], "height")
        columns = [name for name in shown if name in frame.columns]
        (table,) = compute(select_columns(frame, [*columns, *added]))
    skipped = sorted(set(reasons))
    # A header that can't be read is damage, too: fingerprints of bytes need none.
    unknown = int(table["height"].isna().sum()) if "height" in table.columns else 0
    unknown = max(unknown, sum(left_out))
    groups = _groups(table)
    count = sum(len(group["duplicates"]) for group in groups)
    if args.json:
        result = {
            "samples": len(table),
            "unknown": unknown,
            "duplicates": count,
            "skipped": skipped,
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory": _peak_memory(),
            "groups": groups,
        }
        text = json.dumps(result, indent=2)
    else:
        lines = [f"{number(len(table), 'sample')}, {number(count, 'duplicate')}"]
        if unknown:
            lines[0] += f", {unknown:,} without an image that decodes"
        rows = [(group["keep"], row) for group in groups for row in group["duplicates"]]
        for kept, row in rows[:_MAX_LINES]:
            # Perceptual hashes can be equal ("0 bits from") though the images are not.
            relation = f"{number(row['distance'], 'bit')} from" if args.by == "pdq" else "equal to"
            lines.append(f"  {_row_text(row)}: {relation} {_row_text(kept)}")
        if len(rows) > _MAX_LINES:
            lines.append(f"  and {len(rows) - _MAX_LINES:,} more, which --json names")
        text = _text([*lines, *_skipped_lines(skipped)])
    _write_page(frame, table, args)
    return BAD_DATA if count or unknown or skipped else FINE, text


@contextlib.contextmanager
def _rows_left_out() -> Iterator[list[int]]:
    """Collect the numbers of rows that are not compared, which `find_duplicates` logs."""
    numbers: list[int] = []
    handler = logging.Handler()
    handler.emit = lambda record: numbers.append(getattr(record, "left_out", 0))  # type: ignore[method-assign]
    logger = logging.getLogger("dask_image_ingest")
    logger.addHandler(handler)
    try:
        yield numbers
    finally:
        logger.removeHandler(handler)


def _read(args: argparse.Namespace) -> Any:
    """The collection; its files are not those of the page, which is written at the end."""
    frame = read_collection(args, shard_errors="drop")
    if args.html:
        refuse_source(frame, args.html)
    return frame


def _skipped_lines(skipped: list[str]) -> list[str]:
    if not skipped:
        return []
    return [f"skipped: {number(len(skipped), 'shard')}", *(f"  {why}" for why in skipped)]


def _text(lines: list[str]) -> str:
    return printable_text("\n".join(lines))


def _write_page(frame: Any, table: pd.DataFrame, args: argparse.Namespace) -> None:
    if args.html:
        # Images of parquet files have no offset: they are found by the lazy frame alone.
        has_locations = "offset" in table.columns
        write_report(
            table if has_locations else frame, args.html, storage_options=args.storage_options
        )


def _worst(table: pd.DataFrame, issue: str) -> list[dict[str, str]]:
    """The samples that have an issue, the worst first."""
    samples = table[table[f"issue.{issue}"].fillna(False).astype(bool)]
    if issue == "odd_size":
        median = table["quality.area"].median()
        badness = np.log(samples["quality.area"].astype(float) / median).abs()
    else:
        signal, highest = _SIGNALS[issue]
        badness = samples[signal].astype(float) * (1 if highest else -1)
    order = np.argsort(-badness.to_numpy(), kind="stable")
    return samples[["__key__", "__url__"]].iloc[order].to_dict("records")


def _peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _groups(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The groups of duplicates: the row to keep, and the others."""
    groups = []
    for _, rows in table.dropna(subset="duplicate.group").groupby("duplicate.group"):
        is_kept = rows["duplicate.keep"].astype(bool)
        dropped = rows[~is_kept].rename(columns={"duplicate.distance": "distance"})
        kept = rows.loc[is_kept, ["__key__", "__url__"]].to_dict("records")
        groups.append(
            {
                # One of --against has no shard.
                "keep": kept[0] if kept else {"__key__": dropped["duplicate.of"].iloc[0]},
                "duplicates": dropped[["__key__", "__url__", "distance"]].to_dict("records"),
            }
        )
    return groups


def _row_text(row: dict[str, Any]) -> str:
    shard = f" of {shard_name(row['__url__'])}" if "__url__" in row else ""
    return f"{row['__key__']}{shard}"
