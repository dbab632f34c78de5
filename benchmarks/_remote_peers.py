"""Reads shards as a peer does: `remote.py` and `scale.py` compare them.

    python benchmarks/_remote_peers.py NAME JSON [QUESTION]

``JSON`` is a list of paths, patterns or URLs. Without a question all images are decoded to RGB, by
Pillow or by the peer itself. Prints seconds and the answer as a line of JSON.
"""

import glob
import json
import os
import sys
import time
from collections.abc import Iterator


def webdataset_curl(paths: list[str]) -> int:
    import webdataset

    remote = paths[0].startswith("http")
    shards = [f"pipe:curl -s {path}" if remote else path for path in paths]
    rows = webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8").to_tuple("jpg", "txt")
    return sum(1 for _ in rows)


def hugging_face(paths: list[str]) -> int:
    import datasets

    rows = datasets.load_dataset(
        "webdataset", data_files={"train": paths}, split="train", streaming=True
    )
    return sum(1 for row in rows if row["jpg"].convert("RGB").size and row["txt"])


def daft_frame(paths: list[str]) -> int:
    import daft

    frame = daft.read_webdataset(paths)
    frame = frame.with_column("jpg", daft.col("jpg").decode_image(mode="RGB"))
    return len(frame.select("jpg", "txt").collect())


def fsspec_alone(paths: list[str]) -> int:
    from PIL import Image

    return sum(len(Image.open(file).convert("RGB").tobytes()) > 0 for file in jpegs(paths))


def jpegs(paths: list[str]) -> Iterator:
    import tarfile

    import fsspec

    for path in paths:
        with fsspec.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    yield tar.extractfile(member)


def ray_labels(paths: list[str]):
    import ray

    ray.init(num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.read_webdataset(paths, suffixes=["cls"], decoder=None)


def daft_labels(paths: list[str]):
    import daft

    return daft.read_webdataset(paths).select("cls")


# Of labels alone: rows, and rows of each.
COUNTS = {
    ("ray", "len"): lambda paths: ray_labels(paths).count(),
    ("ray", "groupby"): lambda paths: ray_labels(paths).groupby("cls").count().count(),
    ("daft", "len"): lambda paths: daft_labels(paths).count_rows(),
    ("daft", "groupby"): lambda paths: len(daft_labels(paths).distinct().collect()),
}

PEERS = {
    "webdataset": webdataset_curl,
    "datasets": hugging_face,
    "daft": daft_frame,
    "fsspec": fsspec_alone,
}


if __name__ == "__main__":
    name, given, *question = sys.argv[1:]
    paths = [path for each in json.loads(given) for path in sorted(glob.glob(each)) or [each]]
    ask = COUNTS[name, *question] if question else PEERS[name]
    began = time.perf_counter()
    answer = ask(paths)
    seconds = round(time.perf_counter() - began, 2)
    print(json.dumps({"seconds": seconds, "count" if question else "images": answer}))
