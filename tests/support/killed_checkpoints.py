"""Checkpoints that are killed at chosen moments, and go on.

    python killed_checkpoints.py moments FOLDER OUT SEED NUMBER [ENDPOINT]
    python killed_checkpoints.py run FOLDER OUT CALLS [cluster]

The first is as in ``killed_exports.py``. The second makes one checkpoint, on a cluster of two
workers if that is said, to be killed by others; each call of its model is a line in the file CALLS.
The model is a class of the main module, which pickle would know by another name in each process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from typing import Any

import numpy as np
from killed_exports import OutputStore, dying_at, in_a_child
from s3 import s3_options

import dask_image_ingest as dii

FACTOR = 2.0


class Model:
    """Something of every picture; tells how often it was called."""

    def __init__(self, calls: str | None = None) -> None:
        self.calls = calls

    def __call__(self, images: Any) -> dict[str, Any]:
        if self.calls:
            with open(self.calls, "a") as file:
                file.write(f"{len(images)}\n")
        means = np.array([image.mean() for image in images], "float32")
        return {"mean": means, "vector": np.stack([means, means * FACTOR], axis=1)}


def frame(folder: str, calls: str | None = None):
    ddf = dii.read_webdataset_images(folder, backend="pandas", size=16)
    return ddf.images.map_batches(
        Model(calls),
        outputs={"mean": "float32", "vector": "list<float32>"},
        keep_image=True,
    )


def checkpoint(folder: str, out: str, endpoint: str | None = None, calls: str | None = None):
    return dii.checkpoint(frame(folder, calls), out, storage_options=s3_options(endpoint))


def partial_files(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Files under their names that are not what they should be."""
    ours = {name for name in found if not name.startswith(("_staging/", "_lock"))}
    return [name for name in ours if found[name] != expected.get(name)]


def at_moments(folder: str, out: str, seed: int, number: int, endpoint: str | None = None) -> None:
    """Kill checkpoints, let them go on, and tell how that went."""
    remote = endpoint is not None
    count = multiprocessing.Value("q", 0)

    def whole():
        checkpoint(folder, out, endpoint)

    assert in_a_child(lambda: dying_at(0, whole, remote, count))
    expected = OutputStore(out, endpoint).contents()
    moments = list(range(1, count.value + 1))
    for moment in sorted(random.Random(seed).sample(moments, min(number, len(moments)))):
        OutputStore(out, endpoint).clear()
        ended = in_a_child(lambda: dying_at(moment, whole, remote))  # noqa: B023
        found = OutputStore(out, endpoint).contents()
        resumed = in_a_child(whole)
        there = OutputStore(out, endpoint).contents()
        told = {
            "moment": moment,
            "of": len(moments),
            "killed": not ended,
            "partial": partial_files(found, expected),
            "finished": sum(name.endswith(".parquet") for name in found),
            "resumed": resumed,
            "same": there == expected,
        }
        print(json.dumps(told), flush=True)
    OutputStore(out, endpoint).clear()


def run(folder: str, out: str, calls: str, where: str = "here") -> None:
    if where == "here":
        checkpoint(folder, out, calls=calls)
        return
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        print("ready", *client.run(os.getpid).values(), flush=True)
        checkpoint(folder, out, calls=calls)
    print("done", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "moments":
        at_moments(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
    else:
        run(*sys.argv[2:])
