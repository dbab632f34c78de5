"""Verdicts on millions of fingerprints of variants of pictures, beside those of brute force.

    python benchmarks/hash_variants.py 2000000 photos-*.tar --distance 16 24 31

A picture is a photograph of the shards, or a quarter of one; with `--parts 1 2 4` also a sixteenth.
Each is reduced to 64 × 64 once, as PDQ does. Its variants are made of that: rotated by up to 1°,
another gamma, cropped by up to 3 % of each side, with noise; then hashed by PDQ's cosine transform.

Brute force compares all variants of one picture. Of two pictures it compares only what may be near
by the triangle inequality: |x - y| >= |x - center| - |center - y|.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator
from time import perf_counter, process_time

import _checkout  # noqa: F401
import numpy as np
from PIL import Image

from dask_image_ingest.curate.near_hashes import nearest_kept

SIDE, KEPT = 64, 16  # of the reduced picture; frequencies of each axis that are hashed
ANGLES, GAMMAS = (-1.0, -0.5, 0.0, 0.5, 1.0), (0.7, 1.0, 1.4)
CROP, NOISE = 0.03, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=int)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--parts", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--distance", type=int, nargs="*", default=[16, 24, 31])
    args = parser.parse_args()
    random = np.random.default_rng(1)
    reduced = [reduce(picture) for picture in pictures(args.shards, args.parts)]
    each = args.rows // len(reduced)
    order = random.permutation(each * len(reduced))
    hashes = np.concatenate([variants(random, bases, each) for bases in reduced])[order]
    of_picture = np.repeat(np.arange(len(reduced)), each)[order]
    print(f"{len(hashes):,} variants of {len(reduced):,} pictures", flush=True)
    rows = [np.flatnonzero(of_picture == number) for number in range(len(reduced))]
    reach = reaches(hashes, rows)
    for distance in args.distance:
        start, used = perf_counter(), process_time()
        of, bits = nearest_kept(hashes[:, None], distance)
        spent = f"{perf_counter() - start:.1f} s, {process_time() - used:.1f} s of cores"
        expected, expected_bits, pairs = brute(hashes, rows, reach, distance)
        gone = np.count_nonzero(expected >= 0)
        print(
            f"{distance} bits: {spent}; {gone:,} rows go by brute force, "
            f"{np.count_nonzero((of >= 0) != (expected >= 0)):,} other verdicts, "
            f"{np.count_nonzero(of != expected):,} other keepers, "
            f"{np.count_nonzero(bits != expected_bits):,} other distances; "
            f"{pairs:,} pairs of pictures were compared",
            flush=True,
        )


def pictures(shards: list[str], parts: list[int]) -> Iterator[Image.Image]:
    """Each photograph, divided into so many rows and columns."""
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                if not member.name.lower().endswith((".jpg", ".jpeg", ".png")):
                    continue
                try:
                    image = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("L")
                except OSError:
                    continue
                for side in parts:
                    width, height = image.width // side, image.height // side
                    for number in range(side * side):
                        left, top = number % side * width, number // side * height
                        part = image.crop((left, top, left + width, top + height))
                        part.thumbnail((256, 256))
                        yield part


def reduce(picture: Image.Image) -> np.ndarray:
    """The picture at each angle and gamma, at 64 × 64: float32 (bases, 64, 64)."""
    width, height = picture.size
    edge = (width // 50, height // 50, width - width // 50, height - height // 50)
    bases = []
    for angle in ANGLES:
        turned = picture.rotate(angle, Image.Resampling.BILINEAR).crop(edge)
        small = np.asarray(turned.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
        bases += [255 * (small / 255) ** gamma for gamma in GAMMAS]
    return np.stack(bases)


def variants(random: np.random.Generator, bases: np.ndarray, count: int) -> np.ndarray:
    """Hashes of random variants of a picture: uint64 (count, 4)."""
    made = []
    for start in range(0, count, 500):
        some = min(500, count - start)
        down, across = cropped(random, some), cropped(random, some)
        frequencies = down @ bases[random.integers(len(bases), size=some)] @ across.swapaxes(1, 2)
        flat = frequencies.reshape(some, -1)
        flat += NOISE * random.standard_normal(flat.shape, np.float32)
        bits = flat > np.median(flat, axis=1, keepdims=True)
        made.append(np.packbits(bits, axis=1).view(np.uint64))
    return np.concatenate(made)


def cropped(random: np.random.Generator, count: int) -> np.ndarray:
    """Cosine transforms of one axis, of randomly cropped pictures: float32 (count, 16, 64)."""
    first, last = random.uniform(0, CROP / 2, (2, count, 1))
    places = (first + (1 - first - last) * (np.arange(SIDE) + 0.5) / SIDE) * SIDE - 0.5
    places = places.clip(0, SIDE - 1)
    before = np.minimum(places.astype(int), SIDE - 2)
    resampled = np.zeros((count, SIDE, SIDE), np.float32)
    np.put_along_axis(resampled, before[..., None], (1 - places + before)[..., None], axis=2)
    np.put_along_axis(resampled, before[..., None] + 1, (places - before)[..., None], axis=2)
    number, place = np.arange(1, KEPT + 1)[:, None], np.arange(SIDE)
    transform = np.sqrt(2 / SIDE) * np.cos(np.pi / (2 * SIDE) * number * (2 * place + 1))
    return transform.astype(np.float32) @ resampled


def reaches(hashes: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
    """At which distance a variant of one picture can be near one of another: int (n, n)."""
    centers = np.stack([center(hashes[of]) for of in rows])
    radii = np.array([apart(hashes[of], centers[[n]]).max() for n, of in enumerate(rows)], int)
    nearest = np.stack([apart(hashes[of], centers).min(axis=0) for of in rows]) - radii
    return np.maximum(nearest, nearest.T)


def brute(
    hashes: np.ndarray, rows: list[np.ndarray], reach: np.ndarray, distance: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The nearest kept row for each row (-1: kept), its bits, and pairs of pictures compared."""
    pairs = np.argwhere(np.triu(reach <= distance, 1))
    group = np.arange(len(rows))
    for one, other in pairs:
        if apart(hashes[rows[one]], hashes[rows[other]]).min() <= distance:
            group[group == group[other]] = group[one]
    of, bits = np.full(len(hashes), -1), np.zeros(len(hashes), int)
    for number in np.unique(group):
        some = np.sort(np.concatenate([rows[n] for n in np.flatnonzero(group == number)]))
        between = apart(hashes[some], hashes[some])
        kept = np.zeros(len(some), bool)
        for row, bits_of_row in enumerate(between):
            kept[row] = not (bits_of_row[:row][kept[:row]] <= distance).any()
        stay = np.flatnonzero(kept)
        gone = np.flatnonzero(~kept)
        to_kept = between[gone][:, stay]
        of[some[gone]] = some[stay[to_kept.argmin(axis=1)]]
        bits[some[gone]] = to_kept.min(axis=1)
    return of, bits, len(pairs)


def center(hashes: np.ndarray) -> np.ndarray:
    """The hash of the bits that most of these have."""
    bits = np.unpackbits(hashes.view(np.uint8), axis=1)
    return np.packbits(bits.mean(axis=0) > 0.5).view(np.uint64)


def apart(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Bits between all hashes and all others: uint8 (n, m); 256 bits, which do not occur, are 0."""
    bits = np.zeros((len(hashes), len(others)), np.uint8)
    for word in range(4):
        bits += np.bitwise_count(hashes[:, None, word] ^ others[:, word])
    return bits


if __name__ == "__main__":
    main()
