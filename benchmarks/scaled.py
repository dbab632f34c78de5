"""scaled_decode=True: how much faster small pictures come from big JPEGs, and how like the others.

Photographs of which an eighth, a quarter and a half is decoded, and some that are decoded in full,
read to 224 × 224. The two ways take turns in this process, whose processor time counts: on a busy
machine too. PSNR is that of each picture to the one that was decoded in full.

    python benchmarks/scaled.py

With --curate: what a decode at a half and a quarter changes in signals and hashes, and what it
saves. Besides the enlarged photographs it takes those of the shards, as they are and side by side
as one large picture, which has detail as fine as its pixels.

    python benchmarks/scaled.py --curate --shards train-000000.tar train-000001.tar
"""

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import _checkout  # noqa: F401
import numpy as np
import pandas as pd
from _shards import (
    PHOTOGRAPHS,
    Sample,
    as_jpeg,
    from_tars,
    open_photograph,
    write_shards,
)
from _shards import photographs as cuttings
from curate import CHANGES, changed
from PIL import Image, ImageOps

from dask_image_ingest import read_webdataset_images
from dask_image_ingest.curate import compute_fingerprints, find_issues
from dask_image_ingest.curate.fingerprints import pdq
from dask_image_ingest.curate.quality import PIXEL_SIGNALS, pixel_signals
from dask_image_ingest.decode.pillow import decode_reduced

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
    parser.add_argument("--curate", action="store_true", help="signals and hashes instead")
    parser.add_argument("--shards", nargs="*", default=(), help="default: photographs made here")
    arguments = parser.parse_args()
    if arguments.curate:
        samples = list(from_tars(arguments.shards) if arguments.shards else cuttings())
        for kind, of_kind in pictures(samples).items():
            tell_changes(kind, [sample.jpeg for sample in of_kind])
            tell_times(kind, of_kind, arguments.repeats)
        return
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


def pictures(samples: list[Sample]) -> dict[str, list[Sample]]:
    """JPEGs by what they are: as they are, the large ones of these, made from these, enlarged."""
    sides = [max(Image.open(io.BytesIO(sample.jpeg)).size) for sample in samples]
    return {
        "as they are": samples,
        "of these above 1,024": [s for s, side in zip(samples, sides, strict=True) if side > 1024],
        "3 MP, side by side": [side_by_side(samples, 4, number) for number in range(20)],
        "12 MP, side by side": [side_by_side(samples, 8, number) for number in range(10)],
        "1 MP, enlarged": photographs((1156, 867), 28),
        "3 MP, enlarged": photographs((2010, 1507), 28),
        "12 MP, enlarged": photographs((4000, 3000), 14),
    }


def side_by_side(samples: list[Sample], across: int, number: int) -> Sample:
    """A picture of ``across`` × ``across`` photographs, 500 × 375 each."""
    picture = Image.new("RGB", (500 * across, 375 * across))
    for place in range(across**2):
        sample = samples[(number * across**2 + place) * 7 % len(samples)]
        photograph = Image.open(io.BytesIO(sample.jpeg)).convert("RGB")
        corner = place % across * 500, place // across * 375
        picture.paste(ImageOps.fit(photograph, (500, 375)), corner)
    return Sample(as_jpeg(picture, 90), "", 0)


def hash_of(pixels: np.ndarray) -> np.ndarray:
    """PDQ as 256 bits."""
    (hashes,), _ = pdq([pixels[None]], np)
    return np.unpackbits(hashes[0])


def decoded(jpeg: bytes, factor: int) -> np.ndarray:
    return decode_reduced(jpeg, "RGB", factor)


