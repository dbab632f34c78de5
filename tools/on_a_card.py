"""Everything that is to be seen on a GPU, each step in a process of its own, with its log kept.

    python tools/on_a_card.py OUT                   # all steps, in order; about 40 minutes
    python tools/on_a_card.py OUT --only contract   # one or some of them
    python tools/on_a_card.py OUT --list            # what each step shows, and its command

OUT is a folder: ``NN-step.log`` holds what a step printed, ``summary.md`` how each ended. A step
that fails or hangs keeps no other from running. The package need not be installed; what it needs
has to be, as listed in tests/gpu/README.md: the step ``machine`` names what is missing. It has not
run on a GPU yet.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    """A command, and what it shows."""

    name: str
    shows: str
    command: str
    minutes: float = 5
    environment: dict[str, str] = {}  # noqa: RUF012 - never written to


# What is imported beside RAPIDS and DALI, which the step ``api`` looks at.
IMPORTED = (
    "braceexpand cykooz_resizer dask distributed fsspec numpy pandas PIL psutil pyarrow pytest "
    "urllib3"
)
MACHINE = (
    "import importlib.metadata as m, importlib.util as u, os, sys, cupy; "
    "p = cupy.cuda.runtime.getDeviceProperties(0); "
    "print(sys.version); print(p['name'].decode(), p['totalGlobalMem'], 'bytes'); "
    "print(len(os.sched_getaffinity(0)), 'cores'); "
    "print('driver', cupy.cuda.runtime.driverGetVersion()); "
    "print(*sorted(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n'); "
    f"missing = [n for n in '{IMPORTED}'.split() if u.find_spec(n) is None]; "
    "missing and sys.exit('missing: ' + ' '.join(missing)); "
    "import dask_image_ingest, dask.dataframe, pytest"
)
TESTS = "python -m pytest -p no:cacheprovider -rA --tb=long --durations=10"

STEPS = (
    Step("card", "the card, its driver, what else runs on it", "nvidia-smi -q", 1),
    Step(
        "machine",
        "Python, cores, the release of each package, and that none is missing",
        f"python -c {shlex.quote(MACHINE)}",
        1,
    ),
    Step("api", "every name and signature used", "python tools/check_gpu_api.py --require -v", 2),
    Step(
        "contract",
        "a cuDF partition does what a pandas one does",
        f"{TESTS} tests/gpu/test_cudf.py",
    ),
    Step(
        "contract-spilling",
        "the same with cuDF's spilling, and that pixels come back from host memory",
        f"{TESTS} tests/gpu/test_cudf.py",
        5,
        {"CUDF_SPILL": "1"},
    ),
    Step(
        "read",
        "a read on a cluster: GPU = CPU, bad images, 500 tasks, spilling",
        f"{TESTS} -s tests/gpu/test_gpu_read.py",
        15,
    ),
    Step(
        "memory",
        "what dask sees, what is sent, the peak of a late decode, pandas and back",
        f"{TESTS} -s tests/gpu/test_gpu_memory.py",
        10,
    ),
    Step(
        "without-kernels",
        "the tests that a machine without a GPU runs too",
        f"{TESTS} tests/rapids",
        5,
    ),
    Step(
        "corruption",
        "right pixels while other work is queued; whether the old way was wrong",
        "python tests/gpu/corruption.py",
        10,
    ),
    Step(
        "smoke",
        "the benchmark on a tenth of the data, before the long runs",
        "python benchmarks/gpu.py --scale 0.1 --repeats 1",
        8,
    ),
    Step(
        "benchmark",
        "images per second of each way, bad images, what is busy, memory at the peak",
        "python benchmarks/gpu.py",
        25,
    ),
    Step(
        "tune",
        "DALI alone over batches, threads, hardware loads and batches in flight",
        "python benchmarks/gpu.py --tune --only '0.2 MP'",
        15,
    ),
    Step(
        "tune-large",
        "the same for large photographs",
        "python benchmarks/gpu.py --tune --only '12 MP' --scale 0.5",
        15,
    ),
    Step(
        "profile",
        "where the host's time goes",
        "python benchmarks/gpu.py --profile --only '0.2 MP' '12 MP'",
        5,
    ),
)


def run(step: Step, number: int, out: Path) -> tuple[str, float]:
    """Run one step; gives how it ended and after how many seconds."""
    log = out / f"{number:02d}-{step.name}.log"
    environment = os.environ | step.environment | {"PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable if word == "python" else word for word in shlex.split(step.command)]
    start = time.monotonic()
    with log.open("w") as file:
        file.write(f"$ {step.command}\n")
        file.flush()
        try:
            # A group of its own, so that the workers that it started end with it.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{error}\n")
            return str(error), 0
        try:
            status = process.wait(step.minutes * 60)
            ended = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"not done after {step.minutes:g} minutes"
    return ended, time.monotonic() - start


def tail(log: Path, lines: int) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def main() -> int:
    """Run the steps, keep their logs, say how each ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("out", type=Path, help="folder for the logs")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help="some steps alone")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for step in STEPS:
            variables = "".join(f"{name}={value} " for name, value in step.environment.items())
            print(f"{step.name}: {step.shows}\n    {variables}{step.command}")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, step in enumerate(STEPS, 1):
        if arguments.only and step.name not in arguments.only:
            continue
        print(f"{time.strftime('%X')} {step.name}: {step.shows}", flush=True)
        ended, seconds = run(step, number, arguments.out)
        rows.append(f"| {step.name} | {step.shows} | {ended} | {seconds:.0f} s |")
        print(tail(arguments.out / f"{number:02d}-{step.name}.log", 3 if ended == "ok" else 30))
        print(f"{time.strftime('%X')} {step.name}: {ended}, {seconds:.0f} s\n", flush=True)
        # After each step, for whoever is cut off.
        head = ["| step | shows | ended | took |", "|---|---|---|---:|"]
        (arguments.out / "summary.md").write_text("\n".join([*head, *rows, ""]))
    return int(any("| ok |" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
