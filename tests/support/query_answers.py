"""What random queries are asked of, and whether two answers are the same.

A source is a lazy read and its witness: the same rows in partitions that lie in memory, which take
up no filter and no projection.
"""

from __future__ import annotations

import io
import json
import math
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
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
    """A read, and the same rows as dask and as pandas have them when all is in memory."""

    lazy: Any
    plain: Any
    whole: pd.DataFrame


def sources(folder: Path) -> dict[str, Source]:
    """Reads of the same shards, each with other options."""
    paths = write_shards(folder)

    def read(paths: Any = paths, **options: Any):
        return dii.read_webdataset_images(
            paths, backend="pandas", size=SIZE, json_fields=FIELDS, **options
        )

    # Partitions read one by one, of which nothing is asked: there is nothing to take up.
    parts = partitions(read())
    filters = [[("width", ">", 12), ("cls", "<=", 2)], [("txt", "==", "cat")]]
    columns = ["__key__", "image", "width", "txt", "__url__", "offset", "nbytes"]
    return {
        "whole": source(read(), parts),
        "split": source(split := read(partition_size=4 * SIZE * SIZE * 3), partitions(split)),
        "dropped": source(read(errors="drop"), [part[part["error"].isna()] for part in parts]),
        "narrow": source(
            read(columns=columns, filters=filters), [part[kept(part)][columns] for part in parts]
        ),
        "single": source(read(paths[0]), parts[:1]),
        "own size": source(
            full := dii.read_webdataset_images(paths, backend="pandas", json_fields=FIELDS),
            partitions(full),
        ),
    }


def kept(part: pd.DataFrame) -> pd.Series:
    """The filters of the narrow read, as pandas judges them."""
    wide = (part["width"] > 12) & (part["cls"] <= 2)
    return wide.fillna(False).astype(bool) | (part["txt"] == "cat").fillna(False).astype(bool)


def source(lazy: Any, parts: list[pd.DataFrame]) -> Source:
    """A read with the partitions it should have."""
    with dask.config.set({"dataframe.convert-string": False}):  # the strings are Arrow's already
        plain = dd.from_map(_itself, parts, meta=parts[0].iloc[:0])
    return Source(lazy, plain, pd.concat(parts))


def partitions(ddf: Any) -> list[pd.DataFrame]:
    """Each partition, computed by itself."""
    return [ddf.get_partition(n).compute(scheduler="sync") for n in range(ddf.npartitions)]


def _itself(part: pd.DataFrame) -> pd.DataFrame:
    return part


def write_shards(folder: Path) -> list[Path]:
    """Shards of tiny images with gaps: missing members, bad images, one shard with nothing."""
    rng = random.Random(11)
    paths = []
    number = 0
    for shard, samples in enumerate(SAMPLES_OF_SHARDS):
        members: dict[str, bytes] = {}
        for _ in range(samples):
            key = f"{number:04d}"
            # The first sample has all members, so that every column is known.
            for extension, data in _members(rng, number, gaps=number > 0).items():
                members[f"{key}.{extension}"] = data
            number += 1
        path = folder / f"{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
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


def answer(value: Any) -> Any:
    """What a user sees of a result, in plain Python: values, labels, names, dtypes, pixels."""
    if isinstance(value, pd.DataFrame):
        columns = [values(value.iloc[:, place]) for place in range(value.shape[1])]
        dtypes = [str(dtype) for dtype in value.dtypes]
        return "frame", list(value.columns), dtypes, columns, answer(value.index)
    if isinstance(value, pd.Series):
        return "series", value.name, str(value.dtype), values(value), answer(value.index)
    if isinstance(value, pd.Index):
        return "index", value.name, str(value.dtype), [scalar(item) for item in value]
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, [scalar(item) for item in value.ravel()]
    if isinstance(value, (list, tuple)):
        return [answer(item) for item in value]
    return scalar(value)


def values(series: pd.Series) -> list:
    """The values of a column; pixels as bytes."""
    if str(series.dtype) == "image":
        arrays = pd.DataFrame({"image": series}).images.arrays()
        return [None if image is None else [*image.shape, *image.ravel()] for image in arrays]
    return [scalar(item) for item in series.array]


def scalar(value: Any) -> Any:
    """A value that equals itself: nulls are None, NaN is a word."""
    if isinstance(value, (list, np.ndarray)):
        return [scalar(item) for item in value]
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value


def outcome(ask: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The answer, or the error in its place."""
    try:
        return answer(ask()), None
    except Exception as error:
        return None, error


def difference(got: Any, want: Any, place: str = "") -> tuple[str, Any, Any]:
    """Where two answers differ first, and what stands there."""
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)) and len(got) == len(want):
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            if one != other:
                return difference(one, other, f"{place}[{number}]")
    return place, got, want
