"""``main`` and its arguments: from the command line to the exit status."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import dask
from distributed import Client

from dask_image_ingest.cli import verbs
from dask_image_ingest.cli.verbs import BAD_DATA, INTERRUPTED, WRONG_ARGUMENTS
from dask_image_ingest.client import versions
from dask_image_ingest.computing import progress
from dask_image_ingest.decode import Mode
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    MissingDependencyError,
    ShardNotFoundError,
)
from dask_image_ingest.export import RefusedRowsError
from dask_image_ingest.url_secrets import without_secrets

#: Its name, and the arguments of `add_argument`.
Option = tuple[str, dict[str, Any]]


def _option(name: str, metavar: str | None, text: str, **settings: Any) -> Option:
    return name, {"metavar": metavar, "help": text, **settings}


def _flag(name: str, text: str) -> Option:
    return name, {"action": "store_true", "help": text}


_DECODE = _flag("--decode", "decode every image, and count those that fail")
_COLUMNS = _option(
    "--read-sidecar",
    None,
    "columns of the parquet file beside each shard, as img2dataset and export write it: "
    "auto, if there is one (default); parquet, an error if there is none; none",
    choices=["auto", "parquet", "none"],
    default="auto",
)
_IMAGE = (
    _option(
        "--image",
        "EXTENSIONS",
        "inspect only this member of each sample: 'seg.png', or several in order of "
        "preference, 'jpg;png' (default: the image that a read takes, and all further images)",
    ),
    _option(
        "--mode",
        None,
        "the mode to decode this image in: labels, for masks (default RGB)",
        choices=get_args(Mode),
        default="RGB",
    ),
)
_PAGE = _option("--html", "FILE", "write an HTML report, too")
_KEEP = (
    "best (default), largest, first, or a column, such as quality.sharpness, to keep the row with "
    "its largest value"
)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; it stores the function of the chosen verb in ``verb``."""
    parser = argparse.ArgumentParser(
        prog="dask-image-ingest",
        description="Inspect, curate and export WebDataset image shards.",
        epilog="Exit status: 0, 1 when bad data was found, 2 for wrong arguments.",
    )
    version = f"%(prog)s {versions()['dask-image-ingest']}"
    parser.add_argument("--version", action="version", version=version)
    added = parser.add_subparsers(required=True, metavar="VERB")
    common = (
        _option(
            "paths",
            "PATHS",
            "shards: files, folders, globs, braces such as 'train-{000..099}.tar', URLs; "
            "for all verbs but index also image files, or parquet files with a column 'image'",
            nargs="+",
        ),
        _option(
            "--storage-options",
            "KEY=VALUE",
            "for the filesystem of remote shards: anon=true, or JSON, '{\"anon\": true}'; "
            "may be given several times",
            type=_storage_options,
            action="append",
        ),
        _flag("--json", "print JSON, for machines"),
        _option(
            "--scheduler", "ADDRESS", "run on this Dask cluster, not on the threads of this process"
        ),
    )

    def add(
        name: str, verb: Callable[..., Any], description: str, example: str, *options: Option
    ) -> None:
        one = added.add_parser(
            name,
            help=description,
            description=description,
            epilog=f"Example: dask-image-ingest {name} {example}",
        )
        for option, settings in (*common, *options):
            one.add_argument(option, **settings)
        one.set_defaults(verb=verb)

    add(
        "describe",
        verbs.describe,
        "totals, formats, sizes, and a line per shard, from headers alone",
        "photos/ --decode",
        *_IMAGE,
        _DECODE,
    )
    add(
        "head",
        verbs.head,
        "the first samples, without their pixels",
        "train-000.tar -n 3",
        _COLUMNS,
        _option("-n", "N", "how many (default 5)", type=_positive, default=5),
    )
    add(
        "check",
        verbs.check,
        "a health report: decodes every image, and lists what is bad, damaged or ambiguous",
        "photos/",
        *_IMAGE,
    )
    add(
        "gallery",
        verbs.show_gallery,
        "a page of thumbnails and histograms, which needs no other file",
        "photos/ -o photos.html -n 50",
        _COLUMNS,
        _option(
            "-o", "FILE", "the page (default gallery.html)", dest="output", default="gallery.html"
        ),
        _option(
            "-n",
            "N",
            "how many images, spread over all rows (default 200)",
            type=_positive,
            default=200,
        ),
        _option(
            "--columns", None, "columns to show below an image: __key__,txt", default="__key__"
        ),
        _option("--mask", "EXTENSION", "draw the labels of this member over the images: seg.png"),
        _DECODE,
    )
    add(
        "index",
        verbs.index,
        "an index beside each shard: metadata of its samples, so that queries open no tar",
        "photos/ -o indexes",
        _option("-o", "FOLDER", "write there, if the shards are read-only", dest="output"),
        _flag("--combined", "one file for all shards of a folder, for thousands of shards"),
        _flag("--overwrite", "rewrite indexes that are up to date"),
    )
    add(
        "quality",
        verbs.quality,
        "how many images are dark, blurred, empty, odd: decodes every image",
        "photos/ --html quality.html",
        _PAGE,
    )
    add(
        "duplicates",
        verbs.duplicates,
        "groups of duplicate images, and which image of each to keep",
        "photos/ --by pixels",
        _PAGE,
        _option(
            "--by",
            None,
            "what is compared: bytes decodes nothing, pdq finds near images (default)",
            choices=["bytes", "pixels", "pdq"],
            default="pdq",
        ),
        _option(
            "--distance",
            "BITS",
            "bits of 256 that near images may differ in, 0 to 64 (default 24)",
            type=int,
            default=24,
        ),
        _option(
            "--variants",
            "mirrored,rotated90",
            "find images that are mirrored or turned, too",
            default="",
        ),
        _option("--keep", "WHICH", _KEEP, default="best"),
        _option(
            "--against",
            "FOLDER",
            "hashes of images kept before, stored by curate.write_hashes(): those come first",
        ),
        _option(
            "--memory",
            "SIZE",
            "the most memory of the search, beside the hashes (default 4 GiB)",
            default="4 GiB",
        ),
    )
    add(
        "export",
        verbs.export_shards,
        "write the samples that meet a condition to new shards, with their bytes unchanged",
        "'in/*.tar' -o 'out/{shard:06d}.tar' --where \"width >= 512\"",
        _COLUMNS,
        _option(
            "-o",
            "TEMPLATE",
            "required: the names of the new shards, 'out/{shard:06d}.tar', a path or a URL",
            dest="output",
            required=True,
        ),
        _option(
            "--where",
            "CONDITION",
            'rows to keep: "width >= 512 and json.similarity > 0.3"; also by quality, which '
            'decodes images: "quality.blur > 0.3"',
        ),
        _option(
            "--json-field",
            "NAME=TYPE",
            "a field of the json member as a typed column: similarity=float32. Without it, a "
            "field in --where has the type of the value that it is compared with: float64, string "
            "or bool",
            action="append",
            default=[],
        ),
        _option("--samples-per-shard", "N", "(default 10,000)", type=int),
        _option("--bytes-per-shard", "SIZE", "'1GB': maximum size of a shard, with headers"),
        _option("--shuffle", "SEED", "shuffle samples across all shards", type=int),
        _option("--members", "jpg,txt", "only these members (default: all)"),
        _flag("--no-sidecar", "no parquet files beside the shards"),
        _flag("--index", ".idx files beside the shards, for DALI's reader"),
        _flag("--drop-bad-images", "decode every image, and leave out bad ones"),
        _option(
            "--drop-duplicates",
            None,
            "write each image once: bytes compares files, pixels decoded images, pdq "
            "perceptual hashes",
            choices=["bytes", "pixels", "pdq"],
        ),
        _option("--keep", "WHICH", f"which duplicate to write: {_KEEP}", default="best"),
        _flag("--strict", "write nothing if a row would be left out"),
        _flag("--resume", "continue an interrupted export"),
        _flag("--overwrite", "first remove what an earlier export wrote there"),
    )
    return parser


