"""``pipe:`` URLs: commands whose output is a shard, as webdataset runs them."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dask_image_ingest.arguments import check_flag
from dask_image_ingest.errors import ArgumentError, ShardError

# The storage option that allows commands: it goes wherever shards are read.
_ALLOWED = "allow_pipes"

_PROTOCOL = "pipe:"

# Characters of what a command says on standard error that an error repeats.
_MOST_SAID = 1000

# Seconds after which it is looked whether a command whose output has not ended has itself ended, or
# this process is about to.
_LOOK = 2


def is_pipe(url: str) -> bool:
    """Tell whether a URL is a command."""
    return url.startswith(_PROTOCOL)


def refuse_pipes(url: str, storage_options: dict[str, Any] | None) -> None:
    """Refuse a command that nobody has allowed.

    Raises
    ------
    ArgumentError
    """
    if (storage_options or {}).get(_ALLOWED) is not True:
        raise ArgumentError(
            f"{url!r} is a command, and this package runs none unless it is told to: give the path "
            "or URL that the command reads, or, if you trust whoever wrote this list of paths, "
            "allow_pipes=True (elsewhere storage_options={'allow_pipes': True})"
        )


def with_permission(storage_options: dict[str, Any] | None, allow: Any) -> dict[str, Any] | None:
    """The options with the argument ``allow_pipes=`` among them."""
    check_flag("allow_pipes", allow)
    return {**(storage_options or {}), _ALLOWED: True} if allow else storage_options


def without_permission(storage_options: dict[str, Any] | None) -> dict[str, Any]:
    """The options that are meant for a file system."""
    return {k: v for k, v in (storage_options or {}).items() if k != _ALLOWED}


def run_pipe(url: str, storage_options: dict[str, Any] | None) -> bytes:
    """Run a command and return its standard output.

    It is run by the shell, without input. All that it has started ends with this call, whatever
    ends the call.

    Raises
    ------
    ArgumentError
        If commands are not allowed.
    ShardError
        If it does not end with status 0, even if it has written a whole shard.
    """
    refuse_pipes(url, storage_options)
    command = url.removeprefix(_PROTOCOL)
    with subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            data, told = _output(process)
        finally:
            _kill(process)
            process.wait()  # Popen does not, after an interrupt
    if process.returncode:
        status = process.returncode
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        said = told.decode("utf-8", "replace").strip()[-_MOST_SAID:]
        raise ShardError(
            f"the command {command!r} has failed ({how}) after {len(data)} bytes; on standard "
            f"error it said: {said or 'nothing'}"
        )
    return data


def _output(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Standard output and standard error of a command that has ended.

    What it leaves behind in a session of its own may hold both open for ever, as a connection does
    that ssh keeps for the next call.
    """
    while True:
        try:
            return process.communicate(timeout=_LOOK)
        except subprocess.TimeoutExpired:
            if process.poll() is None and not _is_ending():
                continue
        _kill(process)
        try:
            return process.communicate(timeout=_LOOK)
        except subprocess.TimeoutExpired as held:
            return held.output or b"", held.stderr or b""


def _is_ending() -> bool:
    """True if the program has ended, as by Ctrl-C, and only waits for its threads.

    Of which this is one: else the command would have to end first.
    """
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(int)
        except RuntimeError as error:
            return "shutdown" in str(error)  # not that there is no room for a thread
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has left in the background."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
