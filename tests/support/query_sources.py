"""What random queries are asked of: reads of small shards, and the same rows in memory."""

from __future__ import annotations

import io
import json
import random
import tarfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from PIL import Image

import dask_image_ingest as dii

SIZE = 8
FIELDS = {"score": "float32", "flag": "bool", "name": "string"}
# The empty one is not the first, which tells the columns.
SAMPLES_OF_SHARDS = (6, 1, 0, 9, 4)
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@dataclass(frozen=True)
class Source:
    """A lazy read, and the same rows in memory.

    ``plain`` has them in the same partitions, which take up no filter and no projection; ``whole``
    is one pandas frame.
    """

    lazy: Any
    plain: Any
    whole: pd.DataFrame


def sources(folder: Path) -> dict[str, Source]:
    """Reads of the same shards, each with other options."""
    paths = write_shards(folder)

    def read(paths: Any = paths, size: int | None = SIZE, **options: Any):
        return dii.read_webdataset_images(
            paths, backend="pandas", size=size, json_fields=FIELDS, **options
        )

    # Partitions read one by one, of which nothing is asked: there is nothing to take up.
    parts = partitions(read())
    filters = [[("width", ">", 12), ("cls", "<=", 2)], [("txt", "==", "cat")]]
    columns = ["__key__", "image", "width", "txt", "__url__", "offset", "nbytes"]
    references = dii.read_webdataset_images(
        paths, backend="pandas", json_fields=FIELDS, decode=False
    )
    references.to_parquet(folder / "references")
    later = dii.decode_images(references, size=SIZE)
    # Dask itself joins partitions of parquet files of which few columns are read.
    files = sorted((folder / "references").glob("*.parquet"))
    with dask.config.set({"dataframe.convert-string": False}):
        rows = dd.from_map(lambda file: pd.read_parquet(file).rename_axis(None), files)
    stored = dii.decode_images(rows, size=SIZE)
    decoded_later = [part[list(later.columns)] for part in parts]
    split, own_size = read(partition_size=4 * SIZE * SIZE * 3), read(size=None)
    return {
        "whole": source(read(), parts),
        "split": source(split, partitions(split)),
        "dropped": source(read(errors="drop"), [part[part["error"].isna()] for part in parts]),
        "narrow": source(
            read(columns=columns, filters=filters), [part[kept(part)][columns] for part in parts]
        ),
        "single": source(read(paths[0]), parts[:1]),
        "decoded later": source(later, decoded_later),
        "references in parquet": source(stored, decoded_later),
        "together": source(
            read(shards_per_partition=3), [pd.concat(parts[:3]), pd.concat(parts[3:])]
        ),
        "own size": source(own_size, partitions(own_size)),
    }


def kept(part: pd.DataFrame) -> pd.Series:
    """The filters of the narrow read, as pandas judges them."""
    wide = (part["width"] > 12) & (part["cls"] <= 2)
    return wide.fillna(False).astype(bool) | (part["txt"] == "cat").fillna(False).astype(bool)


@dataclass(frozen=True, eq=False)
class Part:
    """A partition in memory, whose name needs no look at its rows."""

    frame: pd.DataFrame
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __dask_tokenize__(self) -> str:
        return self.token

    def get(self) -> pd.DataFrame:
        return self.frame


def source(lazy: Any, parts: list[pd.DataFrame]) -> Source:
    """A read with the partitions it should have."""
    with dask.config.set({"dataframe.convert-string": False}):  # the strings are Arrow's already
        plain = dd.from_map(Part.get, [Part(part) for part in parts], meta=parts[0].iloc[:0])
    return Source(lazy, plain, pd.concat(parts))


def partitions(ddf: Any) -> list[pd.DataFrame]:
    """Each partition, computed by itself."""
    return [ddf.get_partition(n).compute(scheduler="sync") for n in range(ddf.npartitions)]


def write_shards(folder: Path) -> list[Path]:
    """Shards of tiny images with gaps: missing members, bad images, one shard with nothing."""
    rng = random.Random(11)
    paths = []
    number = 0
    for shard, samples in enumerate(SAMPLES_OF_SHARDS):
        path = folder / f"{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for _ in range(samples):
                # The first sample has all members, so that every column is known.
                for extension, data in _members(rng, number, gaps=number > 0).items():
                    member = tarfile.TarInfo(f"{number:04d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                number += 1
        paths.append(path)
    return paths


def _members(rng: random.Random, number: int, gaps: bool) -> dict[str, bytes]:
    members: dict[str, bytes] = {}

    def there(share: float) -> bool:
        return not gaps or rng.random() < share

    height, width = rng.choice([8, 16, 24]), rng.choice([8, 12, 20, 31])
    extension = rng.choice(["jpg", "jpg", "png", "webp"])
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, _FORMATS[extension])
    image = file.getvalue()
    if not there(0.85):
        image = rng.choice([image[: len(image) // 2], b"<html>"])
    if there(0.9):
        members[extension] = image
    if there(0.8):
        members["txt"] = rng.choice([b"cat", b"dog", b"a cat", b"", "été".encode()])
    if there(0.85):
        members["cls"] = b"%d" % rng.choice([0, 1, 2, 3, 2**53 + 1])
    if there(0.9):
        fields = {
            "score": rng.choice([0.0, 0.25, 0.5, 0.75, -1.5, None]),
            "flag": rng.choice([True, False, None]),
            "name": rng.choice(["x", "y", None]),
        }
        members["json"] = json.dumps({k: v for k, v in fields.items() if there(0.9)}).encode()
    return members
