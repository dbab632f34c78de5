"""Exports that are killed at chosen moments, and go on.

    python killed_exports.py moments FOLDER WORK SEED NUMBER  at NUMBER of all moments; 0: at each
    python killed_exports.py cluster FOLDER TEMPLATE  one export on a cluster of two workers

A moment is a call that changes the disk: the process dies just before it. Each export runs in a
process that is forked off, so that none pays for the imports.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import dask
from distributed import Client, LocalCluster
from witnesses import contents, shards_in

import dask_image_ingest as dii

# What an export calls to change what is on a disk.
CALLS = ("pwritev", "replace", "link", "unlink", "fsync", "truncate", "rmdir", "mkdir")


def export(folder: str, template: str, **options) -> None:
    frame = dii.read_webdataset_images(folder, backend="pandas")
    frame = frame[frame.width > 100].assign(score=frame["cls"] * 2)
    dii.to_webdataset(frame, template, samples_per_shard=4, index=True, **options)


def in_a_child(function: Callable[[], None]) -> bool:
    """Call ``function`` in a process of its own; whether it came to its end."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        status = 1
        try:
            with dask.config.set(scheduler="synchronous"):
                function()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status == 0


def dying_at(moment: int, function: Callable[[], None], counter: Path | None = None) -> None:
    """Call ``function``, and die with all of the process group just before a moment."""
    made = 0

    def counting(call):
        def counted(*args, **kwargs):
            nonlocal made
            made += 1
            if made == moment:
                os.killpg(0, signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    function()
    if counter is not None:
        counter.write_text(str(made))


def partial_files(out: Path, expected: dict[str, str]) -> list[str]:
    """Shards, and what lies beside them, that are not what they should be."""
    found = contents(out)
    bad = []
    for path in shards_in(out):
        tarfile.open(path).close()
        names = (path.name, f"{path.stem}.parquet", f"{path.stem}.idx")
        bad += [name for name in names if found.get(name) != expected[name]]
    return bad


def at_moments(folder: str, work: Path, seed: int, number: int) -> None:
    """Kill exports, let them go on, and tell how that went."""
    for shuffle in (None, 1):
        out = work / "out"
        template = str(out / "{shard:03d}.tar")
        counter = work / "moments"

        def whole(resume=False, template=template, shuffle=shuffle):
            export(folder, template, shuffle=shuffle, resume=resume)

        assert in_a_child(lambda: dying_at(0, whole, counter))  # noqa: B023
        expected = contents(out)
        shutil.rmtree(out)
        moments = range(1, int(counter.read_text()) + 1)
        if number:
            moments = sorted(random.Random(seed).sample(moments, number))
        for moment in moments:
            ended = in_a_child(lambda: dying_at(moment, whole))  # noqa: B023
            partial = partial_files(out, expected)
            finished = len(list(out.glob("_staging/done-*")))
            resumed = in_a_child(lambda: whole(resume=True))
            told = {
                "shuffle": shuffle,
                "moment": moment,
                "of": len(moments),
                "killed": not ended,
                "partial": partial,
                "finished": finished,
                "resumed": resumed,
                "same": contents(out) == expected,
            }
            print(json.dumps(told), flush=True)
            shutil.rmtree(out)


def on_a_cluster(folder: str, template: str) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        print("ready", *client.run(os.getpid).values(), flush=True)
        export(folder, template)
    print("done", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "moments":
        at_moments(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        on_a_cluster(*sys.argv[2:4])
