"""The verbs of the command line: each returns the exit status and what to print."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.utils import format_bytes

from dask_image_ingest import curate
from dask_image_ingest.cli.where import json_fields_of, parse_where
from dask_image_ingest.computing import compute, one_task_per_item
from dask_image_ingest.dataset import (
    filter_rows,
    predicates,
    read_images,
    read_parquet_images,
    read_webdataset_images,
)
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.dataset.schema import HEADERS, ImageColumn
from dask_image_ingest.decode import Mode, printable
from dask_image_ingest.errors import ArgumentError, ShardNotFoundError
from dask_image_ingest.export import json_texts, to_webdataset
from dask_image_ingest.index import write_index
from dask_image_ingest.report import (
    check_text,
    describe_text,
    head_text,
    index_text,
    inspect_shard,
    number,
    printable_text,
    report_of_table,
    summarize_shards,
)
from dask_image_ingest.storage import find_shards, shard_name
from dask_image_ingest.tar import IMAGE_EXTENSIONS
from dask_image_ingest.typedefs import AnyFrame
from dask_image_ingest.view import first_rows, gallery, refuse_source

FINE, BAD_DATA, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130

_NEEDS_DECODING = ["image", "error"]

# Suffixes of files that are no shards.
_PARQUET = ".parquet"
_FILES = (*(f".{extension}" for extension in IMAGE_EXTENSIONS.split(";")), _PARQUET)


def describe(args: argparse.Namespace) -> tuple[int, str]:
    """Totals, and a line per shard; decodes images only with ``--decode``."""
    summary = summarize_shards(_reports(args, args.decode), args.decode)
    return _result(args, summary["bad_shards"], summary, lambda: describe_text(summary))


def head(args: argparse.Namespace) -> tuple[int, str]:
    """The first samples: their keys, headers and texts, not their pixels."""
    frame = read_collection(args, sidecar=sidecar_of(args))
    frame = select_columns(frame, [name for name in frame.columns if name not in _NEEDS_DECODING])
    rows = first_rows(frame, args.n)
    status = BAD_DATA if rows["height"].isna().any() else FINE
    return status, _as_json(rows) if args.json else head_text(rows)


def show_gallery(args: argparse.Namespace) -> tuple[int, str]:
    """Write a page of thumbnails and histograms."""
    image: Any = IMAGE_EXTENSIONS
    if args.mask:
        image = {"image": IMAGE_EXTENSIONS, "mask": ImageColumn(args.mask, mode="labels")}
    frame = read_collection(args, sidecar=sidecar_of(args), image=image)
    sheet = gallery(
        frame,
        args.output,
        args.n,
        columns=args.columns.split(","),
        mask="mask" if args.mask else None,
        decode=args.decode,
    )
    errors = [card.error for card in sheet.cards if card.error]
    written = {"page": args.output, "shown": len(sheet), "errors": errors}
    return _result(args, errors, written, lambda: f"{args.output}: {len(sheet):,} images")


def check(args: argparse.Namespace) -> tuple[int, str]:
    """Decode every image; a report of the shards' health."""
    reports = _reports(args, decode_too=True)
    summary = summarize_shards(reports, decoded=True)
    return _result(args, summary["bad_shards"], summary, lambda: check_text(summary, reports))


def index(args: argparse.Namespace) -> tuple[int, str]:
    """Write an index for each shard whose index is missing or stale."""
    table = write_index(
        args.paths,
        folder=args.output,
        combined=args.combined,
        overwrite=args.overwrite,
        shard_errors="drop",
        storage_options=args.storage_options,
    )
    records = table.astype(object).where(table.notna(), None).to_dict("records")
    bad = table["damage"].notna().any() or table["error"].notna().any()
    return _result(args, bad, records, lambda: index_text(records))


def _result(
    args: argparse.Namespace, bad: object, facts: object, text: Callable[[], str]
) -> tuple[int, str]:
    """The status, bad data if ``bad`` is true, and facts as JSON or as text."""
    return BAD_DATA if bad else FINE, json.dumps(facts, indent=2) if args.json else text()


def sidecar_of(args: argparse.Namespace) -> str | None:
    """The argument ``sidecar=`` of a read."""
    return None if args.read_sidecar == "none" else args.read_sidecar


def read_collection(args: argparse.Namespace, filters: Any = None, **of_shards: Any) -> Any:
    """Read ``args.paths``: shards, with the options ``of_shards``; or image files, or parquet."""
    options = {"backend": "pandas", "storage_options": args.storage_options, **of_shards}
    read = functools.partial(read_webdataset_images, args.paths, filters=filters, **options)
    return _shards_or_files(args, read, filters=filters)


def _shards_or_files(
    args: argparse.Namespace,
    of_shards: Callable[[], Any],
    mode: Mode = "RGB",
    filters: Any = None,
) -> Any:
    """The result of ``of_shards``; if there are no shards at the paths, a frame of files."""
    missing: ShardNotFoundError | None = None
    if not all(path.lower().endswith(_FILES) for path in args.paths):
        try:
            return of_shards()
        except ShardNotFoundError as error:
            missing = error
    readers: list[Callable[..., Any]] = [read_images, read_parquet_images]
    if all(path.lower().endswith(_PARQUET) for path in args.paths):
        readers = [read_parquet_images]
    options: dict[str, Any] = {"backend": "pandas", "storage_options": args.storage_options}
    for read in readers:
        try:
            return read(args.paths, filters=filters, mode=mode, **options)
        except ShardNotFoundError as error:
            missing = missing or error
    raise missing or AssertionError


