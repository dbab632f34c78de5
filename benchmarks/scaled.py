"""scaled_decode=True: how much faster small pictures come from big JPEGs, and how like the others.

Photographs of which an eighth, a quarter and a half is decoded, and some that are decoded in full,
read to 224 × 224. The two ways take turns in this process, whose processor time counts: on a busy
machine too. PSNR is that of each picture to the one that was decoded in full.

    python benchmarks/scaled.py
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from _shards import PHOTOGRAPHS, Sample, as_jpeg, open_photograph, write_shards
from PIL import Image

from dask_image_ingest import read_webdataset_images

SIZE = 224
KINDS = {
    "12 MP: ⅛": ((4000, 3000), 14, 42),
    "3 MP: ¼": ((2010, 1507), 28, 140),
    "1 MP: ½": ((1156, 867), 70, 280),
    "0.2 MP: in full": ((500, 375), 70, 700),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each way (default 5)")
    arguments = parser.parse_args()
    print(f"To {SIZE} × {SIZE} on {len(os.sched_getaffinity(0))} cores\n")
    print("| photographs | faster by | full, ms | scaled, ms | PSNR: median | lowest |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind, (shape, distinct, images) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            samples = photographs(shape, distinct)
            repeated = (samples[number % distinct] for number in range(images))
            paths = write_shards(Path(folder), repeated, images // 2)
            full, scaled, likeness = measure(list(map(str, paths)), images, arguments.repeats)
        print(
            f"| {kind} | {full / scaled:.2f} × | {full:.2f} | {scaled:.2f} | "
            f"{statistics.median(likeness):.1f} dB | {min(likeness):.1f} dB |"
        )


def measure(paths: list[str], images: int, repeats: int) -> tuple[float, float, list[float]]:
    """Processor time of an image in ms, both ways, and each picture's PSNR."""
    ways = [
        read_webdataset_images(paths, backend="pandas", size=SIZE, scaled_decode=scaled)
        for scaled in (False, True)
    ]
    full, scaled = (way.compute(scheduler="synchronous").images.arrays() for way in ways)
    likeness = [psnr(a, b) for a, b in zip(scaled, full, strict=True)]
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for way, found in zip(ways, times, strict=True):
            start = time.process_time()
            way.compute(scheduler="synchronous")
            found.append((time.process_time() - start) * 1000 / images)
    return statistics.median(times[0]), statistics.median(times[1]), likeness


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def photographs(shape: tuple[int, int], distinct: int) -> list[Sample]:
    """Photographs of about this width and height, enlarged with a camera's grain."""
    random = np.random.default_rng(3)
    samples = []
    for number in range(distinct):
        name = PHOTOGRAPHS[number % len(PHOTOGRAPHS)]
        picture = open_photograph(name, shape).crop((0, 0, *shape))
        if number // len(PHOTOGRAPHS) % 2:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        grain = random.integers(-6, 7, (shape[1], shape[0], 1), np.int16)
        pixels = np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8)
        samples.append(Sample(as_jpeg(Image.fromarray(pixels), 90), name, 0))
    return samples


if __name__ == "__main__":
    main()
