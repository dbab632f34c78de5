"""Reads shards as a peer does, decoded to RGB by Pillow or by itself: `remote.py` compares them.

    python benchmarks/_remote_peers.py NAME JSON

``JSON`` is a list of paths or URLs. Prints seconds and images as a line of JSON.
"""

import json
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


PEERS = {
    "webdataset": webdataset_curl,
    "datasets": hugging_face,
    "daft": daft_frame,
    "fsspec": fsspec_alone,
}


if __name__ == "__main__":
    began = time.perf_counter()
    images = PEERS[sys.argv[1]](json.loads(sys.argv[2]))
    seconds = round(time.perf_counter() - began, 2)
    print(json.dumps({"seconds": seconds, "images": images}))
