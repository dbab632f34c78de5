"""Mutated images through real worker processes: what no image may do, whatever is in it.

``python tests/support/fuzz.py`` is the long run, and ``test_fuzz.py`` a short one. A round is one
shard, made from its seed alone; what goes wrong is printed with the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from corpus import images
from distributed import Client, LocalCluster
from photo_shards import write_tar

import dask_image_ingest as dii

FORMATS = ("jpeg", "png", "webp", "tiff", "bmp", "gif", "avif", "jp2", "j2k", "pnm", "ico", "qoi")
MUTANTS, NEIGHBOURS = 90, 30
# A mutant that claims more is an error row; this keeps the run short, not safe.
MAX_PIXELS = 1 << 22
# Seconds that a shard may take before it is said to hang.
PATIENCE = 300

_EXTREMES = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
)


@dataclass
class Findings:
    """What became of the mutants; ``failures`` name the seed of the shard."""

    mutants: int = 0
    decoded: int = 0
    neighbours: int = 0
    errors: Counter = field(default_factory=Counter)
    by_format: Counter = field(default_factory=Counter)
    deaths: int = 0
    failures: list[str] = field(default_factory=list)


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """``data`` after one to three accidents."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(_ACCIDENTS)(rng, mutant, other)
    if mutant.startswith(b"\x89PNG") and rng.random() < 0.5:
        return with_right_checksums(bytes(mutant))
    return bytes(mutant)


def _truncate(rng, mutant, other):
    del mutant[rng.randrange(len(mutant) + 1) :]


def _flip_bits(rng, mutant, other):
    for _ in range(rng.choice((1, 2, 10, 50)) if mutant else 0):
        mutant[rng.randrange(len(mutant))] ^= 1 << rng.randrange(8)


def _edit_header(rng, mutant, other):
    for _ in range(rng.randrange(1, 6) if mutant else 0):
        mutant[rng.randrange(min(len(mutant), 128))] = rng.randrange(256)


def _put_extreme(rng, mutant, other):
    at = rng.randrange(min(len(mutant), rng.choice((64, 1024, 1 << 30))) + 1)
    extreme = rng.choice(_EXTREMES)
    mutant[at : at + len(extreme)] = extreme


def _cut_out(rng, mutant, other):
    at = rng.randrange(len(mutant) + 1)
    del mutant[at : at + rng.choice((1, 2, 16, 500))]


def _repeat(rng, mutant, other):
    at = rng.randrange(len(mutant) + 1)
    part = mutant[at : at + rng.choice((2, 16, 500))]
    mutant[at:at] = part * rng.choice((1, 1, 20))


def _insert(rng, mutant, other):
    at = rng.randrange(len(mutant) + 1)
    mutant[at:at] = rng.randbytes(rng.choice((1, 2, 16, 500)))


def _zero(rng, mutant, other):
    at = rng.randrange(len(mutant) + 1)
    mutant[at : at + 64] = bytes(len(mutant[at : at + 64]))


def _splice(rng, mutant, other):
    mutant[rng.randrange(len(mutant) + 1) :] = other[rng.randrange(len(other)) :]


_ACCIDENTS = (
    _truncate,
    _flip_bits,
    _flip_bits,
    _edit_header,
    _put_extreme,
    _cut_out,
    _repeat,
    _insert,
    _zero,
    _splice,
)


def with_right_checksums(png: bytes) -> bytes:
    """A PNG whose chunks are believed, so that what is in them is looked at."""
    fixed, at = bytearray(png), 8
    while at + 12 <= len(fixed):
        (size,) = struct.unpack_from(">I", fixed, at)
        if at + 12 + size > len(fixed):
            break
        struct.pack_into(">I", fixed, at + 8 + size, zlib.crc32(fixed[at + 4 : at + 8 + size]))
        at += 12 + size
    return bytes(fixed)


