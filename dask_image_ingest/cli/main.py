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
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import dask
from distributed import Client

from dask_image_ingest.cli.curation import duplicates, quality
from dask_image_ingest.cli.export import KEEP_HELP, add_export
from dask_image_ingest.cli.verbs import (
    BAD_DATA,
    INTERRUPTED,
    WRONG_ARGUMENTS,
    check,
    describe,
    gallery,
    head,
    index,
)
from dask_image_ingest.computing import progress
from dask_image_ingest.decode import Mode
from dask_image_ingest.environment import versions
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    MissingDependencyError,
    ShardNotFoundError,
)
from dask_image_ingest.export import RefusedRowsError
from dask_image_ingest.url_secrets import without_secrets


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; it stores the function of the chosen verb in ``verb``."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "paths",
        nargs="+",
        metavar="PATHS",
        help="shards: files, folders, globs, braces such as 'train-{000..099}.tar', URLs; "
        "for all verbs but index also image files, or parquet files with a column 'image'",
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
    columns = argparse.ArgumentParser(add_help=False)
    columns.add_argument(
        "--read-sidecar",
        choices=["auto", "parquet", "none"],
        default="auto",
        help="columns of the parquet file beside each shard, as img2dataset and export write it: "
        "auto, if there is one (default); parquet, an error if there is none; none",
    )
    image = argparse.ArgumentParser(add_help=False)
    image.add_argument(
        "--image",
        metavar="EXTENSIONS",
        help="inspect only this member of each sample: 'seg.png', or several in order of "
        "preference, 'jpg;png' (default: the image that a read takes, and all further images)",
    )
    image.add_argument(
        "--mode",
        choices=get_args(Mode),
        default="RGB",
        help="the mode to decode this image in: labels, for masks (default RGB)",
    )
    parser = argparse.ArgumentParser(
        prog="dask-image-ingest",
        description="Inspect, curate and export WebDataset image shards.",
        epilog="Exit status: 0, 1 when bad data was found, 2 for wrong arguments.",
    )
    version = f"%(prog)s {versions()['dask-image-ingest']}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add_verb(
        name: str, description: str, parents: list[argparse.ArgumentParser], example: str
    ) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name,
            parents=parents,
            help=description,
            description=description,
            epilog=f"Example: dask-image-ingest {name} {example}",
        )

    description = "totals, formats, sizes, and a line per shard, from headers alone"
    describing = add_verb("describe", description, [common, image], "photos/ --decode")
    describing.add_argument(
        "--decode", action="store_true", help="decode every image, and count those that fail"
    )
    describing.set_defaults(verb=describe)

    description = "the first samples, without their pixels"
    heading = add_verb("head", description, [common, columns], "train-000.tar -n 3")
    heading.add_argument("-n", type=_positive, default=5, metavar="N", help="how many (default 5)")
    heading.set_defaults(verb=head)

    description = (
        "a health report: decodes every image, and lists what is bad, damaged or ambiguous"
    )
    checking = add_verb("check", description, [common, image], "photos/")
    checking.set_defaults(verb=check)

    description = "a page of thumbnails and histograms, which needs no other file"
    showing = add_verb("gallery", description, [common, columns], "photos/ -o photos.html -n 50")
    showing.add_argument(
        "-o",
        dest="output",
        default="gallery.html",
        metavar="FILE",
        help="the page (default gallery.html)",
    )
    showing.add_argument(
        "-n",
        type=_positive,
        default=200,
        metavar="N",
        help="how many images, spread over all rows (default 200)",
    )
    showing.add_argument(
        "--columns", default="__key__", help="columns to show below an image: __key__,txt"
    )
    showing.add_argument(
        "--mask",
        metavar="EXTENSION",
        help="draw the labels of this member over the images: seg.png",
    )
    showing.add_argument(
        "--decode", action="store_true", help="decode every image, and count those that fail"
    )
    showing.set_defaults(verb=gallery)

    description = "an index beside each shard: metadata of its samples, so that queries open no tar"
    indexing = add_verb("index", description, [common], "photos/ -o indexes")
    indexing.add_argument(
        "-o", dest="output", metavar="FOLDER", help="write there, if the shards are read-only"
    )
    indexing.add_argument(
        "--combined",
        action="store_true",
        help="one file for all shards of a folder, for thousands of shards",
    )
    indexing.add_argument(
        "--overwrite", action="store_true", help="rewrite indexes that are up to date"
    )
    indexing.set_defaults(verb=index)

    page = argparse.ArgumentParser(add_help=False)
    page.add_argument("--html", metavar="FILE", help="write an HTML report, too")

    description = "how many images are dark, blurred, empty, odd: decodes every image"
    assessing = add_verb("quality", description, [common, page], "photos/ --html quality.html")
    assessing.set_defaults(verb=quality)

    description = "groups of duplicate images, and which image of each to keep"
    comparing = add_verb("duplicates", description, [common, page], "photos/ --by pixels")
    comparing.add_argument(
        "--by",
        choices=["bytes", "pixels", "pdq"],
        default="pdq",
        help="what is compared: bytes decodes nothing, pdq finds near images (default)",
    )
    comparing.add_argument(
        "--distance",
        type=int,
        default=24,
        metavar="BITS",
        help="bits of 256 that near images may differ in, 0 to 64 (default 24)",
    )
    comparing.add_argument(
        "--variants",
        default="",
        metavar="mirrored,rotated90",
        help="find images that are mirrored or turned, too",
    )
    comparing.add_argument("--keep", default="best", metavar="WHICH", help=KEEP_HELP)
    comparing.add_argument(
        "--against",
        metavar="FOLDER",
        help="hashes of images kept before, stored by curate.write_hashes(): those come first",
    )
    comparing.add_argument(
        "--memory",
        default="4 GiB",
        metavar="SIZE",
        help="the most memory of the search, beside the hashes (default 4 GiB)",
    )
    comparing.set_defaults(verb=duplicates)

    add_export(verbs, [common, columns])
    return parser


class _StorageOptions(argparse.Action):
    """Collect ``KEY=VALUE`` pairs and JSON objects in one dict; values are JSON, or else text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        text: Any,
        option_string: str | None = None,
    ) -> None:
        options = _json(text)
        if not isinstance(options, dict):
            key, separator, value = text.partition("=")
            if not separator or not key:
                raise argparse.ArgumentError(self, f"{text!r} is neither KEY=VALUE nor JSON")
            options = {key: _json(value)}
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **options})


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
