"""The verbs ``quality`` and ``duplicates``: what a collection should perhaps not have."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.cli.export import skipped_shards
from dask_image_ingest.cli.verbs import BAD_DATA, FINE, read_collection
from dask_image_ingest.computing import compute
from dask_image_ingest.curate import duplicates as find_duplicates
from dask_image_ingest.curate import issue_summary, issues, report
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.progress_bar import progress
from dask_image_ingest.report import number, printable_text

# Rows that are named in a text; JSON names all.
_NAMED = 20
_WORST = 3

# The columns by which a page finds images, and tells what they are.
_PLACE = ("__key__", "__url__", "offset", "nbytes", "format", "height", "width")

# The signal of each issue, of which the lowest are the worst, or with True the highest.
_SIGNALS = {
    "dark": ("quality.dark", False),
    "light": ("quality.light", False),
    "blurry": ("quality.blur", False),
    "low_information": ("quality.entropy", False),
    "odd_aspect": ("quality.aspect", False),
    "grayscale": ("quality.grayscale", True),
}


def quality(args: argparse.Namespace) -> int:
    """Print how many images have each issue, and the worst of them; decode every image."""
    with skipped_shards() as warned:
        found = issues(read_collection(args, tables=False, shard_errors="skip"))
        signals = [name for name in found.columns if name.startswith(("quality.", "issue."))]
        table = compute(found[[*_PLACE, *signals]], sys.stderr.isatty())
    skipped = sorted(set(warned))
    summary = issue_summary(table)
    unknown = int(table["quality.dark"].isna().sum())
    worst = {name: _worst(table, name) for name in summary.index}
    if args.json:
        told = {
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
        print(json.dumps(told, indent=2))
    else:
        lines = [f"{number(len(table), 'sample')}, {unknown:,} without an image that decodes", ""]
        lines.append(f"{'issue':<16}{'images':>8}{'share':>8}  worst")
        for name, row in summary.iterrows():
            first = ", ".join(sample["__key__"] for sample in worst[name][:_WORST])
            share = f"{row['share']:.1%}"
            lines.append(f"{name:<16}{int(row['rows']):>8,}{share:>8}  {first}".rstrip())
        _print([*lines, *_skipped_lines(skipped)])
    _write_page(table, args)
    return BAD_DATA if unknown or skipped or summary["rows"].any() else FINE


def duplicates(args: argparse.Namespace) -> int:
    """Print which images are there more than once, and of each which one to keep."""
    with skipped_shards() as warned:
        with progress() if sys.stderr.isatty() else contextlib.nullcontext():
            found = find_duplicates(
                read_collection(args, tables=False, shard_errors="skip"),
                args.by,
                args.distance,
                variants=args.variants.split(",") if args.variants else (),
                keep=args.keep,
            )
        added = [name for name in found.columns if name.startswith("duplicate.")]
        place = _PLACE if args.html else _PLACE[:2]
        table = compute(found[[*place, *added]], False)
    skipped = sorted(set(warned))
    groups = _groups(table)
    gone = sum(len(group["duplicates"]) for group in groups)
    if args.json:
        told = {"samples": len(table), "duplicates": gone, "skipped": skipped, "groups": groups}
        print(json.dumps(told, indent=2))
    else:
        lines = [f"{number(len(table), 'sample')}, {number(gone, 'duplicate')}"]
        rows = [(group["keep"], row) for group in groups for row in group["duplicates"]]
        for kept, row in rows[:_NAMED]:
            # Hashes of pictures may be equal where the pictures are not.
            apart = f"{number(row['distance'], 'bit')} from" if args.by == "pdq" else "equal to"
            lines.append(f"  {_name(row)}: {apart} {_name(kept)}")
        if len(rows) > _NAMED:
            lines.append(f"  and {len(rows) - _NAMED:,} more, which --json names")
        _print([*lines, *_skipped_lines(skipped)])
    _write_page(table, args)
    return BAD_DATA if gone or skipped else FINE


def _skipped_lines(skipped: list[str]) -> list[str]:
    if not skipped:
        return []
    return [f"skipped: {number(len(skipped), 'shard')}", *(f"  {why}" for why in skipped)]


def _print(lines: list[str]) -> None:
    print(printable_text(without_passwords("\n".join(lines))))


def _write_page(table: pd.DataFrame, args: argparse.Namespace) -> None:
    if args.html:
        report(table, args.html, storage_options=args.storage_options)


def _worst(table: pd.DataFrame, issue: str) -> list[dict[str, str]]:
    """The samples that have an issue, the worst first."""
    some = table[table[f"issue.{issue}"].fillna(False).astype(bool)]
    if issue == "odd_size":
        usual = table["quality.area"].median()
        badness = np.log(some["quality.area"].astype(float) / usual).abs()
    else:
        signal, highest = _SIGNALS[issue]
        badness = some[signal].astype(float) * (1 if highest else -1)
    order = badness.sort_values(ascending=False, kind="stable").index
    return some.loc[order, ["__key__", "__url__"]].to_dict("records")


def _groups(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Each group's row that stays, and those that go."""
    groups = []
    for _, rows in table.dropna(subset="duplicate.group").groupby("duplicate.group"):
        stays = rows["duplicate.keep"].astype(bool)
        gone = rows[~stays].rename(columns={"duplicate.distance": "distance"})
        groups.append(
            {
                "keep": rows.loc[stays, ["__key__", "__url__"]].to_dict("records")[0],
                "duplicates": gone[["__key__", "__url__", "distance"]].to_dict("records"),
            }
        )
    return groups


def _name(row: dict[str, Any]) -> str:
    return f"{row['__key__']} of {row['__url__'].rsplit('/', 1)[-1]}"
