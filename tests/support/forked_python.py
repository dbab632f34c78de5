"""Python programs in forks of a process that has imported what they need.

A new Python imports Dask's dataframes for two seconds and DALI for one more; a fork has both at
once. A new one is started for what is promised of an import, of the end of a process, or of what
its variables say from the first line on: ``processes.printed``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dask
from processes import SECONDS, python_path

#: What forks have imported, workers of clusters among them. CUDA does not live through a fork.
IMPORTED = ["distributed", "dask.dataframe", "dask_image_ingest"]
if not os.path.exists("/dev/nvidiactl"):
    IMPORTED.append("nvidia.dali.fn")

# Coverage measures processes that are started, not such forks.
MEASURED = "COVERAGE_RUN" in os.environ


def run_python(code: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program, as ``python -c CODE ARGUMENTS`` does."""
    strings = list(map(str, arguments))
    if MEASURED:
        return subprocess.run(
            [sys.executable, "-c", code, *strings],
            env=os.environ | {"PYTHONPATH": python_path()} | environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        fork = Fork(run_main, code, strings, output=output, errors=errors, **environment)
        status = fork.wait(SECONDS)
        return subprocess.CompletedProcess(code, status, output.read_text(), errors.read_text())


def results(script: str, *arguments: Any) -> list[dict]:
    """What a script of this folder tells of each process that it killed."""
    done = run_python((Path(__file__).parent / script).read_text(), *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Fork:
    """A function that runs in a fork, which leads a process group; what it writes is in two files.

    ``folder`` is its working directory.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        output: Path,
        errors: Path,
        folder: Path | None = None,
        **environment: str,
    ) -> None:
        output.touch()
        errors.touch()
        where = (str(output), str(errors), folder, dict(os.environ | environment))
        self._process = get_context("forkserver").Process(
            target=_run, args=(function, arguments, *where)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The ID of the process, and of its group."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, seconds: float) -> int:
        """Wait for its end: the exit status. It is killed if it takes longer."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(function, arguments, output, errors, folder, variables) -> None:
    os.setsid()
    for path, number in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if folder is not None:
        os.chdir(folder)
    # As a new Python would read them.
    os.environ.clear()
    os.environ.update(variables)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in variables
    tempfile.tempdir = None
    dask.config.refresh()
    function(*arguments)


def run_main(code: str, arguments: Sequence[str] = ()) -> None:
    """Run a program as the main module."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<program>", "exec"), vars(module))