def _reports(args: argparse.Namespace, decode_too: bool) -> list[Any]:
    """A report on each shard; or, if the paths lead to other files, one on all of them."""
    list_shards = functools.partial(find_shards, args.paths, args.storage_options)
    source = _shards_or_files(args, list_shards, args.mode)
    if not isinstance(source, list):
        columns = ["__key__", "nbytes", *HEADERS, *["error"] * decode_too]
        frame = source[[name for name in columns if name in source.columns]]
        (table,) = compute(frame)
        return [report_of_table(table, ", ".join(args.paths))]
    inspect = functools.partial(
        inspect_shard,
        image=args.image,
        mode=args.mode,
        decode_too=decode_too,
        storage_options=args.storage_options,
    )
    return list(one_task_per_item(inspect, [shard.url for shard in source]))


def _as_json(rows: pd.DataFrame) -> str:
    """JSON of rows with any types, in ASCII."""
    table = pa.Table.from_pandas(rows, preserve_index=False)
    names = [*map(json.dumps, table.column_names)]
    values = zip(*map(json_texts, table.columns), strict=True)
    objects = (
        ",\n".join(f"    {name}: {text or 'null'}" for name, text in zip(names, row, strict=True))
        for row in values
    )
    text = ",\n".join(f"  {{\n{fields}\n  }}" for fields in objects)
    return re.sub("[^ -~\n]", lambda match: json.dumps(match[0])[1:-1], f"[\n{text}\n]")


# Duplicates, and keys for each issue, that the text names; JSON names all.
_MAX_LINES = 20
_WORST_KEYS = 3

# The columns that a page needs to find and describe images.
_COLUMNS = ("__key__", "__url__", "offset", "nbytes", "format", "height", "width")

# Issue → its signal, and whether the highest (True) or the lowest values are the worst.
_SIGNALS = {
    "dark": ("quality.dark", False),
    "light": ("quality.light", False),
    "blurry": ("quality.directional_sharpness", False),
    "low_information": ("quality.entropy", False),
    "odd_aspect": ("quality.aspect", False),
    "grayscale": ("quality.grayscale", True),
}


def quality(args: argparse.Namespace) -> tuple[int, str]:
    """Decode every image; how many have each issue, and the worst of them."""
    with skipped_shards() as reasons:
        frame = curate.find_issues(_read(args))
        signals = [name for name in frame.columns if name.startswith(("quality.", "issue."))]
        columns = [name for name in _COLUMNS if name in frame.columns]
        (table,) = compute(select_columns(frame, [*columns, *signals]))
    skipped = sorted(set(reasons))
    summary = curate.summarize_issues(table)
    unknown = int(table["quality.dark"].isna().sum())
    worst = {name: _worst(table, name) for name in summary.index}
    facts = {
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
    lines = [f"{number(len(table), 'sample')}, {unknown:,} without an image that decodes", ""]
    lines.append(f"{'issue':<16}{'images':>8}{'share':>8}  worst")
    for name, row in summary.iterrows():
        first = ", ".join(sample["__key__"] for sample in worst[name][:_WORST_KEYS])
        share = f"{row['share']:.1%}"
        lines.append(f"{name:<16}{int(row['rows']):>8,}{share:>8}  {first}".rstrip())
    _write_page(frame, table, args)
    bad = unknown or skipped or summary["rows"].any()
    return _result(args, bad, facts, lambda: _text(lines, skipped))


def duplicates(args: argparse.Namespace) -> tuple[int, str]:
    """The groups of duplicates, and which image of each to keep."""
    started = time.monotonic()
    with skipped_shards() as reasons, _rows_left_out() as left_out:
        frame = curate.find_duplicates(
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
    facts = {
        "samples": len(table),
        "unknown": unknown,
        "duplicates": count,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 3),
        # The most memory that this process has had, in bytes.
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "groups": groups,
    }
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
    _write_page(frame, table, args)
    bad = count or unknown or skipped
    return _result(args, bad, facts, lambda: _text(lines, skipped))


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


def _text(lines: list[str], skipped: list[str]) -> str:
    if skipped:
        lines += [f"skipped: {number(len(skipped), 'shard')}", *(f"  {why}" for why in skipped)]
    return printable_text("\n".join(lines))


def _write_page(frame: AnyFrame, table: pd.DataFrame, args: argparse.Namespace) -> None:
    if args.html:
        # Images of parquet files have no offset: they are found by the lazy frame alone.
        has_locations = "offset" in table.columns
        curate.write_report(
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


# Part of the warning about a shard that is read in part; the summary names these shards, too.
_DAMAGED = " is damaged at byte "


def export_shards(args: argparse.Namespace) -> tuple[int, str]:
    """Export; what was written and what was left out."""
    with skipped_shards(silent=_DAMAGED) as skipped:
        result, duplicates = _export(args)
    summary = {"duplicates": duplicates} | _summary(result, skipped)
    bad = summary["left_out"] or summary["damaged"] or summary["skipped"]
    return _result(args, bad, summary, lambda: _summary_text(summary))


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
        frame = frame.drop(columns=_NEEDS_DECODING)
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
