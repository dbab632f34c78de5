"""Shards of a few images whose sizes and faults are known by heart."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from tars import tar

# Key of a JPEG in the first good shard -> its width and height.
SIZES = {"000": (40, 30), "001": (64, 48), "002": (100, 20), "003": (8, 8), "004": (500, 375)}


def encoded(size: tuple[int, int], format: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(file, format)
    return file.getvalue()


def write_good_shards(folder: Path) -> Path:
    """Two shards: 5 JPEG with captions, 1 PNG."""
    members = {}
    for key, size in SIZES.items():
        members[f"{key}.jpg"] = encoded(size, "JPEG")
        members[f"{key}.txt"] = f"caption of {key}".encode()
    (folder / "a-0.tar").write_bytes(tar(members))
    square = {"100.png": encoded((10, 10), "PNG"), "100.txt": b"a square"}
    (folder / "a-1.tar").write_bytes(tar(square))
    return folder


def write_bad_shard(folder: Path) -> Path:
    """One shard: a good image, one with an unreadable header, one cut in the middle of its data."""
    whole = encoded((64, 48), "JPEG")
    members = {"0.jpg": whole, "1.jpg": b"no image at all", "2.jpg": whole[: len(whole) * 2 // 3]}
    shard = folder / "bad.tar"
    shard.write_bytes(tar(members))
    return shard
