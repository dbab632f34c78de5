"""Processes that tests start, fork, kill and wait for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SUPPORT = Path(__file__).parent
_ROOT = _SUPPORT.parents[1]

#: After which a wait has failed, also on a machine that is busy with other things.
SECONDS = 240


def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for a condition to become true."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def python_path() -> str:
    """The path of processes that import this package and what tests share."""
    path = [_ROOT, _SUPPORT.parent, _SUPPORT, os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(map(str, path))


def printed(code: str, **environment: str) -> Any:
    """What a fresh process prints as its last line, which is JSON."""
    with tempfile.TemporaryDirectory() as folder:
        # A file, since processes that it starts may have to import it.
        script = Path(folder) / "script.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": python_path()} | environment,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def in_fork(answer: Callable[[], int], seconds: int = SECONDS) -> int:
    """The number that a function answers in a fork; negative if it took longer than ``seconds``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that run meanwhile
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            os._exit(int(answer()))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(script: str, *arguments: Any) -> subprocess.Popen:
    """A script of this folder, in a process group of its own, which it or a test may kill."""
    return subprocess.Popen(
        [sys.executable, _SUPPORT / script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{_SUPPORT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_all_went_on(told: list[dict]) -> None:
    for run in told:
        assert run["killed"], run
        assert run["partial"] == [], run
        assert run["resumed"], run
        assert run["same"], run
    # Of few, all may have died before anything was finished.
    assert len(told) < 5 or any(run["finished"] for run in told)
