"""Shards written anew with other sizes: beside `cp` of the same bytes, and beside the peers.

Every row turns the same shards into shards of another number of samples on the same disk, and its
time ends when the disk has them (`sync`). Each run is a process of its own, timed from its first
call on, so that no row pays for imports, clusters or the first touch of a source. Rows take turns.
Bytes of overhead are what a tar holds beyond the members' own bytes, per member.

    python benchmarks/export.py                        # a few minutes
    python benchmarks/export.py --quick                # one turn, fewer images
    python benchmarks/export.py --shards train/*.tar   # photographs of one's own, repeated
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from _shards import make_shards

CORES = len(os.sched_getaffinity(0))
PER_SHARD = 300
RESULT = "result: "

# Gets ready, and returns a function that writes all samples of some shards to a folder.
Write = Callable[[list[str], Path], None]


def copy(paths: list[str], out: Path) -> None:
    subprocess.run(["cp", *paths, out], check=True)


def ours(paths: list[str], out: Path, **options) -> None:
    import dask_image_ingest as dii

    frame = dii.read_webdataset_images(paths, backend="pandas")
    options = {"samples_per_shard": PER_SHARD, "sidecar": None} | options
    dii.to_webdataset(frame, out / "{shard:06d}.tar", **options)


def ours_shuffled(paths: list[str], out: Path) -> None:
    ours(paths, out, shuffle=1)


def ours_with_sidecars(paths: list[str], out: Path) -> None:
    ours(paths, out, sidecar="parquet", index=True)


def ours_on_a_cluster() -> Write:
    import dask_image_ingest as dii

    dii.start_cluster(gpu=False, dashboard_address=None)
    return ours


def webdataset_writer(paths: list[str], out: Path) -> None:
    import webdataset

    pattern = str(out / "%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=PER_SHARD, maxsize=10**12, verbose=0) as writer:
        for sample in webdataset.WebDataset(paths, shardshuffle=False):
            writer.write(
                {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")}
            )


def ray_data() -> Write:
    import ray

    ray.init(num_cpus=CORES, include_dashboard=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def write(paths: list[str], out: Path) -> None:
        ray.data.read_webdataset(paths, decoder=None).write_webdataset(str(out), encoder=None)

    return write


class Row(NamedTuple):
    """A way to write shards, and the packages that it needs."""

    name: str
    prepare: Callable[[], Write]
    needs: tuple[str, ...] = ()


ROWS = {
    "cp": Row("`cp` of the same bytes", lambda: copy),
    "threads": Row("**ours**, threads", lambda: ours),
    "cluster": Row("ours, on `start_cluster()`", ours_on_a_cluster),
    "shuffled": Row("ours, shuffled over all shards", lambda: ours_shuffled),
    "sidecars": Row("ours, with sidecars and indexes", lambda: ours_with_sidecars),
    "webdataset": Row("webdataset, `ShardWriter`", lambda: webdataset_writer, ("webdataset",)),
    "ray": Row("Ray Data, `write_webdataset`", ray_data, ("ray", "webdataset")),
}


def measure_row(name: str, folder: Path, repeats: int) -> None:
    """Print the seconds of each run, and the overhead of a member."""
    paths = sorted(map(str, (folder / "in").glob("*.tar")))
    write = ROWS[name].prepare()
    for repeat in range(1 + repeats):
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()
        start = time.perf_counter()
        write(paths, out)
        os.sync()
        seconds = time.perf_counter() - start
        overhead, members = overheads(out)
        found = {"seconds": seconds, "overhead": overhead, "members": members}
        shutil.rmtree(out)
        if repeat:  # the first one warms up
            print(RESULT + json.dumps(found), flush=True)


def overheads(out: Path) -> tuple[float, int]:
    """Bytes beyond the members' own, per member, and how many members there are."""
    beyond = members = 0
    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            sizes = [member.size for member in tar]
        beyond += path.stat().st_size - sum(sizes)
        members += len(sizes)
    return beyond / members, members


def run_row(name: str, folder: Path, repeats: int) -> tuple[list[dict], str]:
    """What one process says of its runs, and the end of its errors."""
    command = [sys.executable, __file__, "--row", name, "--folder", folder]
    process = subprocess.Popen(
        [*map(str, command), "--repeats", str(repeats)],
        env=os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that what it leaves behind can be ended with it
    )
    try:
        output, errors = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        output, errors = "", "it took longer than 400 seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    results = [line for line in output.splitlines() if line.startswith(RESULT)]
    return [json.loads(line.removeprefix(RESULT)) for line in results], errors[-2000:]


def compare(names: list[str], folder: Path, turns: int, repeats: int) -> dict[str, list[dict]]:
    """Run every row in turn; a row that fails is told of and left out."""
    figures: dict[str, list[dict]] = {name: [] for name in names}
    members = set()
    for turn in range(turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            if name not in figures:
                continue
            found, errors = run_row(name, folder, repeats)
            members |= {one["members"] for one in found}
            if len(found) < repeats or len(members) > 1:
                del figures[name]
                say(f"left out, since it failed: {ROWS[name].name}\n{errors}")
                continue
            figures[name] += found
            say(f"turn {turn + 1} of {turns}: {found[-1]['seconds']:6.2f} s  {ROWS[name].name}")
    return figures


def as_table(figures: dict[str, list[dict]], nbytes: int) -> str:
    """The rows from fast to slow, as Markdown: ratios first."""
    seconds = {
        name: statistics.median(one["seconds"] for one in found) for name, found in figures.items()
    }
    lines = [
        "| of `cp` | ours is faster by | | MB/s | slowest to fastest | overhead, bytes a member |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for name in sorted(seconds, key=seconds.__getitem__):
        speeds = sorted(nbytes / 1e6 / one["seconds"] for one in figures[name])
        of_cp = f"{seconds['cp'] / seconds[name]:.2f}" if "cp" in seconds else ""
        ours = f"{seconds[name] / seconds['threads']:.1f} ×" if "threads" in seconds else ""
        lines.append(
            f"| {of_cp} | {ours} | {ROWS[name].name} | {nbytes / 1e6 / seconds[name]:,.0f} | "
            f"{speeds[0]:,.0f} to {speeds[-1]:,.0f} | {figures[name][0]['overhead']:,.0f} |"
        )
    return "\n".join(lines)


def available(names: list[str]) -> list[str]:
    """The rows whose packages are installed; the others are named."""
    there = []
    for name in names:
        missing = [need for need in ROWS[name].needs if importlib.util.find_spec(need) is None]
        if missing:
            say(f"left out, since {', '.join(missing)} is not installed: {ROWS[name].name}")
        else:
            there.append(name)
    return there


def say(line: str) -> None:
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="+", metavar="PATH", help="tars of photographs to use")
    parser.add_argument("--images", type=int, default=4000, help="of a run (default 4000)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each row (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each (default 3)")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="rows")
    parser.add_argument("--quick", action="store_true", help="1,000 images, one turn")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        measure_row(arguments.row, arguments.folder, arguments.repeats)
        return
    if arguments.quick:
        arguments.images, arguments.turns = 1000, 1
    names = available(arguments.only or list(ROWS))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        paths = make_shards(folder / "in", arguments.images, 500, arguments.shards or ())
        nbytes = sum(path.stat().st_size for path in paths)
        figures = compare(names, folder, arguments.turns, arguments.repeats)
    print(as_table(figures, nbytes))
    print(f"\n{arguments.images:,} samples of 4 members, {nbytes / 1e6:,.0f} MB, {CORES} cores")


if __name__ == "__main__":
    main()
