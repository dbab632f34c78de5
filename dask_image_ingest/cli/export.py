"""``dask-image-ingest export``: shards in, filters, shards out."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest import curate
from dask_image_ingest.cli.verbs import BAD_DATA, FINE, read_collection, sidecar_of
from dask_image_ingest.cli.where import json_fields_of, parse_where
from dask_image_ingest.dataset import filter_rows, predicates
from dask_image_ingest.decode import printable
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import to_webdataset
from dask_image_ingest.report import number

_NO_PIXELS = ["image", "error"]

# Part of the warning about a shard that is read in part; the summary names these shards, too.
_DAMAGED = " is damaged at byte "


#: Of the verbs that find duplicates.
KEEP_HELP = (
    "best (default), largest, first, or a column, such as quality.sharpness, to keep the row with "
    "its largest value"
)


def add_export(verbs: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    description = (
        "write the samples that meet a condition to new shards, with their bytes unchanged"
    )
    parser = verbs.add_parser(
        "export",
        parents=parents,
        help=description,
        description=description,
        epilog="Example: dask-image-ingest export 'in/*.tar' -o 'out/{shard:06d}.tar' "
        '--where "width >= 512"',
    )
    add = parser.add_argument
    add(
        "-o",
        dest="output",
        required=True,
        metavar="TEMPLATE",
        help="required: the names of the new shards, 'out/{shard:06d}.tar', a path or a URL",
    )
    add(
        "--where",
        metavar="CONDITION",
        help='rows to keep: "width >= 512 and json.similarity > 0.3"; also by quality, which '
        'decodes images: "quality.blur > 0.3"',
    )
    add(
        "--json-field",
        action="append",
        default=[],
        metavar="NAME=TYPE",
        help="a field of the json member as a typed column: similarity=float32. Without it, a "
        "field in --where has the type of the value that it is compared with: float64, string or "
        "bool, or int64 if it must equal a large number",
    )
    add("--samples-per-shard", type=int, metavar="N", help="(default 10,000)")
    add("--bytes-per-shard", metavar="SIZE", help="'1GB': maximum size of a shard, with headers")
    add("--shuffle", type=int, metavar="SEED", help="shuffle samples across all shards")
    add("--members", metavar="jpg,txt", help="only these members (default: all)")
    add("--no-sidecar", action="store_true", help="no parquet files beside the shards")
    add("--index", action="store_true", help=".idx files beside the shards, for DALI's reader")
    add(
        "--drop-bad-images",
        action="store_true",
        help="decode every image, and leave out bad ones",
    )
    add(
        "--drop-duplicates",
        choices=["bytes", "pixels", "pdq"],
        help="write each image once: bytes compares files, pixels decoded images, pdq perceptual "
        "hashes",
    )
    add("--keep", default="best", metavar="WHICH", help=f"which duplicate to write: {KEEP_HELP}")
    add("--strict", action="store_true", help="write nothing if a row would be left out")
    add("--resume", action="store_true", help="continue an interrupted export")
    add("--overwrite", action="store_true", help="first remove what an earlier export wrote there")
    parser.set_defaults(verb=export_command)


def export_command(args: argparse.Namespace) -> tuple[int, str]:
    """Export; what was written and what was left out."""
    with skipped_shards(silent=_DAMAGED) as skipped:
        result, duplicates = _export(args)
    summary = {"duplicates": duplicates} | _summary(result, skipped)
    text = json.dumps(summary, indent=2) if args.json else _summary_text(summary)
    is_bad = any(summary[name] for name in ("left_out", "damaged", "skipped"))
    return BAD_DATA if is_bad else FINE, text


def _export(args: argparse.Namespace) -> tuple[pd.DataFrame, int]:
    """The table of the new shards, and the number of duplicates left out."""
    predicate = parse_where(args.where) if args.where else None
    typed = dict(map(_json_field, args.json_field))
    json_fields = json_fields_of(predicate, typed) | typed
    columns = predicates.columns_of(predicate)
    signals = {name for name in columns if name.startswith("quality.")}
    frame = read_collection(
        args,
        filters=predicates.only(predicate, columns - signals),
        json_fields=json_fields or None,
        shard_errors="drop",
        sidecar=sidecar_of(args),
    )
    if predicate is not None and signals:
        frame = filter_rows(curate.measure_quality(frame), predicate)
    duplicates = 0
    if args.drop_duplicates:
        frame = curate.find_duplicates(frame, args.drop_duplicates, keep=args.keep)
        duplicates = int((~frame["duplicate.keep"]).sum().compute())
        frame = frame[frame["duplicate.keep"]]
    if not args.drop_bad_images and "offset" in frame.columns:
        frame = frame.drop(columns=_NO_PIXELS)
    rejects: Literal["raise", "drop"] = "raise" if args.strict else "drop"
    result = to_webdataset(
        frame,
        args.output,
        samples_per_shard=args.samples_per_shard,
        bytes_per_shard=args.bytes_per_shard,
        shuffle=args.shuffle,
        members=re.split("[,;]", args.members) if args.members else "all",
        sidecar=None if args.no_sidecar else "parquet",
        index=args.index,
        errors=rejects if args.drop_bad_images else "null",
        row_errors=rejects,
        resume=args.resume,
        overwrite=args.overwrite,
    )
    return result, duplicates


@contextlib.contextmanager
def skipped_shards(silent: str | None = None) -> Iterator[list[str]]:
    """Collect the warnings of skipped shards; drop other warnings that contain ``silent``."""
    skipped: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", f"skipped: |.*{_DAMAGED}")
        show = warnings.showwarning

        def collect(message: Any, *more: Any) -> None:
            text = str(message)
            if text.startswith("skipped: "):
                skipped.append(text.removeprefix("skipped: "))
            elif silent is None or silent not in text:
                show(message, *more)

        warnings.showwarning = collect  # type: ignore[assignment]
        yield skipped


def _json_field(text: str) -> tuple[str, str]:
    name, _, type_ = text.partition("=")
    if not name or not type_:
        raise ArgumentError(f"--json-field {text!r}: write a name and a type, similarity=float32")
    return name, type_


def _summary(result: pd.DataFrame, skipped: list[str]) -> dict[str, Any]:
    shards = result.rename(columns={"shard": "name"}).drop(columns="url")
    return {
        "samples": int(shards["samples"].sum()),
        "shards": len(shards),
        "members": int(shards["members"].sum()),
        "bytes": int(shards["bytes"].sum()),
        **{name: result.attrs[name] for name in ("folder", "interleaved", "left_out", "damaged")},
        "skipped": sorted(set(skipped)),
        "per_shard": shards.to_dict("records"),
    }


def _summary_text(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['folder']}: {summary['samples']:,} samples in {summary['shards']:,} shards, "
        f"{summary['members']:,} members, {format_bytes(summary['bytes'])}"
    ]
    if summary["duplicates"]:
        lines.append(f"{summary['duplicates']:,} duplicates are not written")
    if summary["interleaved"]:
        lines.append(f"{summary['interleaved']:,} samples with scattered members are adjacent now")
    left_out = summary["left_out"]
    if left_out:
        rows = sum(entry["count"] for entry in left_out.values())
        lines.append(f"left out: {rows:,} rows, named in _left_out.parquet")
        width = max(map(len, left_out))
        for code, entry in left_out.items():
            more = " ..." if entry["count"] > len(entry["first"]) else ""
            named = ", ".join(entry["first"]) + more
            detail = printable(entry["detail"], 200)
            lines.append(f"  {code:{width}}  {entry['count']:>7,}  {named} ({detail})")
    if summary["damaged"]:
        lines.append(f"damaged: {len(summary['damaged']):,} of the shards that were exported")
        lines += [
            f"  {printable(url, 1000)}: {printable(damage, 300)}"
            for url, damage in summary["damaged"].items()
        ]
    if summary["skipped"]:
        lines.append(f"skipped: {number(len(summary['skipped']), 'shard')}")
        lines += [f"  {printable(why, 1000)}" for why in summary["skipped"]]
    return "\n".join(lines)