def tell_changes(kind: str, jpegs: list[bytes]) -> None:
    """Print how far hashes, signals and verdicts move at a half and at a quarter."""
    in_full = [decoded(jpeg, 1) for jpeg in jpegs]
    hashes, signals = np.stack([hash_of(image) for image in in_full]), signals_of(in_full)
    # Each photograph beside its changed copies, and beside all others.
    copies = [
        [new.jpeg for new in changed(Sample(jpeg, "", 0), CHANGES)] for jpeg in jpegs[1::2][:50]
    ]
    of_copies = {f: [[hash_of(decoded(c, f)) for c in of] for of in copies] for f in (1, 2, 4)}
    for factor in (2, 4):
        reduced = [decoded(jpeg, factor) for jpeg in jpegs]
        changed_hashes, changed_signals = np.stack([*map(hash_of, reduced)]), signals_of(reduced)
        bits = (hashes != changed_hashes).sum(axis=1)
        print(
            f"{kind}, {len(jpegs)} at 1/{factor}: PDQ {np.median(bits):.0f} bits, "
            f"99 % {np.percentile(bits, 99):.0f}, at most {bits.max()}"
        )
        moved = (signals - changed_signals).abs()
        for name in PIXEL_SIGNALS:
            values = moved[f"quality.{name}"]
            print(f"    {name:24} {values.median():10.3f} at most {values.max():10.3f}")
        issues = [find_issues(table).filter(like="issue.") for table in (signals, changed_signals)]
        flips = (issues[0] != issues[1]).mean()
        print("    verdicts that flip:", ", ".join(f"{n} {flips[n]:.3f}" for n in flips.index))
        are_near = [
            np.array(
                [
                    [(h != originals[row]).sum() <= 24 for h in of]
                    for row, of in zip(range(1, len(jpegs), 2), of_copies[f], strict=False)
                ]
            )
            for f, originals in ((1, hashes), (factor, changed_hashes))
        ]
        flips = (are_near[0] != are_near[1]).mean()
        print(f"    pairs with a copy that flip at 24 bits: {flips:.4f}")


def signals_of(images: list[np.ndarray]) -> pd.DataFrame:
    rows = [pixel_signals([image[None]], np) for image in images]
    table = pd.DataFrame([{name: float(of[name][0]) for name in PIXEL_SIGNALS} for of in rows])
    return table.add_prefix("quality.")


def tell_times(kind: str, samples: list[Sample], repeats: int) -> None:
    """Print processor times of an image, each the least of some."""
    jpegs = [sample.jpeg for sample in samples]
    jpegs = [jpegs[number % len(jpegs)] for number in range(min(len(jpegs), 50))]
    issues = [name for name in PIXEL_SIGNALS if name not in ("blur", "fine_detail")]
    uses: dict[str, Callable[[np.ndarray], object]] = {
        "decode": len,
        "PDQ": lambda image: pdq([image[None]], np),
        "blur": lambda image: pixel_signals([image[None]], np, ["blur"]),
        "PDQ, blur": lambda image: (
            pdq([image[None]], np),
            pixel_signals([image[None]], np, ["blur"]),
        ),
        "find_issues": lambda image: pixel_signals([image[None]], np, issues),
        "all": lambda image: (pdq([image[None]], np), pixel_signals([image[None]], np)),
    }
    for name, use in uses.items():
        times = [
            least(lambda u=use, f=factor: [u(decoded(jpeg, f)) for jpeg in jpegs], repeats)
            for factor in (1, 2, 4)
        ]
        shown = ", ".join(f"{1000 * seconds / len(jpegs):.2f}" for seconds in times)
        print(f"    {name:24} {shown} ms in full, at 1/2 and at 1/4")
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), islice(samples, 50), 50)
        reads = {
            "read in full": {},
            "size=512, stretched": {"size": 512, "resize": "stretch"},
            "... scaled_decode=True": {"size": 512, "resize": "stretch", "scaled_decode": True},
        }
        hashes = {}
        for name, options in reads.items():
            ddf = read_webdataset_images(list(map(str, paths)), backend="pandas", **options)
            query = compute_fingerprints(ddf, ["pdq", "thumbnail"]).drop(columns="image")
            found = query.compute(scheduler="synchronous")["fingerprint.pdq"]
            hashes[name] = np.stack(
                [np.unpackbits(np.frombuffer(bytes.fromhex(h), np.uint8)) for h in found]
            )
            seconds = least(lambda q=query: q.compute(scheduler="synchronous"), repeats)
            bits = (hashes[name] != hashes["read in full"]).sum(axis=1)
            print(
                f"    PDQ, {name:24} {1000 * seconds / len(found):.2f} ms, {np.median(bits):.0f} "
                f"bits, at most {bits.max()}",
                flush=True,
            )


def least(function: Callable[[], object], repeats: int) -> float:
    """The least processor time of some calls, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
