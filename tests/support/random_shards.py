"""Shards with all that a collection may hold: images of all kinds, good and bad, in odd tars."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tarfile
from pathlib import Path

from corpus import bad_images, images
from tars import COMPRESSIONS, FORMATS, add, header, padded

STEMS = ("k", "key-1", "000001", "ключ", "a b", "K", "n" * 80, "w.x/000002", "long folder/" * 12)
IMAGES = ("jpg", "jpg", "jpg", "png", "JPEG", "seg.png", "webp")
OTHERS = ("txt", "json", "cls", "npy", "caption", "É", "", "seg.npy")


def random_shards(folder: Path, seed: int) -> list[str]:
    """A few shards, which differ in what they hold."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(rng.randrange(1, 4)):
        suffix = rng.choice(["", "", "", *COMPRESSIONS])
        path = folder / f"{number:03d}.tar{suffix}"
        path.write_bytes(COMPRESSIONS[suffix](random_shard(rng)))
        paths.append(str(path))
    return paths


def random_shard(rng: random.Random) -> bytes:
    """A shard, now and then an empty or a damaged one."""
    if rng.random() < 0.08:
        return bytes(10240)
    tidy = rng.random() < 0.4
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[rng.choice(list(FORMATS))]) as archive:
        names: list[str] = []
        for number in range(rng.randrange(1, 25)):
            stem = f"{number:05d}" if tidy else rng.choice(STEMS) + rng.choice(["", str(number)])
            time = 1.25 if rng.random() < 0.5 and tidy else 0
            for extension in _extensions(rng, tidy):
                with contextlib.suppress(ValueError):  # ustar has no room for all names
                    add(archive, f"{stem}.{extension}", _content(rng, extension), mtime=time)
                    names.append(f"{stem}.{extension}")
            if not tidy and names and rng.random() < 0.1:
                kind = rng.choice(IMAGES + OTHERS)
                with contextlib.suppress(ValueError):
                    linked = {"type": tarfile.LNKTYPE, "linkname": rng.choice(names)}
                    add(archive, f"link {number}.{kind}", **linked)
            if not tidy and rng.random() < 0.1:
                add(archive, "folder", type=tarfile.DIRTYPE)
    shard = out.getvalue()
    if not tidy and rng.random() < 0.2:
        shard = sparse_member("s.jpg", images()["jpeg-420"]) + shard
    damage = rng.random()
    if damage < 0.1:
        return shard[: rng.randrange(512, len(shard))] if len(shard) > 1024 else shard
    if damage < 0.15:
        return shard + shard
    return shard.rstrip(b"\0") and padded(shard.rstrip(b"\0")) if damage < 0.2 else shard


def sparse_member(name: str, content: bytes) -> bytes:
    """A member in the old format of GNU, whose last block is the only one that is stored."""
    kept = len(content) // 2
    content = bytes(kept) + content[kept:]
    block = bytearray(header(name.encode(), b"%011o\0" % (len(content) - kept), b"S"))
    block[257:265] = b"ustar  \0"
    block[386:410] = b"%011o\0%011o\0" % (kept, len(content) - kept)
    block[483:495] = b"%011o\0" % len(content)
    summed = sum(block[:148]) + 8 * 32 + sum(block[156:])
    block[148:156] = b"%06o\0 " % summed
    return bytes(block) + padded(content[kept:])


def _extensions(rng: random.Random, tidy: bool) -> list[str]:
    if tidy:
        return ["jpg", "txt", "json"]
    chosen = rng.sample(IMAGES, rng.randrange(3)) + rng.sample(OTHERS, rng.randrange(4))
    if rng.random() < 0.1 and chosen:
        chosen.append(rng.choice(chosen))
    return chosen


def _content(rng: random.Random, extension: str) -> bytes:
    if extension in ("txt", "caption", "É", ""):
        return (
            rng.choice(["", "a cat", "ein Häuschen", "long " * 20_000]).encode()
            + b"\xff"[: rng.random() < 0.05]
        )
    if extension == "json":
        record = {"similarity": rng.random(), "n": rng.randrange(9), "deep": {"er": "x"}}
        return rng.choice([json.dumps(record).encode()] * 5 + [b"{", b"", b"[1]"])
    if extension == "cls":
        return str(
            rng.choice([0, 7, -3, "no", 2**70, "1.5"] if rng.random() < 0.1 else [3])
        ).encode()
    if extension.endswith("npy"):
        return rng.randbytes(rng.randrange(3000))
    if rng.random() < 0.2:
        return rng.choice([content for content, _ in bad_images().values()])
    return rng.choice(list(images().values()))
