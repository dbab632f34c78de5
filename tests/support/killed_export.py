"""An export in a process of its own, that dies with all its children at a chosen moment.

    python tests/support/killed_export.py FOLDER TEMPLATE MOMENT [OPTIONS AS JSON]

The moment counts calls that change a disk: the process kills its group just before the MOMENT-th of
them; 0 lets it live.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import dask
from distributed import Client, LocalCluster

import dask_image_ingest as dii

# What an export calls to change what is on a disk.
CALLS = ("pwritev", "replace", "link", "unlink", "fsync", "truncate", "rmdir")


def die_at(moment: int) -> None:
    """Count the calls of this process, and die with its group at one of them."""
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


def export(folder: str, template: str, options: dict) -> None:
    frame = dii.read_webdataset_images(folder, backend="pandas")
    frame = frame[frame.width > 100].assign(score=frame["cls"] * 2)
    dii.to_webdataset(frame, template, samples_per_shard=4, index=True, **options)


def main() -> None:
    folder, template, moment, *more = sys.argv[1:]
    options = json.loads(more[0]) if more else {}
    workers = options.pop("workers", 0)
    if workers:
        with (
            LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=":0"
            ) as cluster,
            Client(cluster),
        ):
            print(
                "ready", *(w["pid"] for w in cluster.scheduler_info["workers"].values()), flush=True
            )
            export(folder, template, options)
    else:
        print("ready", flush=True)
        die_at(int(moment))
        with dask.config.set(scheduler="synchronous"):
            export(folder, template, options)
    print("done", flush=True)


if __name__ == "__main__":
    main()