def make_shard(path: Path, seed: int) -> dict[str, str]:
    """Write a shard of mutants with good neighbours among them; key → name of the original."""
    rng = random.Random(seed)
    originals = images()
    by_format = [[n for n in originals if n.startswith(f"{f}-")] for f in FORMATS]
    sound = [name for name in originals if name.split("-")[0] in ("jpeg", "png", "webp")]
    members, names = {}, {}
    for number in range(MUTANTS + NEIGHBOURS):
        if number % ((MUTANTS + NEIGHBOURS) // NEIGHBOURS) == 1:
            key, name = f"good-{number:03}", rng.choice(sound)
            data = originals[name]
        else:
            # Half of them of the formats that DALI gets.
            group = rng.choice(by_format[: rng.choice((3, len(by_format)))])
            key, name = f"mutant-{number:03}", rng.choice(group)
            data = mutate(rng, originals[name], originals[rng.choice(group)])
        members[f"{key}.img"] = data
        names[key] = name
    write_tar(path, members)
    return names


def read(paths):
    return dii.read_webdataset_images(paths, backend="pandas", max_pixels=MAX_PIXELS)


def judge(frame: pd.DataFrame, names: dict[str, str], expected, found: Findings, seed: int) -> None:
    """Count what became of a shard's images, and note what should not have."""
    if frame["__key__"].tolist() != list(names):
        found.failures.append(f"seed {seed}: rows are lost")
        return
    codes = frame["error"].str.partition(":")[0]
    for key, code, image in zip(names, codes, frame.images.arrays(), strict=True):
        has_error = not pd.isna(code)
        if has_error == (image is not None):
            found.failures.append(f"seed {seed}: {key} has both an image and an error, or neither")
        if key.startswith("good"):
            found.neighbours += 1
            if image is None or not np.array_equal(image, expected[names[key]]):
                found.failures.append(f"seed {seed}: {key}, {names[key]}, was touched: {code}")
            continue
        found.mutants += 1
        found.by_format[names[key].split("-")[0]] += 1
        if has_error:
            found.errors[code] += 1
        else:
            found.decoded += 1


def fuzz(client: Client, folder: Path, first_seed: int, shards: int, report=print) -> Findings:
    """Send shards through the workers of ``client``."""
    found = Findings()
    sound = {f"{name}.img": data for name, data in images().items()}
    clean = write_tar(folder / "clean.tar", sound)
    frame = read(clean).compute(scheduler=client)
    expected = dict(zip(frame["__key__"], frame.images.arrays(), strict=True))
    at_once = 8
    for start in range(first_seed, first_seed + shards, at_once):
        seeds = range(start, min(start + at_once, first_seed + shards))
        paths = [folder / f"{seed}.tar" for seed in seeds]
        names = [make_shard(path, seed) for path, seed in zip(paths, seeds, strict=True)]
        futures = [client.compute(read(path)) for path in paths]
        for seed, path, named, future in zip(seeds, paths, names, futures, strict=True):
            try:
                judge(future.result(timeout=PATIENCE), named, expected, found, seed)
            except Exception as error:
                found.failures.append(f"seed {seed}: {type(error).__name__}: {error}")
            path.unlink()
        report(f"seeds {seeds[0]}-{seeds[-1]}: {found.mutants:,} mutants so far", flush=True)
    found.deaths = client.run_on_scheduler(worker_deaths)
    if found.deaths:
        found.failures.append(f"{found.deaths} workers died")
    return found


def worker_deaths(dask_scheduler) -> int:
    """How many workers went without a word."""
    return sum(
        event["action"] == "remove-worker" and not event["expected"]
        for _, event in dask_scheduler.get_events("all")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=20_000, help="mutated images (20000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first shard (0)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    args = parser.parse_args()
    sys.stderr = sys.stdout  # the libraries of the decoders write a line for each bad image
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=args.workers, threads_per_worker=1, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
    ):
        found = fuzz(client, Path(folder), args.seed, -(-args.images // MUTANTS))
    print(
        f"{found.mutants:,} mutants of {dict(found.by_format.most_common())}\n"
        f"{found.decoded:,} gave pixels, the others {dict(found.errors.most_common())}\n"
        f"{found.neighbours:,} good neighbours, {found.deaths} dead workers, "
        f"{time.monotonic() - started:.0f} s"
    )
    for failure in found.failures:
        print(failure)
    return bool(found.failures)


if __name__ == "__main__":
    sys.exit(main())
