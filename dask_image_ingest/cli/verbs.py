"""The verbs that inspect and index shards: each returns the exit status and what to print."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa

from dask_image_ingest.computing import compute, one_task_per_item
from dask_image_ingest.dataset import read_images, read_parquet_images, read_webdataset_images
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.dataset.schema import HEADERS, ImageColumn
from dask_image_ingest.decode import Mode
from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.export import json_texts
from dask_image_ingest.index import write_index
from dask_image_ingest.report import (
    check_text,
    describe_text,
    head_text,
    index_text,
    inspect_shard,
    report_of_table,
    summarize,
)
from dask_image_ingest.storage import find_shards
from dask_image_ingest.tar import IMAGE_EXTENSIONS
from dask_image_ingest.view import first_rows
from dask_image_ingest.view import gallery as write_gallery

_NEEDS_DECODING = ["image", "error"]

# Suffixes of files that are no shards.
_PARQUET = ".parquet"
_FILES = (*(f".{extension}" for extension in IMAGE_EXTENSIONS.split(";")), _PARQUET)


def describe(args: argparse.Namespace) -> tuple[int, str]:
    """Totals, and a line per shard; decodes images only with ``--decode``."""
    summary = summarize(_reports(args, args.decode), args.decode)
    text = json.dumps(summary, indent=2) if args.json else describe_text(summary)
    return BAD_DATA if summary["bad_shards"] else FINE, text


def head(args: argparse.Namespace) -> tuple[int, str]:
    """The first samples: their keys, headers and texts, not their pixels."""
    frame = read_collection(args, sidecar=sidecar_of(args))
    frame = select_columns(frame, [name for name in frame.columns if name not in _NEEDS_DECODING])
    rows = first_rows(frame, args.n)
    status = BAD_DATA if rows["height"].isna().any() else FINE
    return status, _as_json(rows) if args.json else head_text(rows)


def gallery(args: argparse.Namespace) -> tuple[int, str]:
    """Write a page of thumbnails and histograms."""
    image: Any = IMAGE_EXTENSIONS
    if args.mask:
        image = {"image": IMAGE_EXTENSIONS, "mask": ImageColumn(args.mask, mode="labels")}
    frame = read_collection(args, sidecar=sidecar_of(args), image=image)
    sheet = write_gallery(
        frame,
        args.output,
        args.n,
        columns=args.columns.split(","),
        mask="mask" if args.mask else None,
        decode=args.decode,
    )
    errors = [card.error for card in sheet.cards if card.error]
    written = {"page": args.output, "shown": len(sheet), "errors": errors}
    text = json.dumps(written) if args.json else f"{args.output}: {len(sheet):,} images"
    return BAD_DATA if errors else FINE, text


def check(args: argparse.Namespace) -> tuple[int, str]:
    """Decode every image; a report of the shards' health."""
    reports = _reports(args, decode_too=True)
    summary = summarize(reports, decoded=True)
    text = json.dumps(summary, indent=2) if args.json else check_text(summary, reports)
    return BAD_DATA if summary["bad_shards"] else FINE, text


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
    return BAD_DATA if bad else FINE, json.dumps(records, indent=2) if args.json else index_text(
        records
    )


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


FINE, BAD_DATA, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130
