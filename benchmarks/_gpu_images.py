"""Photographs of several sizes, in shards, some of them bad: what the GPU benchmark reads."""

import io
import multiprocessing
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image


class Kind(NamedTuple):
    """A kind of photograph, and how many of it a run reads."""

    name: str
    height: int
    width: int
    shards: int
    per_shard: int
    distinct: int


# Decoded, each set is 9 to 18 GB: it fits a large GPU several times and takes DALI some seconds. A
# shard has several batches of each partition, so that what is not decoding overlaps with it.
KINDS = (
    Kind("0.2 MP", 375, 500, 8, 2048, 64),
    Kind("1 MP", 866, 1155, 2, 2048, 16),
    Kind("12 MP", 3000, 4000, 2, 256, 4),
    Kind("mixed", 0, 0, 1, 2048, 24),
)

# Of the mixed kind: height and width, from thumbnails to what a camera makes.
_MIXED = ((120, 160), (375, 500), (480, 360), (768, 1024), (1200, 900), (3000, 4000))


def photograph(height: int, width: int, seed: int) -> bytes:
    """A JPEG of about the bytes per pixel that ImageNet's have: large shapes and grain."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (height // 24, width // 24, 3), np.uint8)
    shapes = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    grain = random.normal(0, 10, (height, width)).astype(np.float32)
    # Photographs of many pixels have finer grain for their size: the same noise, smoothed.
    if height * width > 2**22:
        grain = (grain[:, :-1] + grain[:, 1:]) / 2
        grain = np.pad(grain, ((0, 0), (0, 1)), mode="edge")
    pixels = (np.asarray(shapes, np.float32) + grain[..., None]).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=92)
    return file.getvalue()


def make_images(kind: Kind) -> list[bytes]:
    """The distinct images of a kind, of slightly different shapes."""
    if kind.name == "mixed":
        shapes = [(*_MIXED[n % len(_MIXED)], n) for n in range(kind.distinct)]
    else:
        shapes = [
            (kind.height + 8 * (n % 4), kind.width - 8 * (n % 4), n) for n in range(kind.distinct)
        ]
    with multiprocessing.get_context("spawn").Pool(min(kind.distinct, cores())) as pool:
        return pool.starmap(photograph, shapes)


def write_shards(
    kind: Kind, images: list[bytes], folder: Path, corrupt_every: int = 0
) -> list[str]:
    """The images over and over, in shards of the webdataset kind, each with a caption."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(kind.shards):
        path = folder / f"{shard:05d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(shard * kind.per_shard, (shard + 1) * kind.per_shard):
                content = images[number % len(images)]
                if is_corrupt(number, corrupt_every):
                    content = corrupted(content, number // corrupt_every)
                add(tar, f"{number:08d}.jpg", content)
                add(tar, f"{number:08d}.txt", b"a picture")
        paths.append(str(path))
    return paths


def is_corrupt(number: int, corrupt_every: int) -> bool:
    """Whether the sample of this number is a bad one."""
    return bool(corrupt_every) and number % corrupt_every == corrupt_every // 2


def corrupted(content: bytes, turn: int) -> bytes:
    """Cut short, which a header check sees, or damaged inside, which only a decoder sees."""
    if turn % 2:
        return content[: len(content) // 2]
    table = content.index(b"\xff\xc4") + 5
    return content[:table] + b"\xff" * 16 + content[table + 16 :]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file of this content to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def kbytes(images: list[bytes]) -> str:
    """The mean size of some images."""
    return f"{sum(map(len, images)) / len(images) / 1000:,.0f}"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
