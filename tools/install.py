"""Install this package with some of its extras, editable, and show how far pip is.

    .venv/bin/python tools/install.py cpu,demo

Further arguments are pip's. What pip says goes to pip.log in the environment's folder, and is shown
only when it fails. On a terminal, one line tells what is fetched and how much has come.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

ENVIRONMENT = Path(sys.prefix)

# Lines of the log that are shown when pip fails.
_LAST_LINES = 30

# Characters of the line of progress.
_WIDTH = 78


def step_of(log: str) -> str:
    """The step that pip is at, by what it has said so far."""
    if found := re.search(r"^Installing collected packages: (.*)$", log, re.MULTILINE):
        return f"installing {found[1].count(',') + 1} packages"
    steps = re.findall(r"^ *(Collecting|Downloading|Using cached) (\S+)(.*)$", log, re.MULTILINE)
    if not steps:
        return "starting"
    step, name, size = steps[-1]
    name = name.rpartition("/")[2].partition("-")[0]
    return f"looking for {name}" if step == "Collecting" else f"fetching {name}{size}"


def megabytes_in(folder: Path) -> int:
    """The size of the files below a folder, some of which may just be removed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total // 10**6


def main(extras: str, options: list[str]) -> int:
    """Run pip, and return its exit status."""
    log = ENVIRONMENT / "pip.log"
    print(f"Installing dask-image-ingest[{extras}] into {os.path.relpath(ENVIRONMENT)} ...")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip.append("--no-compile")  # half of the time; Python compiles what it imports
    start = monotonic()
    with tempfile.TemporaryDirectory(dir=ENVIRONMENT) as fetched, log.open("w") as out:
        process = subprocess.Popen(
            [*pip, *options, "-e", f".[{extras}]"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": fetched},
        )
        fetched_most = 0  # at the end pip removes the files
        while True:
            try:
                status = process.wait(0.5)
                break
            except subprocess.TimeoutExpired:
                if sys.stdout.isatty():
                    seconds = int(monotonic() - start)
                    step = step_of(log.read_text(errors="replace"))
                    fetched_most = max(fetched_most, megabytes_in(Path(fetched)))
                    line = f"  {seconds} s, {fetched_most} MB fetched, {step}"
                    print(f"\r{line[:_WIDTH]:{_WIDTH}}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r" + " " * _WIDTH, end="\r")
    if status:
        print(*log.read_text(errors="replace").splitlines()[-_LAST_LINES:], sep="\n")
        print(f"pip failed: the lines above are the end of {log}.")
    else:
        print(f"Installed in {monotonic() - start:.0f} s.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
