"""Exports that are killed at chosen moments, and go on.

    python killed_exports.py moments FOLDER OUT SEED NUMBER [ENDPOINT]
    python killed_exports.py cluster FOLDER OUT

The first kills exports at NUMBER of all moments, or at each of them for 0; OUT may be on the S3
server at ENDPOINT. A moment is a call that changes what is there: the process dies just before it.
Each export runs in a process that is forked off, so that none pays for the imports. The second runs
one export on a cluster of two workers, to be killed by others.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import dask
import fsspec
from distributed import Client, LocalCluster
from s3 import s3_options

import dask_image_ingest as dii

# What an export calls to change what is on a disk, or on a server.
LOCAL = ("pwritev", "replace", "link", "unlink", "fsync", "truncate", "rmdir", "mkdir")
REMOTE = ("_put_file", "_pipe_file", "_rm", "_cp_file")


def export(folder: str, out: str, endpoint: str | None = None, **options) -> None:
    frame = dii.read_webdataset_images(folder, backend="pandas")
    frame = frame[frame.width > 100]
    frame = frame.assign(score=frame["cls"] * 2)
    options |= {"samples_per_shard": 4, "index": True}
    dii.to_webdataset(
        frame, out + "/{shard:03d}.tar", storage_options=s3_options(endpoint), **options
    )


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


def dying_at(moment: int, function: Callable[[], None], remote: bool, made: Any = None) -> None:
    """Call ``function``, and die with all of the process group just before a moment."""
    made = made or multiprocessing.Value("q", 0)
    if remote:
        import s3fs

        owner: Any = s3fs.S3FileSystem
    else:
        owner = os

    def count():
        made.value += 1
        if made.value == moment:
            os.killpg(0, signal.SIGKILL)

    def counting(call):
        def counted(*args, **kwargs):
            count()
            return call(*args, **kwargs)

        async def counted_remote(*args, **kwargs):
            count()
            return await call(*args, **kwargs)

        return counted_remote if remote else counted

    for name in REMOTE if remote else LOCAL:
        setattr(owner, name, counting(getattr(owner, name)))
    function()


class OutputStore:
    """Where exports go, as an onlooker sees it."""

    def __init__(self, out: str, endpoint: str | None) -> None:
        self.fs, self.root = fsspec.url_to_fs(out, **s3_options(endpoint))

    def contents(self) -> dict[str, str]:
        """A digest of every file, but for the plan, which names the run."""
        self.fs.invalidate_cache()
        return {
            name.removeprefix(self.root + "/"): hashlib.sha256(self.fs.cat_file(name)).hexdigest()
            for name in self.fs.find(self.root)
            if not name.endswith("_plan.json")
        }

    def clear(self) -> None:
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)


def partial_files(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Shards, and what lies beside them, that are not what they should be."""
    stems = [name.removesuffix(".tar") for name in found if name.endswith(".tar")]
    names = [stem + suffix for stem in stems for suffix in (".tar", ".parquet", ".idx")]
    return [name for name in names if found.get(name) != expected[name]]


def at_moments(folder: str, out: str, seed: int, number: int, endpoint: str | None = None) -> None:
    """Kill exports, let them go on, and tell how that went."""
    remote = endpoint is not None
    for shuffle in (None, 1):
        count = multiprocessing.Value("q", 0)

        def whole(shuffle=shuffle, resume=False):
            export(folder, out, endpoint, shuffle=shuffle, resume=resume)

        assert in_a_child(lambda: dying_at(0, whole, remote, count))  # noqa: B023
        expected = OutputStore(out, endpoint).contents()
        moments = list(range(1, count.value + 1))
        for moment in sorted(random.Random(seed).sample(moments, number)) if number else moments:
            OutputStore(out, endpoint).clear()
            ended = in_a_child(lambda: dying_at(moment, whole, remote))  # noqa: B023
            found = OutputStore(out, endpoint).contents()
            resumed = in_a_child(lambda: whole(resume=True))
            told = {
                "shuffle": shuffle,
                "moment": moment,
                "of": len(moments),
                "killed": not ended,
                "partial": partial_files(found, expected),
                "finished": sum("/done-" in name for name in found),
                "resumed": resumed,
                "same": OutputStore(out, endpoint).contents() == expected,
            }
            print(json.dumps(told), flush=True)
        OutputStore(out, endpoint).clear()


def on_a_cluster(folder: str, out: str) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        print("ready", *client.run(os.getpid).values(), flush=True)
        export(folder, out)
    print("done", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "moments":
        at_moments(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
    else:
        on_a_cluster(*sys.argv[2:4])
