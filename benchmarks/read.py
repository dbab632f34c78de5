"""Reading shards of photographs, in full and at 224 × 224: how near to the decoder's limit, and how
far ahead of the peers.

Every row does the same work on the same shards: each image decoded to RGB and kept where the
user can use it, with its key and its caption. Two rows are DALI alone, which has no keys and no
captions: the limit of the decoder, whose output buffers are recycled, and the same with each image
copied out and kept. The limit of both sizes is that of decoding alone. Each run is a process of its
own, that reads the shards once to warm up and then a few times by the clock; rows take turns, so
that a slow moment of the machine meets them all.

    python benchmarks/read.py                        # about 10 minutes
    python benchmarks/read.py --quick                # one turn, fewer images
    python benchmarks/read.py --shards train/*.tar   # photographs of one's own, repeated

Writes docs/benchmarks.md, between its two marks, and docs/benchmarks.png.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from _readers import CORES, ROWS, Row
from _shards import make_shards

RESULT = "result: "
PAUSE = 0.3
SIZES = {"full": None, "224": 224}
TITLES = {
    "full": "Each image as large as it is:",
    "224": "Each image at 224 × 224, antialiased by all but DALI's own resize:",
}
DOCS = Path(__file__).parents[1] / "docs"
START, END = "<!-- benchmarks/read.py -->", "<!-- end -->"


PACKAGES = (
    "dask-image-ingest",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "dask",
    "distributed",
    "pandas",
    "pyarrow",
    "numpy",
    "pillow",
    "webdataset",
    "torch",
    "datasets",
    "ray",
    "daft",
)


# --- one run, in a process of its own -------------------------------------------------------------


def measure_row(row: Row, paths: list[str], images: int, size: int | None, repeats: int) -> None:
    """Print what each read took: seconds by the clock, and seconds that the cores were busy."""
    read = row.prepare(paths, images, size)
    for _ in range(1 if row.first else 1 + repeats):
        busy, start = busy_seconds(), time.perf_counter()
        count = read()
        seconds = time.perf_counter() - start
        found = {"seconds": seconds, "busy": busy_seconds() - busy, "images": int(count())}
        print(RESULT + json.dumps(found), flush=True)
        # What was kept goes before the next read, also where it was kept by other processes.
        del count
        gc.collect()
        time.sleep(PAUSE)


def busy_seconds() -> float:
    """Seconds that all cores together have worked, whoever they worked for."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system, _idle, _wait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# --- all runs, and what comes of them -------------------------------------------------------------


class Figures(NamedTuple):
    """What the runs of one row gave: images per second, and milliseconds of a core per image."""

    speeds: list[float]
    costs: list[float]


