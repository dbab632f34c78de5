"""Clusters of ``dask scheduler`` and ``dask worker`` processes that share only the network.

Each process has a working directory, temporary files and a local directory of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import dask
from dask.cli import run_cli
from distributed import Client
from forked_python import MEASURED, Fork
from processes import SECONDS

_TESTS = Path(__file__).parent
_PACKAGES = Path(sysconfig.get_path("purelib"))


class HandStarted:
    """A scheduler and the workers that were started for it; a context manager ends them all.

    They are forks of a process that has imported all there is, unless they have a ``PYTHONPATH`` of
    their own. ``folder`` holds what belongs to each process.
    """

    def __init__(self, folder: Path, *, scheduler: Sequence[str] = (), **environment: str) -> None:
        self.folder = folder
        # A worker that stands still on a busy machine is not given up.
        patient = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "1 hour"}
        patient["DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP"] = "10 minutes"
        self._environment = patient | environment
        self._scheduler = scheduler  # options
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        self.address = ""

    def __enter__(self) -> HandStarted:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "scheduler.json"
        options = ["--port", "0", "--dashboard-address", ":0", f"--scheduler-file={file}"]
        self.start("scheduler", *options, *self._scheduler)
        self.address = str(file)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # it may have ended
                os.killpg(process.pid, signal.SIGKILL)  # with those that nannies have started
        for process in self._processes:
            process.wait(SECONDS)

    def worker(self, *options: str, **environment: str) -> subprocess.Popen[bytes] | Fork:
        """Start a worker of one thread, in a process group of its own."""
        where = ["--scheduler-file", self.address, "--no-dashboard"]
        return self.start("worker", *where, "--nthreads", "1", *options, **environment)

    def start(self, what: str, *options: str, **environment: str) -> subprocess.Popen[bytes] | Fork:
        own = self.folder / f"{what}-{len(self._processes)}"
        (own / "tmp").mkdir(parents=True)
        command = [what, *options]
        if what == "worker":
            command += ["--local-directory", str(own / "local")]
        variables = self._environment | {"TMPDIR": str(own / "tmp")} | environment
        process: subprocess.Popen[bytes] | Fork
        if MEASURED or variables.get("PYTHONPATH"):
            process = _new_python(own, command, variables)
        else:
            log = own / "log"
            process = Fork(_dask, command, output=log, errors=log, folder=own, **variables)
        self._processes.append(process)
        return process

    @contextmanager
    def client(self, n_workers: int) -> Iterator[Client]:
        """A client, as soon as that many workers are there."""
        with Client(scheduler_file=self.address, timeout=SECONDS) as client:
            if n_workers:
                client.wait_for_workers(n_workers, timeout=SECONDS)
            yield client

    @property
    def scheduler(self) -> str:
        """The scheduler's address."""
        return str(json.loads(Path(self.address).read_text())["address"])

    def log(self) -> str:
        """All that the processes have said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*/log")))


def _new_python(
    folder: Path, command: list[str], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(map(str, (_TESTS.parent.parent, _TESTS, _PACKAGES)))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            # Without site, packages are nowhere but on the path that a test sets.
            [sys.executable, "-S", "-m", "dask", *command],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path} | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _dask(command: list[str]) -> None:
    """Do what ``dask COMMAND`` does, in a fork, of which nannies make forks."""
    sys.argv = ["dask", *command]
    with dask.config.set({"distributed.worker.multiprocessing-method": "fork"}):
        run_cli()


def packages_without(folder: Path, *names: str) -> str:
    """A path of all that is installed, but for this package and packages of these names."""
    folder.mkdir()
    for entry in _PACKAGES.iterdir():
        if not entry.name.startswith(("dask_image_ingest", *names)):
            (folder / entry.name).symlink_to(entry)
    return str(folder)
