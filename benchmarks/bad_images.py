"""Speed under fire: what bad images cost the good ones, as a ratio to the same shards without any.

Good photographs a second, which is stricter than rows: a bad image is no work done. The bad ones
are of nine kinds in equal parts; six are seen before they are decoded, and three by the decoder
alone, where one bad image fails a whole batch. Each share takes its turn in every round.

    python benchmarks/bad_images.py                  # about 2 minutes
    python benchmarks/bad_images.py --images 500 --rounds 1
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from _shards import Sample, photographs, write_shards
from PIL import Image

import dask_image_ingest as dii

SHARES = (0.0, 0.01, 0.1)
GOALS = {0.01: 0.8, 0.1: 0.5}


def html(jpeg: bytes) -> bytes:
    return b"<!DOCTYPE html><html><body>404 Not Found</body></html>"


def empty(jpeg: bytes) -> bytes:
    return b""


def half_download(jpeg: bytes) -> bytes:
    return jpeg[: len(jpeg) // 2]


def bomb(jpeg: bytes) -> bytes:
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + b"\xea\x60" * 2 + jpeg[frame + 9 :]


def unsupported(jpeg: bytes) -> bytes:
    return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + jpeg


def jpeg_with_bad_tables(jpeg: bytes) -> bytes:
    tables = jpeg.index(b"\xff\xc4") + 5
    return jpeg[:tables] + b"\xff" * 16 + jpeg[tables + 16 :]


def png_with_bad_pixels(jpeg: bytes) -> bytes:
    png = saved(jpeg, "PNG")
    return png[: len(png) // 2] + bytes(64) + png[len(png) // 2 + 64 :]


def png_of_another_size(jpeg: bytes) -> bytes:
    """Its checksums are right, and its pixels end too early."""
    png = saved(jpeg, "PNG")
    header = b"IHDR" + png[16:20] + struct.pack(">I", 3000) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


def webp_with_bad_pixels(jpeg: bytes) -> bytes:
    webp = saved(jpeg, "WEBP")
    return webp[:40] + b"\xff" * (len(webp) - 40)


KINDS: tuple[Callable[[bytes], bytes], ...] = (
    html,
    empty,
    half_download,
    bomb,
    unsupported,
    jpeg_with_bad_tables,
    png_with_bad_pixels,
    png_of_another_size,
    webp_with_bad_pixels,
)


def saved(jpeg: bytes, format: str) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg)).save(file, format)
    return file.getvalue()


def with_bad(samples: list[Sample], share: float) -> list[Sample]:
    """The samples, of which this share was replaced; always the same ones."""
    rng = random.Random(6)
    bad = rng.sample(range(len(samples)), round(len(samples) * share))
    spoiled = list(samples)
    for number, place in enumerate(bad):
        kind = KINDS[number % len(KINDS)]
        spoiled[place] = samples[place]._replace(jpeg=kind(samples[place].jpeg))
    return spoiled


def good_images_per_second(paths: list[Path]) -> float:
    started = time.perf_counter()
    frame = dii.read_webdataset_images(paths, backend="pandas").compute(scheduler="synchronous")
    return int(frame["image"].notna().sum()) / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    silence_decoders()
    photos = list(photographs())
    samples = [photos[number % len(photos)] for number in range(args.images)]
    with tempfile.TemporaryDirectory() as folder:
        shards = {
            share: write_shards(Path(folder, str(share)), iter(with_bad(samples, share)), 500)
            for share in SHARES
        }
        speeds: dict[float, list[float]] = {share: [] for share in SHARES}
        for _ in range(args.rounds):
            for share, paths in shards.items():
                # The first read of a turn finds memory that was given back after the turn before.
                speeds[share].append(max(good_images_per_second(paths) for _ in range(3)))
    missed = False
    print(f"{len(os.sched_getaffinity(0))} cores, {args.images:,} images, {args.rounds} rounds")
    for share, measured in speeds.items():
        ratios = [m / clean for m, clean in zip(measured, speeds[0.0], strict=True)]
        ratio, goal = statistics.median(ratios), GOALS.get(share, 0.0)
        missed |= ratio < goal
        print(
            f"{share:4.0%} bad: {statistics.median(measured):6,.0f} good images/s, "
            f"{ratio:.2f} of the clean speed" + (f" (goal {goal})" if goal else "")
        )
    return int(missed)


def silence_decoders() -> None:
    """Their libraries write a line for each bad image, to the process's own standard error."""
    import logging

    logging.disable()
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    sys.exit(main())