def compare(
    names: list[str], folder: Path, size: str, turns: int, repeats: int
) -> dict[str, Figures]:
    """Run every row in turn; a row that fails is told of and left out."""
    figures = {name: Figures([], []) for name in names}
    images = json.loads((folder / "images.json").read_text())
    for turn in range(turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            if name not in figures:
                continue
            found, errors = run_row(name, folder, size, repeats)
            first = ROWS[name].first
            found = found if first else found[1:]
            # Raw DALI goes on to the end of a batch.
            if len(found) < (1 if first else repeats) or any(
                one["images"] < images for one in found
            ):
                del figures[name]
                say(f"left out, since it failed: {ROWS[name].name}\n{errors}")
                continue
            speeds = [one["images"] / one["seconds"] for one in found]
            figures[name].speeds.extend(speeds)
            figures[name].costs.extend(1e3 * one["busy"] / one["images"] for one in found)
            speed = statistics.median(speeds)
            say(f"{size}, turn {turn + 1} of {turns}: {speed:6,.0f} images/s  {ROWS[name].name}")
    return figures


def run_row(name: str, folder: Path, size: str, repeats: int) -> tuple[list[dict], str]:
    """What one process says of its runs, and the end of its errors."""
    command = [sys.executable, __file__, "--row", name, "--folder", folder, "--size", size]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": f"{folder}/cache"}
    quiet = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "DAFT_PROGRESS_BAR": "0"}
    # In a session of its own, so that what it leaves behind can be ended with it.
    process = subprocess.Popen(
        [*map(str, command), "--repeats", str(repeats)],
        env=os.environ | offline | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        output, errors = "", "it took longer than 180 seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    results = [line for line in output.splitlines() if line.startswith(RESULT)]
    return [json.loads(line.removeprefix(RESULT)) for line in results], errors[-2000:]


def as_table(figures: dict[str, Figures]) -> str:
    """The rows from fast to slow, as Markdown: ratios first."""
    speeds = {name: statistics.median(row.speeds) for name, row in figures.items()}
    lines = [
        "| of the limit | ours is faster by | | images/s | slowest to fastest | core ms/image |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for name in sorted(speeds, key=speeds.__getitem__, reverse=True):
        of_limit = f"{speeds[name] / speeds['limit']:.2f}" if "limit" in speeds else ""
        faster = f"{speeds['persisted'] / speeds[name]:.2f} ×" if "persisted" in speeds else ""
        lines.append(
            f"| {of_limit} | {faster} | {ROWS[name].name} | {speeds[name]:,.0f} | "
            f"{min(figures[name].speeds):,.0f} to {max(figures[name].speeds):,.0f} | "
            f"{statistics.median(figures[name].costs):.2f} |"
        )
    return "\n".join(lines)


def facts(paths: list[Path], images: int, arguments) -> str:
    """When, where, on what and with what this was measured."""
    found = []
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    nbytes = sum(path.stat().st_size for path in paths)
    photographs = "given ones" if arguments.shards else "cuttings of seven photographs"
    return "\n".join(
        [
            f"- {datetime.date.today()}: `{' '.join(['python benchmarks/read.py', *OPTIONS])}`",
            f"- {processor()}, {CORES} cores, {memory():.0f} GB, Python {sys.version.split()[0]}",
            f"- {images:,} JPEG images ({photographs}, repeated) in {len(paths)} shards, "
            f"{nbytes / images / 1e3:.0f} kB each",
            f"- {arguments.turns} turns of {arguments.repeats} runs of each row after one to warm "
            "up; images/s is the median",
            f"- {', '.join(found)}",
        ]
    )


def processor() -> str:
    """The model of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory() -> float:
    """This machine's memory in GB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def write_docs(report: str) -> None:
    """Put the report between its marks in docs/benchmarks.md."""
    page = DOCS / "benchmarks.md"
    text = page.read_text() if page.exists() else f"# Benchmarks\n\n{START}\n{END}\n"
    before, _, rest = text.partition(START)
    page.write_text(f"{before}{START}\n{report}\n{END}{rest.partition(END)[2]}")


def draw(figures: dict[str, Figures]) -> bool:
    """A bar for each row read in full, in docs/benchmarks.png; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = {name: statistics.median(row.speeds) for name, row in figures.items()}
    ranked = sorted(speeds, key=speeds.__getitem__)
    middles = [speeds[name] for name in ranked]
    spread = [
        [speeds[name] - min(figures[name].speeds) for name in ranked],
        [max(figures[name].speeds) - speeds[name] for name in ranked],
    ]
    colours = ["#76b900" if "ours" in ROWS[name].name else "#8c8c8c" for name in ranked]
    plot, axes = pyplot.subplots(figsize=(9, 0.45 * len(ranked) + 1), layout="constrained")
    labels = [ROWS[name].name.replace("*", "").replace("`", "") for name in ranked]
    axes.barh(labels, middles, color=colours, xerr=spread, ecolor="#404040", capsize=2)
    axes.set_xlabel(f"images/s, {CORES} cores: median, slowest, fastest")
    axes.spines[["top", "right"]].set_visible(False)
    plot.savefig(DOCS / "benchmarks.png", dpi=120)
    return True


def available(names: list[str]) -> list[str]:
    """The rows whose packages are installed; the others are named."""
    there = []
    for name in names:
        missing = [need for need in ROWS[name].needs if not is_installed(need)]
        if missing:
            say(f"left out, since {', '.join(missing)} is not installed: {ROWS[name].name}")
        else:
            there.append(name)
    return there


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def say(line: str) -> None:
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


OPTIONS = [Path(option).name if "/" in option else option for option in sys.argv[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="+", metavar="PATH", help="tars of photographs to use")
    parser.add_argument("--images", type=int, default=2000, help="of a run (default 2000)")
    parser.add_argument("--per-shard", type=int, default=500, help="images of one (default 500)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each row (default 2)")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each (default 2)")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="rows")
    parser.add_argument("--quick", action="store_true", help="400 images, one turn, no docs")
    parser.add_argument("--size", choices=SIZES, help="one of the two sizes alone")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        paths = sorted(map(str, arguments.folder.glob("*.tar")))
        images = json.loads((arguments.folder / "images.json").read_text())
        measure_row(ROWS[arguments.row], paths, images, SIZES[arguments.size], arguments.repeats)
        return
    if arguments.quick:
        arguments.images, arguments.turns = 400, 1
    names = available(arguments.only or list(ROWS))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        images = arguments.images
        paths = make_shards(folder, images, arguments.per_shard, arguments.shards or ())
        (folder / "images.json").write_text(str(images))
        figures = {
            size: compare(names, folder, size, arguments.turns, arguments.repeats)
            for size in ([arguments.size] if arguments.size else SIZES)
        }
        tables = [f"{TITLES[size]}\n\n{as_table(found)}" for size, found in figures.items()]
        report = "\n\n".join([*tables, facts(paths, images, arguments)])
    print(report)
    if not arguments.quick and not arguments.only and not arguments.size:
        chart = "\n\n![images per second at full size](benchmarks.png)" if draw(figures["full"]) else ""
        write_docs(report + chart)


if __name__ == "__main__":
    main()
