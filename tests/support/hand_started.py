"""Clusters of ``dask scheduler`` and ``dask worker`` processes that share only the network.

Each process has a working directory, temporary files, a local directory and, where the machine
allows it, a table of processes of its own.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed import Client
from processes import SECONDS

_TESTS = Path(__file__).parent
_PACKAGES = Path(sysconfig.get_path("purelib"))


class HandStarted:
    """A scheduler and the workers that were started for it; a context manager ends them all.

    ``folder`` holds what belongs to each process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        site: bool = False,
        scheduler: Sequence[str] = (),
        **environment: str,
    ) -> None:
        # Without site, packages are nowhere but on the path that a test sets.
        self._options = [] if site else ["-S"]
        self.folder = folder
        # A worker that stands still on a busy machine is not given up.
        patient = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "1 hour"}
        patient["DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP"] = "10 minutes"
        self._environment = patient | environment
        self._scheduler = scheduler  # options
        self._processes: list[subprocess.Popen[bytes]] = []
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
            process.wait()

    @staticmethod
    def path(first: Sequence[Path] = ()) -> str:
        """The path of processes that have all packages, this one, and what tests share."""
        return os.pathsep.join(map(str, (*first, _TESTS.parent.parent, _TESTS, _PACKAGES)))

    def worker(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a worker of one thread, in a process group of its own."""
        where = ["--scheduler-file", self.address, "--no-dashboard"]
        return self.start("worker", *where, "--nthreads", "1", *options, **environment)

    def start(self, what: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        own = self.folder / f"{what}-{len(self._processes)}"
        (own / "tmp").mkdir(parents=True)
        path = {"PYTHONPATH": self.path()}
        variables = (
            os.environ | path | self._environment | {"TMPDIR": str(own / "tmp")} | environment
        )
        command = [sys.executable, *self._options, "-m", "dask", what, *options]
        if what == "worker":
            command += ["--local-directory", str(own / "local")]
        command = [*namespace(), *command]
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=own, env=variables, stdout=log, stderr=log, start_new_session=True
            )
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


@functools.cache
def namespace() -> tuple[str, ...]:
    """The beginning of a command that runs the rest in a PID namespace; empty if it can't be."""
    # The shell is its first process, which the kernel protects from signals of the others.
    begin = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    begin += ['"$@"; exit 0', "sh"]
    try:
        able = subprocess.run([*begin, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        able = False
    return tuple(begin) if able else ()


def packages_without(folder: Path, *names: str) -> str:
    """A path of all that is installed, but for this package and packages of these names."""
    folder.mkdir()
    for entry in _PACKAGES.iterdir():
        if not entry.name.startswith(("dask_image_ingest", *names)):
            (folder / entry.name).symlink_to(entry)
    return str(folder)
