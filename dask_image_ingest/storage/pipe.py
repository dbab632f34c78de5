"""``pipe:`` URLs, as in webdataset: commands whose standard output is a shard."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dask_image_ingest.arguments import StorageOptions, check_flag
from dask_image_ingest.errors import ArgumentError, ShardError

# The storage option that allows commands: storage options get wherever shards are read.
_ALLOWED = "allow_pipes"

_PROTOCOL = "pipe:"

# Characters of a command's standard error that an error quotes.
_MOST_QUOTED = 1000

# Seconds between checks whether the command has ended though its output is open, or this process
# is about to end.
_POLL_EVERY = 2


def is_pipe(url: str) -> bool:
    """True if a URL is a command."""
    return url.startswith(_PROTOCOL)


def refuse_pipes(url: str, storage_options: dict[str, Any] | None) -> None:
    """Refuse a command unless the storage options allow commands.

    Raises
    ------
    ArgumentError
    """
    if (storage_options or {}).get(_ALLOWED) is not True:
        raise ArgumentError(
            f"{url!r} is a command, and this package runs commands only if allowed: give the path "
            "or URL that the command reads, or, if you trust the author of this list of paths, "
            "allow_pipes=True (elsewhere storage_options={'allow_pipes': True})"
        )


def with_permission(storage_options: dict[str, Any] | None, allow: Any) -> dict[str, Any] | None:
    """The storage options plus the argument ``allow_pipes=``."""
    check_flag("allow_pipes", allow)
    allowed = {**(storage_options or {}), _ALLOWED: True}
    return StorageOptions(allowed) if allow else storage_options


def without_permission(storage_options: dict[str, Any] | None) -> dict[str, Any]:
    """The storage options without ``allow_pipes``, for a file system."""
    return {k: v for k, v in (storage_options or {}).items() if k != _ALLOWED}


def run_pipe(url: str, storage_options: dict[str, Any] | None) -> bytes:
    """Run a command in the shell, without input, and return its standard output.

    Its process group is killed when this call ends, also by an exception.

    Raises
    ------
    ArgumentError
        If commands are not allowed.
    ShardError
        If its exit status is not 0, even after a whole shard.
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
            data, errors = _output(process)
        finally:
            _kill(process)
            process.wait()  # Popen's exit does not wait after a KeyboardInterrupt
    if process.returncode:
        status = process.returncode
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        quoted = errors.decode("utf-8", "replace").strip()[-_MOST_QUOTED:]
        raise ShardError(
            f"the command {command!r} has failed ({how}) after {len(data)} bytes; on standard "
            f"error it said: {quoted or 'nothing'}"
        )
    return data


def _output(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Wait for a command; its standard output and standard error.

    Waits for the command, not for the end of its output: a process that it leaves behind in another
    session, such as a persistent ssh connection, may hold the output open for ever.
    """
    while True:
        try:
            return process.communicate(timeout=_POLL_EVERY)
        except subprocess.TimeoutExpired:
            if process.poll() is None and not _is_ending():
                continue
        _kill(process)
        try:
            return process.communicate(timeout=_POLL_EVERY)
        except subprocess.TimeoutExpired as timeout:
            return timeout.output or b"", timeout.stderr or b""


def _is_ending() -> bool:
    """True if the interpreter is shutting down and waits for its threads, one of which is this.

    The command is killed then, else the shutdown would wait for it.
    """
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(int)
        except RuntimeError as error:
            return "shutdown" in str(error)  # other errors: no thread can be started
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a command, including what it left in the background."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
