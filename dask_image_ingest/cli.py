"""The command line: look at shards without writing a program.

Exit status: 0, 1 when bad data was found, 2 for wrong arguments.
"""

import argparse
import base64
import contextlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import dask
import pandas as pd
import pyarrow as pa
from dask.bag import from_sequence
from dask.diagnostics import ProgressBar
from dask.utils import format_bytes
from distributed import Client, progress, wait

from dask_image_ingest.dataset import read_webdataset_images
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    MissingDependencyError,
    ShardNotFoundError,
)
from dask_image_ingest.export import add_export
from dask_image_ingest.report import check_shard, in_total, in_words
from dask_image_ingest.storage import find_shards
from dask_image_ingest.view import gallery as write_gallery

__all__ = ["main"]

FINE, BAD_DATA, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130
HEADER = ["format", "height", "width"]
ARGUMENT_ERRORS = (ArgumentError, MissingDependencyError, ShardNotFoundError)
NEEDS_DECODING = ["image", "error"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = _parser().parse_args(argv)
    try:
        with _plain_warnings(), _scheduler(args.scheduler):
            return int(args.verb(args))
    except DaskImageIngestError as error:
        print(f"dask-image-ingest: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS if isinstance(error, ARGUMENT_ERRORS) else BAD_DATA
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads our output has seen enough: `... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what Python flushes at exit
        return FINE


def describe(args: argparse.Namespace) -> int:
    """Print totals, and a line per shard; decode nothing unless asked."""
    frame = _read(args)
    by = ["__url__", *HEADER, *(["error"] if args.decode else [])]
    counts = _compute(frame[[*by, "nbytes"]].map_partitions(_count, by))
    summary = _summary(counts, _urls(args))
    print(json.dumps(summary, indent=2) if args.json else _describe_text(summary))
    return BAD_DATA if _is_bad(summary) else FINE


def head(args: argparse.Namespace) -> int:
    """Print the first samples: their keys, headers and texts, not their pixels."""
    frame = _read(args)
    frame = frame[[name for name in frame.columns if name not in NEEDS_DECODING]]
    rows = _first_rows(frame, args.n)
    records = pa.Table.from_pandas(rows, preserve_index=False).to_pylist()
    print(json.dumps(records, indent=2, default=_base64) if args.json else _head_text(rows))
    return BAD_DATA if rows["height"].isna().any() else FINE


def gallery(args: argparse.Namespace) -> int:
    """Write a page of thumbnails and histograms."""
    frame = _read(args)
    bar = ProgressBar(minimum=1.0, out=sys.stderr) if sys.stderr.isatty() else None
    with bar or contextlib.nullcontext():
        sheet = write_gallery(
            frame, args.output, args.n, columns=args.columns.split(","), decode=args.decode
        )
    errors = [card.error for card in sheet.cards if card.error]
    written = {"page": args.output, "shown": len(sheet), "errors": errors}
    print(json.dumps(written) if args.json else f"{args.output}: {len(sheet):,} images")
    return BAD_DATA if errors else FINE


def check(args: argparse.Namespace) -> int:
    """Print a report of the shards' health, after decoding every image."""
    urls = _urls(args)
    shards = from_sequence(urls, npartitions=len(urls))
    found = _compute(shards.map(check_shard, storage_options=args.storage_options))
    print(json.dumps(in_total(found), indent=2) if args.json else in_words(found))
    return BAD_DATA if any(shard.is_bad for shard in found) else FINE


def _read(args: argparse.Namespace) -> Any:
    return read_webdataset_images(
        args.paths, backend="pandas", storage_options=args.storage_options
    )


def _urls(args: argparse.Namespace) -> list[str]:
    return [shard.url for shard in find_shards(args.paths, args.storage_options)]


def _count(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Fold one partition to a row per distinct shard, format, size and error."""
    if "error" in by:
        frame = frame.assign(error=frame["error"].str.split(":").str[0])
    groups = frame.groupby(by, dropna=False, observed=True)["nbytes"]
    return groups.agg(samples="size", images="count", nbytes="sum").reset_index()


def _summary(counts: pd.DataFrame, urls: list[str]) -> dict[str, Any]:
    parts = dict(iter(counts.groupby("__url__")))
    return {
        "shards": len(urls),
        **_totals(counts),
        "per_shard": [{"url": url, **_totals(parts.get(url, counts[:0]))} for url in urls],
    }


def _totals(counts: pd.DataFrame) -> dict[str, Any]:
    readable = counts[counts["height"].notna()]
    totals = {
        "samples": int(counts["samples"].sum()),
        "images": int(counts["images"].sum()),
        "bytes": int(counts["nbytes"].sum()),
        "rgb_bytes": int((readable["height"] * readable["width"] * readable["images"]).sum()) * 3,
        "unreadable_headers": int(counts["images"].sum() - readable["images"].sum()),
        "formats": _histogram(counts, "format"),
        "sizes": _sizes(readable),
    }
    if "error" in counts:
        totals["errors"] = _histogram(counts, "error")
    return totals


def _histogram(counts: pd.DataFrame, column: str) -> dict[str, int]:
    sums = counts.groupby(column)["samples"].sum().sort_values(ascending=False)
    return {str(name): int(samples) for name, samples in sums.items()}


def _sizes(readable: pd.DataFrame) -> dict[str, list[int]]:
    """Pick the images with the fewest, the median and the most pixels, each as [width, height]."""
    if readable.empty:
        return {}
    ordered = readable.assign(pixels=readable["height"] * readable["width"]).sort_values("pixels")
    reached = ordered["images"].cumsum()
    middle = int((reached < reached.iloc[-1] / 2).sum())
    picks = {"smallest": 0, "median": middle, "largest": -1}
    return {
        name: [int(ordered["width"].iloc[row]), int(ordered["height"].iloc[row])]
        for name, row in picks.items()
    }


def _is_bad(summary: dict[str, Any]) -> bool:
    return bool(
        summary["unreadable_headers"]
        or summary["images"] < summary["samples"]
        or summary.get("errors")
    )


def _first_rows(frame: Any, n: int) -> pd.DataFrame:
    """Take ``n`` rows from as few partitions as have them."""
    rows = _compute(frame.partitions[0].head(n, npartitions=1, compute=False))
    for partition in range(1, frame.npartitions):
        if len(rows) == n:
            break
        more = frame.partitions[partition].head(n - len(rows), npartitions=1, compute=False)
        rows = pd.concat([rows, _compute(more)])
    return rows


def _describe_text(summary: dict[str, Any]) -> str:
    folder = _common_folder([shard["url"] for shard in summary["per_shard"]])
    lines = [
        f"{_number(summary['samples'], 'sample')} in {_number(summary['shards'], 'shard')}"
        + (f" of {folder}" if folder else ""),
        "",
        f"bytes    {format_bytes(summary['bytes'])} encoded, "
        f"{format_bytes(summary['rgb_bytes'])} decoded to RGB",
        f"formats  {_listing(summary['formats'])}",
        "size     " + ", ".join(f"{name} {w} × {h}" for name, (w, h) in summary["sizes"].items()),
        f"bad      {_bad_text(summary)}",
        "",
    ]
    table = pd.DataFrame([_shard_row(shard, folder) for shard in summary["per_shard"]])
    return "\n".join(lines) + ("\n" + table.to_string(index=False) if len(table) else "")


def _bad_text(summary: dict[str, Any]) -> str:
    counts = {
        "without an image": summary["samples"] - summary["images"],
        "with an unreadable header": summary["unreadable_headers"],
    }
    found = [f"{count:,} {what}" for what, count in counts.items() if count]
    if summary.get("errors"):
        found.append("errors: " + _listing(summary["errors"]))
    return "; ".join(found) or ("none" if "errors" in summary else "none seen (nothing decoded)")


def _shard_row(shard: dict[str, Any], folder: str) -> dict[str, Any]:
    width, height = shard["sizes"].get("median", ("–", "–"))
    errors = {"errors": sum(shard["errors"].values())} if "errors" in shard else {}
    return {
        "shard": shard["url"].removeprefix(folder),
        "samples": shard["samples"],
        "bytes": format_bytes(shard["bytes"]),
        "formats": _listing(shard["formats"]),
        "median size": f"{width} × {height}",
        "unreadable": shard["unreadable_headers"],
        **errors,
    }


def _head_text(rows: pd.DataFrame) -> str:
    folder = _common_folder(list(rows["__url__"]))
    shown = rows.assign(__url__=rows["__url__"].str.removeprefix(folder))
    width = shutil.get_terminal_size((120, 0)).columns
    return str(shown.to_string(index=False, line_width=width, max_colwidth=40))


def _common_folder(urls: list[str]) -> str:
    prefix = os.path.commonprefix(urls)  # noqa: RUF071 - URLs, cut at a slash below
    return prefix[: prefix.rfind("/") + 1]


def _listing(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@contextlib.contextmanager
def _scheduler(address: str | None) -> Iterator[None]:
    """Compute on the cluster at ``address``, or else on the threads of this process."""
    if address is None:
        with dask.config.set(scheduler="threads"):
            yield
        return
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"no Dask scheduler answers at {address}") from error
    with client:
        yield


def _compute(frame: Any) -> Any:
    """Compute with a progress bar, on a terminal and for what takes longer than a second."""
    if not sys.stderr.isatty():
        return frame.compute()
    if dask.config.get("scheduler", None) == "threads":
        with ProgressBar(minimum=1.0, out=sys.stderr):
            return frame.compute()
    frame = frame.persist()
    try:
        wait(frame, timeout=1)
    except TimeoutError:
        with contextlib.redirect_stdout(sys.stderr):
            progress(frame, notebook=False)
    return frame.compute()


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(
            f"dask-image-ingest: warning: {message}", file=sys.stderr
        )
        yield


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "paths",
        nargs="+",
        metavar="PATHS",
        help="shards: files, folders, globs, braces such as 'train-{000..099}.tar', URLs",
    )
    common.add_argument(
        "--storage-options",
        action=_StorageOptions,
        metavar="KEY=VALUE",
        help="for the filesystem of remote shards: anon=true, or JSON, '{\"anon\": true}'; "
        "may be given several times",
    )
    common.add_argument("--json", action="store_true", help="print JSON, for machines")
    common.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="run on this Dask cluster, not on the threads of this process",
    )
    parser = argparse.ArgumentParser(
        prog="dask-image-ingest",
        description="Look at WebDataset image shards.",
        epilog="Exit status: 0, 1 when bad data was found, 2 for wrong arguments.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    told = "totals, formats, sizes, and a line per shard, from headers alone"
    describing = verbs.add_parser("describe", parents=[common], help=told, description=told)
    describing.add_argument(
        "--decode", action="store_true", help="decode every image too, and count what fails"
    )
    describing.set_defaults(verb=describe)

    told = "the first samples, without their pixels"
    heading = verbs.add_parser("head", parents=[common], help=told, description=told)
    heading.add_argument("-n", type=_positive, default=5, metavar="N", help="how many (default 5)")
    heading.set_defaults(verb=head)

    told = "a health report: decodes every image, and names what is bad, damaged or ambiguous"
    checking = verbs.add_parser("check", parents=[common], help=told, description=told)
    checking.set_defaults(verb=check)

    told = "a page of thumbnails and histograms, which needs no other file"
    showing = verbs.add_parser("gallery", parents=[common], help=told, description=told)
    showing.add_argument("-o", dest="output", default="gallery.html", metavar="FILE")
    showing.add_argument(
        "-n", type=_positive, default=200, metavar="N", help="how many images (default 200)"
    )
    showing.add_argument(
        "--columns", default="__key__", help="what stands below an image: __key__,txt"
    )
    showing.add_argument(
        "--decode", action="store_true", help="decode every image, and count what fails"
    )
    showing.set_defaults(verb=gallery)

    add_export(verbs, common)
    return parser


class _StorageOptions(argparse.Action):
    """Gathers ``KEY=VALUE`` and JSON objects in one dict; a value is JSON, or else text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        text: Any,
        option_string: str | None = None,
    ) -> None:
        given = _json(text)
        if not isinstance(given, dict):
            key, separator, value = text.partition("=")
            if not separator or not key:
                raise argparse.ArgumentError(self, f"{text!r} is neither KEY=VALUE nor JSON")
            given = {key: _json(value)}
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **given})


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
