"""Everything that is to be seen on a GPU, in groups that each fit a call of eight minutes.

    python tools/on_a_card.py OUT --group first  # the first day: a little of all, in one call
    python tools/on_a_card.py --plan             # the calls that fit 15 minutes, in order of worth
    python tools/on_a_card.py --plan 30 --done first 0b       # what comes next, in so many
    python tools/on_a_card.py --list             # the groups, their steps, and what each shows
    python tools/on_a_card.py OUT --minutes 7.5  # as many steps as that takes, in order
    python tools/on_a_card.py OUT --only read    # one or some steps

It is for a rented machine with a GPU, on which each minute counts and which may be another one in
the next call. OUT is a folder. ``group-NAME.log`` holds what the steps of a group printed;
``summary.md`` how each step of this call ended, and the lines that belong into docs/benchmarks.md.
Each step is a process of its own, and one that fails or hangs keeps no other from running. The
package need not be installed; what it needs has to be, as listed in tests/gpu/README.md: no step of
a group begins where something is missing, and the exit status is then 3. It has not run on a GPU
yet; ``--simulated`` rehearses it without one.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

#: What a call may take, and of that for the packages that it brings, to be unpacked.
CALL_MINUTES = 8
UNPACK_MINUTES = 0.5

#: What a machine may be held for; and of that, until it is there and all packages are unpacked.
LEASE_MINUTES = 15
START_MINUTES = 2.5

#: Set where the steps are rehearsed on the simulated GPU.
SIMULATED = "SIMULATED_GPU"

#: The exit status if this machine lacks what a group needs.
BARE = 3

#: What the steps need beside this package's own imports: without RAPIDS, and with it.
DALI = ("cupy", "nvidia.dali")
ALL = (*DALI, "cudf", "dask_cuda", "dask_cudf", "pylibcudf", "rmm")


class Step(NamedTuple):
    """A command, what it shows, and a pattern of the lines that are figures to be kept.

    ``rehearsed`` is added to the command on the simulated GPU: fewer images, where a CPU takes too
    long for all of them.
    """

    name: str
    shows: str
    command: str
    minutes: float = 5
    environment: dict[str, str] = {}  # noqa: RUF012 - never written to
    figures: str = ""
    rehearsed: str = ""


class Group(NamedTuple):
    """Steps that fit one call together, what they show, and what the machine needs for them."""

    name: str
    shows: str
    steps: tuple[Step, ...]
    modules: tuple[str, ...] = ()

    @property
    def minutes(self) -> float:
        """What a call for it takes at most."""
        return UNPACK_MINUTES + sum(step.minutes for step in self.steps)

    @property
    def needs(self) -> str:
        """The packages that it needs, in words."""
        return "all packages of the extra" if self.modules == ALL else ", ".join(self.modules)


# What is imported beside RAPIDS and DALI, which the step ``api`` looks at.
IMPORTED = (
    "braceexpand cykooz_resizer dask distributed fsspec numpy pandas PIL psutil pyarrow pytest "
    "urllib3 xxhash"
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

# Of a benchmark: the table, what was busy, bad rows, and what was hoped for.
FIGURES = r"^\||^target|images/s|rows without an image|^NVIDIA|\([ansb]\):"

# In order of what is known least.
GROUPS = (
    Group(
        "first",
        "a little of all: CuPy, torch, DALI, flows, boxes, pixels under load, speed beside DALI",
        (
            Step(
                "machine",
                "Python, cores, the release of each package, and that none is missing",
                f"python -c {shlex.quote(MACHINE)}",
                0.5,
                figures=r"bytes$|cores$|^driver|^(nvidia-dali|nvidia-nvimgcodec|cudf|cupy|dask)",
            ),
            Step(
                "first-bare",
                "copies, signals, hashes, memory of torch, and DALI's decode beside Pillow's",
                f"{TESTS} tests/gpu/test_bare.py",
                1,
            ),
            Step(
                "first-flows",
                "15 flows of the guide as with pandas",
                f"{TESTS} tests/gpu/test_flows.py -m first",
                1.5,
            ),
            Step(
                "first-parts",
                "boxes of pictures as with pandas, each picture decoded once",
                f"{TESTS} tests/gpu/test_parts.py",
                0.5,
            ),
            Step(
                "first-corruption",
                "right pixels in five reads while other work is queued",
                "python tests/gpu/corruption.py --reads 5 --copy shipped",
                1.25,
                figures=r"^hardware load|^read \d",
                rehearsed="--images 300",
            ),
            Step(
                "first-job",
                "500 x 375: DALI alone, reads here and on a cluster, and their ratio to DALI",
                "python benchmarks/gpu.py --only '0.2 MP' --figures asb --scale 0.25 --repeats 2",
                2.75,
                figures=FIGURES,
                rehearsed="--scale 0.03",
            ),
        ),
        ALL,
    ),
    Group(
        "0b",
        "DALI without cuDF: its engines' share, places in a batch, what a pipeline costs",
        (
            Step(
                "engines",
                "whether the first batch settles the engines' share, and whether places matter",
                "python tests/gpu/engines.py",
                2.5,
                figures=r"^(share|places|build|refused):",
            ),
        ),
        DALI,
    ),
    Group(
        "4",
        "frames weigh what their pixels do",
        (
            Step(
                "memory",
                "what dask sees, what is sent, the peak of a late decode, shuffles of real pixels",
                f"{TESTS} -s tests/gpu/test_gpu_memory.py",
                3.25,
                figures=r"bytes of pixels|^\{'peak'",
            ),
        ),
        ALL,
    ),
    Group(
        "3",
        "training beside decoding, spilling, and a GPU that breaks",
        (
            Step(
                "training",
                "a model of torch on the same GPU, fed by DLPack: the loop, the model, the batches",
                "python tests/gpu/training.py",
                2.5,
                figures=r"images/s$|^memory:",
            ),
            Step(
                "broken",
                "an illegal access ends the worker, and the next process goes on",
                f"{TESTS} tests/gpu/test_broken_gpu.py",
                1,
            ),
            Step(
                "spill",
                "more than the limit of the GPU is spilled and comes back",
                f"{TESTS} -s tests/gpu/test_gpu_read.py -k spilled",
                1.5,
            ),
        ),
        ALL,
    ),
    Group(
        "5",
        "a read on a cluster: GPU = CPU, bad images, 500 tasks",
        (
            Step(
                "read",
                "all promises of a read, and of a checkpoint",
                f"{TESTS} -s tests/gpu/test_gpu_read.py",
                7.5,
                figures=r"bytes grown since|^\{'host to device'",
            ),
        ),
        ALL,
    ),
    Group(
        "6",
        "pixels are right under load; names, and the rest of the tests",
        (
            Step(
                "corruption",
                "right pixels while other work is queued; whether the old way was wrong",
                "python tests/gpu/corruption.py",
                4,
                figures=r"^hardware load",
            ),
            Step(
                "api",
                "every name and signature used",
                "python tools/check_gpu_api.py --require -v",
                1,
            ),
            Step(
                "queries",
                "random queries as with pandas",
                f"{TESTS} tests/gpu/test_random_queries.py",
                1,
            ),
            Step(
                "without-kernels",
                "the tests that a machine without a GPU runs too",
                f"{TESTS} tests/rapids",
                1.5,
            ),
        ),
        ALL,
    ),
    Group(
        "2",
        "images per second beside DALI alone and NeMo Curator's pattern, small and large",
        (
            Step(
                "job",
                "500 x 375 and 12 MP: DALI alone, reads here and on a cluster, a pipeline a shard",
                "python benchmarks/gpu.py --only '0.2 MP' '12 MP' --figures asbd --scale 0.25 "
                "--repeats 2",
                4.5,
                figures=FIGURES,
            ),
            Step(
                "job-without-engines",
                "the same on the cores of the GPU alone",
                "python benchmarks/gpu.py --only '0.2 MP' '12 MP' --figures ab --scale 0.25 "
                "--repeats 2 --hw-decoder-load 0",
                3,
                {"DASK_IMAGE_INGEST__HW_DECODER_LOAD": "0"},
                FIGURES,
            ),
        ),
        ALL,
    ),
    Group(
        "1",
        "a cuDF partition does what a pandas one does",
        (
            Step(
                "contract",
                "a cuDF partition does what a pandas one does",
                f"{TESTS} tests/gpu/test_cudf.py",
                1.5,
            ),
            Step(
                "flows",
                "each flow of the guide as with pandas: empty partitions, lazy vectors, late "
                "decodes, to_backend, export, checkpoint, curation",
                f"{TESTS} tests/gpu/test_flows.py",
                2.5,
            ),
            Step(
                "contract-spilling",
                "the contract with cuDF's spilling, and that pixels come back from host memory",
                f"{TESTS} tests/gpu/test_cudf.py",
                1.5,
                {"CUDF_SPILL": "1"},
            ),
            Step(
                "curate",
                "duplicates and clusters of a cuDF frame are those of a pandas frame",
                f"{TESTS} tests/gpu/test_curate.py",
                1,
            ),
        ),
        ALL,
    ),
    Group(
        "0",
        "what needs no RAPIDS: copies beside a busy stream, curation on CuPy, DLPack",
        (
            Step("card", "the card, its driver, what else runs on it", "nvidia-smi -q", 0.25),
            Step(
                "bare",
                "pixels in one buffer, signals, hashes and heads as NumPy's, memory of torch",
                f"{TESTS} tests/gpu/test_bare.py",
                1.5,
            ),
        ),
        ("cupy",),
    ),
    Group(
        "7",
        "all ways of the benchmark, for small photographs",
        (
            Step(
                "benchmark",
                "each way, with an index and without, bad images, what is busy, memory at the peak",
                "python benchmarks/gpu.py --only '0.2 MP' --scale 0.5",
                7.5,
                figures=FIGURES,
            ),
        ),
        ALL,
    ),
    Group(
        "8",
        "the same for large photographs and for a mixture",
        (
            Step(
                "benchmark-large",
                "each way for 1 MP, 12 MP and mixed sizes",
                "python benchmarks/gpu.py --only '12 MP' '1 MP' mixed --scale 0.5 --repeats 2",
                7.5,
                figures=FIGURES,
            ),
        ),
        ALL,
    ),
    Group(
        "9",
        "where the host's time goes, and the settings of DALI",
        (
            Step(
                "profile",
                "where the host's time goes",
                "python benchmarks/gpu.py --profile --only '0.2 MP' --scale 0.5",
                1.5,
            ),
            Step(
                "profile-large",
                "the same for large photographs",
                "python benchmarks/gpu.py --profile --only '12 MP' --scale 0.5",
                1.5,
            ),
            Step(
                "tune",
                "DALI alone over batch sizes, threads, shares of the engines, batches in flight",
                "python benchmarks/gpu.py --tune --only '0.2 MP' --scale 0.25",
                4.5,
                figures=r"^\|",
            ),
        ),
        ALL,
    ),
)


def absent(group: Group) -> list[str]:
    """Modules that a group needs and that this machine does not have."""
    return [name for name in (*group.modules, *IMPORTED.split()) if not _is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def begin_again(group: Group, missing: list[str]) -> str:
    """What to do on a machine that lacks something."""
    return (
        f"group {group.name}: not begun, this machine lacks {', '.join(missing)}. It is bare: it "
        "was started afresh, or not all packages were brought. Begin again: unpack all parts of "
        "packages (.gpu-pack/), from the first on, each in its own call right after the one "
        "before, and then run this group, in the call of the last part"
    )


def run(step: Step, log: Path) -> tuple[str, float]:
    """Run one step, to the end of a log; gives how it ended and after how many seconds."""
    environment = os.environ | step.environment | {"PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]
    if SIMULATED in environment:
        step = step._replace(command=f"{step.command} {step.rehearsed}".rstrip())
        paths[1:1] = [str(ROOT / "tests" / "played"), str(ROOT / "tests" / "played" / "rehearsed")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable if word == "python" else word for word in shlex.split(step.command)]
    start = time.monotonic()
    with log.open("a") as file:
        file.write(f"{_headline(step)}\n$ {step.command}\n")
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
            ended = f"not done after {step.minutes:.2g} minutes"
    return ended, time.monotonic() - start


def printed(step: Step, log: Path) -> list[str]:
    """What a step printed the last time that it ran, by lines."""
    text = log.read_text(errors="replace")
    return text.rpartition(f"{_headline(step)}\n")[2].splitlines()[1:]


def _headline(step: Step) -> str:
    return f"===== {step.name}: {step.shows}"


def summary(rows: list[str], figures: dict[str, list[str]]) -> str:
    """How steps ended, and what to copy."""
    lines = ["| step | shows | ended | took |", "|---|---|---|---:|", *rows, ""]
    if figures:
        lines += [
            "## Into docs/benchmarks.md",
            "",
            "With the card's name, the driver and the date, and the command above each:",
        ]
        for command, found in figures.items():
            lines += ["", f"    $ {command}", "", *(f"    {line}" for line in found)]
    return "\n".join([*lines, ""])


def show_list() -> None:
    """Say what there is."""
    for group in GROUPS:
        print(f"group {group.name}, {group.minutes:g} minutes at most: {group.shows}")
        print(f"    needs {group.needs}")
        for step in group.steps:
            variables = "".join(f"{name}={value} " for name, value in step.environment.items())
            copied = " [its figures go into docs/benchmarks.md]" if step.figures else ""
            print(f"    {step.name}: {step.shows}{copied}\n        {variables}{step.command}")


def show_plan(minutes: float, done: list[str]) -> None:
    """Say which calls fit so many minutes, in order of worth, and what is left for another time."""
    used, left = START_MINUTES, []
    print(f"In {minutes:g} minutes, at most {CALL_MINUTES:g} a call, with the time to unpack:\n")
    print(f"{used:4.2g} min  until the machine is there and has the packages")
    for group in GROUPS:
        if group.name in done:
            continue
        if used + group.minutes > minutes:
            left.append(group)
            continue
        used += group.minutes
        print(f"{group.minutes:4.2g} min  python tools/on_a_card.py OUT --group {group.name}")
        print(f"          {group.shows}")
        print(f"          {', '.join(step.name for step in group.steps)}; needs {group.needs}")
    print(f"{used:4.3g} min  in all")
    if left:
        print("\nLeft for another time, in this order:\n")
    for group in left:
        print(f"{group.minutes:4.2g} min  --group {group.name}: {group.shows}")


def main() -> int:
    """Run the steps, keep their logs, say how each ended and what is to be copied."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for group in GROUPS for step in group.steps]
    parser.add_argument("out", type=Path, nargs="?", help="folder for the logs")
    parser.add_argument("--group", choices=[g.name for g in GROUPS], help="one group alone")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help="some steps alone")
    parser.add_argument("--minutes", type=float, default=600, help="begin no step after these")
    parser.add_argument("--done", nargs="+", default=[], metavar="GROUP", help="not to be planned")
    parser.add_argument(
        "--simulated", action="store_true", help="on a simulated GPU: for an environment of RAPIDS"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--plan",
        nargs="?",
        type=float,
        const=LEASE_MINUTES,
        metavar="MINUTES",
        help=f"say which calls fit so many minutes ({LEASE_MINUTES}), and run nothing",
    )
    arguments = parser.parse_args()
    if arguments.plan is not None:
        show_plan(arguments.plan, arguments.done)
        return 0
    if arguments.list:
        show_list()
        return 0
    if arguments.out is None:
        parser.error("OUT is missing: the folder for the logs")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.simulated:
        os.environ[SIMULATED] = "1"
    rows: list[str] = []
    is_bare = False
    figures: dict[str, list[str]] = {}
    end = time.monotonic() + 60 * arguments.minutes
    for group in GROUPS:
        steps = [s for s in group.steps if not arguments.only or s.name in arguments.only]
        if not steps or arguments.group not in (None, group.name):
            continue
        print(f"{time.strftime('%X')} group {group.name}: {group.shows}", flush=True)
        log = arguments.out / f"group-{group.name}.log"
        if missing := absent(group):
            is_bare = True
            rows += [f"| {step.name} | {step.shows} | not begun | |" for step in steps]
            (arguments.out / "summary.md").write_text(summary(rows, figures))
            print(begin_again(group, missing), flush=True)
            continue
        for step in steps:
            left = (end - time.monotonic()) / 60
            if left <= 0:
                rows.append(f"| {step.name} | {step.shows} | not begun | |")
                (arguments.out / "summary.md").write_text(summary(rows, figures))
                continue
            step = step._replace(minutes=min(step.minutes, left))
            print(f"{time.strftime('%X')} {step.name}: {step.shows}", flush=True)
            ended, seconds = run(step, log)
            rows.append(f"| {step.name} | {step.shows} | {ended} | {seconds:.0f} s |")
            lines = printed(step, log)
            found = [line for line in lines if step.figures and re.search(step.figures, line)]
            if found:
                figures[step.command] = found
            shown = found if ended == "ok" and found else lines[-3 if ended == "ok" else -30 :]
            print("\n".join(shown))
            print(f"{time.strftime('%X')} {step.name}: {ended}, {seconds:.0f} s\n", flush=True)
            # After each step, for whoever is cut off.
            (arguments.out / "summary.md").write_text(summary(rows, figures))
    return BARE if is_bare else int(any("| ok |" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
