"""The verbs ``quality`` and ``duplicates``: what a collection should perhaps not have."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

import pandas as pd

from dask_image_ingest.cli.verbs import BAD_DATA, FINE
from dask_image_ingest.computing import compute
from dask_image_ingest.curate import duplicates as find_duplicates
from dask_image_ingest.curate import issue_summary, issues
from dask_image_ingest.dataset import read_webdataset_images
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.progress_bar import progress
from dask_image_ingest.report import number, printable_text

# Rows that are named in a text; JSON names all.
_NAMED = 20
_WORST = 3


def quality(args: argparse.Namespace) -> int:
    """Print how many images have each issue, and the worst of them; decode every image."""
    judged = issues(_read(args))
    signals = [name for name in judged.columns if name.startswith(("quality.", "issue."))]
    table = compute(judged[["__key__", "__url__", *signals]], sys.stderr.isatty())
    summary = issue_summary(table)
    unjudged = int(table["quality.dark"].isna().sum())
    if args.json:
        told = {
            "samples": len(table),
            "unjudged": unjudged,
            "issues": {
                name: {
                    "images": int(row["rows"]),
                    "share": round(row["share"], 6),
                    "samples": _samples(table, name),
                }
                for name, row in summary.iterrows()
            },
        }
        print(json.dumps(told, indent=2))
    else:
        lines = [f"{number(len(table), 'sample')}, {unjudged:,} without an image that decodes", ""]
        lines.append(f"{'issue':<16}{'images':>8}{'share':>8}  first")
        for name, row in summary.iterrows():
            first = ", ".join(sample["__key__"] for sample in _samples(table, name)[:_WORST])
            share = f"{row['share']:.1%}"
            lines.append(f"{name:<16}{int(row['rows']):>8,}{share:>8}  {first}".rstrip())
        print(printable_text(without_passwords("\n".join(lines))))
    return BAD_DATA if unjudged or summary["rows"].any() else FINE


def duplicates(args: argparse.Namespace) -> int:
    """Print which images are there more than once, and of each which one to keep."""
    with progress() if sys.stderr.isatty() else contextlib.nullcontext():
        found = find_duplicates(
            _read(args),
            args.by,
            args.distance,
            variants=args.variants.split(",") if args.variants else (),
            keep=args.keep,
        )
    table = compute(
        found[["__key__", "__url__", "duplicate.group", "duplicate.keep", "duplicate.distance"]],
        False,
    )
    groups = _groups(table)
    gone = sum(len(group["duplicates"]) for group in groups)
    if args.json:
        told = {"samples": len(table), "duplicates": gone, "groups": groups}
        print(json.dumps(told, indent=2))
    else:
        lines = [f"{number(len(table), 'sample')}, {number(gone, 'duplicate')}"]
        rows = [(group["keep"], row) for group in groups for row in group["duplicates"]]
        for kept, row in rows[:_NAMED]:
            bits = f"{row['distance']} bits from" if row["distance"] else "equal to"
            lines.append(f"  {_name(row)}: {bits} {_name(kept)}")
        if len(rows) > _NAMED:
            lines.append(f"  and {len(rows) - _NAMED:,} more, which --json names")
        print(printable_text(without_passwords("\n".join(lines))))
    return BAD_DATA if gone else FINE


def _read(args: argparse.Namespace) -> Any:
    return read_webdataset_images(
        args.paths, backend="pandas", storage_options=args.storage_options
    )


def _samples(table: pd.DataFrame, issue: str) -> list[dict[str, str]]:
    has_it = table[f"issue.{issue}"].fillna(False).astype(bool)
    return table.loc[has_it, ["__key__", "__url__"]].to_dict("records")


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
