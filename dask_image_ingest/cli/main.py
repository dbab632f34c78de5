"""``main``: from the arguments to the exit status."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

import dask
from distributed import Client

from dask_image_ingest.cli.parser import make_parser
from dask_image_ingest.cli.verbs import BAD_DATA, FINE, INTERRUPTED, WRONG_ARGUMENTS
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    MissingDependencyError,
    ShardNotFoundError,
)
from dask_image_ingest.export import RefusedRowsError
from dask_image_ingest.progress_bar import progress
from dask_image_ingest.url_secrets import without_secrets

# A full disk, or a quota.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_ARGUMENT_ERRORS = (ArgumentError, MissingDependencyError, ShardNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _escape_unencodable()
    args = make_parser().parse_args(argv)
    try:
        on_terminal = sys.stderr.isatty()
        with (
            _plain_warnings(),
            _scheduler(args.scheduler),
            progress() if on_terminal else contextlib.nullcontext(),
        ):
            status, text = args.verb(args)
        # Flush here: an error at exit could not be reported.
        print(without_secrets(text), flush=True)
        return int(status)
    except DaskImageIngestError as error:
        print(f"dask-image-ingest: {error}", file=sys.stderr)
        wrong = isinstance(error, _ARGUMENT_ERRORS) and not isinstance(error, RefusedRowsError)
        return WRONG_ARGUMENTS if wrong else BAD_DATA
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has closed it, as in `... | head`.
        _close_stdout()
        return FINE
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _close_stdout()
        print(f"dask-image-ingest: cannot write the output: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS


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
        warnings.showwarning = lambda message, *_, **__: print(
            f"dask-image-ingest: warning: {message}", file=sys.stderr
        )
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
