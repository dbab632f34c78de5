"""Cost of building and asking a collection with indexes, no shard being opened.

    python benchmarks/index.py [--shards 1000] [--samples 10000] [--rounds 3]

Makes the indexes of shards that have nothing in them: whoever opened one would find no sample. The
samples have an image, a caption and a JSON of 300 bytes. The questions are asked in turn of workers
that have begun, round by round. One line of JSON for each: seconds, processor time of this process
and its workers, the answer.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.index.discovery import index_place
from dask_image_ingest.index.index_file import ShardFacts
from dask_image_ingest.index.write_index import index_bytes, shard_rows
from dask_image_ingest.storage import as_reader, find_shards
from dask_image_ingest.tar import index_tar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/index"))
    args = parser.parse_args()
    folder = args.folder / f"{args.shards}x{args.samples}"
    if not (folder / "whole").exists():
        make_indexes(folder, args.shards, args.samples)
    paths = f"{folder}/*.tar"
    with dii.start_cluster() as client:
        client.run(os.getpid)
        for number in range(args.rounds):
            for name, question in QUESTIONS.items():
                print(
                    json.dumps({"round": number} | timed(name, question, paths, client)), flush=True
                )


def build(paths: str) -> Any:
    return dii.read_webdataset_images(paths, backend="pandas", partition_size=None)


def wide(paths: str) -> Any:
    ddf = build(paths)
    return ddf[(ddf.width >= 1000) & (ddf.format == "jpeg")]


def pointers(paths: str) -> Any:
    ddf = build(paths)
    return ddf[ddf.width >= 1014][["__url__", "offset", "nbytes"]]


def joined(paths: str) -> Any:
    wanted = pd.DataFrame({"__key__": [f"{n % 100:05d}/{n:05d}" for n in range(1000)]})
    return build(paths)[["__key__", "__url__", "offset", "nbytes"]].merge(wanted, on="__key__")


def captioned(paths: str) -> Any:
    ddf = build(paths)
    return ddf[ddf.txt.str.contains("0777")][["__key__", "txt"]]


QUESTIONS = {
    "build": lambda paths: build(paths).npartitions,
    "len": lambda paths: len(build(paths)),
    "width and format": lambda paths: len(wide(paths)),
    "pointers of 1 %": lambda paths: len(pointers(paths).compute()),
    "join of 1,000 keys": lambda paths: len(joined(paths)),
    "captions with a word": lambda paths: len(captioned(paths)),
}


def timed(name: str, question: Any, paths: str, client: Any) -> dict[str, Any]:
    workers = [psutil.Process(pid) for pid in {os.getpid(), *client.run(os.getpid).values()}]
    before, began = spent(workers), time.perf_counter()
    answer = question(paths)
    seconds, processor = time.perf_counter() - began, spent(workers) - before
    told = {"seconds": round(seconds, 2), "processor": round(processor, 2)}
    return {"question": name} | told | {"answer": answer}


def spent(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def make_indexes(folder: Path, shards: int, samples: int) -> None:
    """The indexes of shards that differ in their keys, sizes and places."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, facts = one_shard(folder, samples)
    rng = np.random.default_rng(0)
    for number in range(shards):
        path = folder / f"{number:05d}.tar"
        path.write_bytes(bytes(10_240))
        (shard,) = find_shards(path)
        columns = {
            "__key__": pa.array([f"{number:05d}/{row:05d}" for row in range(samples)]),
            "jpg/offset": pa.array(np.sort(rng.integers(0, 2**30, samples))),
            "jpg/size": pa.array(rng.integers(20_000, 200_000, samples)),
            "jpg/width": pa.array(rng.integers(64, 1024, samples)),
            "jpg/height": pa.array(rng.integers(64, 1024, samples)),
        }
        made = rows
        for name, values in columns.items():
            made = made.set_column(made.column_names.index(name), name, values)
        changed = replace(facts, size=shard.size, version=shard.version)
        Path(index_place(shard.url, None)).write_bytes(index_bytes(made, changed))
    (folder / "whole").touch()


def one_shard(folder: Path, samples: int) -> tuple[pa.Table, ShardFacts]:
    """The rows and facts of a real shard."""
    import tarfile

    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "JPEG")
    path = folder / "one.tar"
    with tarfile.open(path, "w") as archive:
        for row in range(samples):
            record = {"url": f"https://example.org/{row}", "pad": "x" * 250, "similarity": row / 7}
            contents = {"jpg": file.getvalue(), "txt": b"picture %05d of many" % row}
            contents["json"] = json.dumps(record).encode()
            for extension, content in contents.items():
                info = tarfile.TarInfo(f"{row:05d}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    (shard,) = find_shards(path)
    content = path.read_bytes()
    path.unlink()
    return shard_rows(shard, as_reader(content), index_tar(content))


if __name__ == "__main__":
    main()