def _storage_options(text: str) -> dict[str, Any]:
    """``KEY=VALUE``, or a JSON object; values are JSON, or else text."""
    options = _json(text)
    if isinstance(options, dict):
        return options
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is neither KEY=VALUE nor JSON")
    return {key: _json(value)}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a whole number of at least 1")
    return number


# A full disk, or a quota.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_ARGUMENT_ERRORS = (ArgumentError, MissingDependencyError, ShardNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _escape_unencodable()
    args = make_parser().parse_args(argv)
    if args.storage_options is not None:
        args.storage_options = dict(ChainMap(*reversed(args.storage_options)))
    try:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        with (
            _plain_warnings(),
            _scheduler(args.scheduler),
            progress() if on_terminal else contextlib.nullcontext(),
        ):
            status, text = args.verb(args)
        return _printed(without_secrets(text), int(status))
    except DaskImageIngestError as error:
        _tell(str(error))
        wrong = isinstance(error, _ARGUMENT_ERRORS) and not isinstance(error, RefusedRowsError)
        return WRONG_ARGUMENTS if wrong else BAD_DATA
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _close_stdout()
        _tell(f"cannot write the output: {error}")
        return WRONG_ARGUMENTS


def _printed(text: str, status: int) -> int:
    """Print the result of a verb, whose work is done; returns its status."""
    try:
        # Flush here: an error at exit could not be reported.
        print(text, flush=True)
    except BrokenPipeError:
        # The reader of the pipe has closed it, as in `... | head`.
        _close_stdout()
    return status


def _tell(message: str) -> None:
    """Print a warning or an error; if nobody reads it, as in `2>&1 | head`, the work goes on."""
    with contextlib.suppress(OSError):
        print(f"dask-image-ingest: {message}", file=sys.stderr, flush=True)


def _escape_unencodable() -> None:
    """Print characters that the locale's encoding lacks (``LC_ALL=C``) as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _close_stdout() -> None:
    """Discard what is left in the buffer, which Python would write at exit, and fail again."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _tell(f"warning: {message}")
        yield


@contextlib.contextmanager
def _scheduler(address: str | None) -> Iterator[None]:
    """Compute on the cluster at ``address``; without one, on threads of this process."""
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
