"""Duplicates that were planted, and how fast signals and hashes are.

    python benchmarks/curate.py --shards train-000000.tar train-000001.tar

It plants variants of photographs and counts which are found, and times signals and fingerprints
beside the read alone, and beside cleanvision and imagededup where these are installed (imagededup
needs torch, and is not in the extra `bench`). `hashes.py` has the search among millions.
"""

import argparse
import io
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter, process_time

import _checkout  # noqa: F401
import dask
from _shards import Sample, from_tars, make_shards, photographs, write_shards
from PIL import Image, ImageOps

import dask_image_ingest as dii

# How each photograph comes again: scale, format and options of Pillow.
VARIANTS = {
    "quality 30": (1, "JPEG", {"quality": 30}),
    "quality 50": (1, "JPEG", {"quality": 50}),
    "quality 75": (1, "JPEG", {"quality": 75}),
    "quality 95": (1, "JPEG", {"quality": 95}),
    "half the size": (0.5, "JPEG", {"quality": 90}),
    "three quarters": (0.75, "JPEG", {"quality": 90}),
    "one and a half": (1.5, "JPEG", {"quality": 90}),
    "twice the size": (2, "JPEG", {"quality": 90}),
    "WebP": (1, "WEBP", {"quality": 80}),
    "PNG": (1, "PNG", {}),
}

# The five transforms of imagededup's benchmark, of the sizes of a photograph.
TRANSFORMS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "cropped to 7/8": lambda image: ImageOps.crop(
        image, (image.width // 16, image.height // 16) * 2
    ),
    "mirrored": ImageOps.mirror,
    "flipped": ImageOps.flip,
    "rotated by 25 degrees": lambda image: image.rotate(25),
    "resized to 1:1": lambda image: image.resize((min(image.size), min(image.size))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="*", default=(), help="default: photographs made here")
    parser.add_argument("--images", type=int, default=500, help="to time, by repetition")
    parser.add_argument("--quarters", action="store_true", help="those of each photograph as well")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("dask_image_ingest").setLevel(logging.ERROR)
    samples = list(from_tars(args.shards) if args.shards else photographs())
    photos = list(with_quarters(samples)) if args.quarters else samples
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="threads"):
        find_planted(photos, Path(folder) / "planted")
        find_transformed(photos, Path(folder) / "transformed")
        times(samples, Path(folder) / "timed", args)


def with_quarters(samples: list[Sample]) -> Iterator[Sample]:
    """Five pictures of each photograph: itself and its quarters, which have nothing in common."""
    for sample in samples:
        yield sample
        image = Image.open(io.BytesIO(sample.jpeg)).convert("RGB")
        right, bottom = image.width // 2, image.height // 2
        for left, top in ((0, 0), (right, 0), (0, bottom), (right, bottom)):
            quarter = image.crop((left, top, left + right, top + bottom))
            yield sample._replace(jpeg=encoded(quarter, "JPEG", quality=95))


def find_planted(samples: list[Sample], folder: Path) -> None:
    """Print which variants of photographs are found, and how many others are."""

    def made() -> Iterator[Sample]:
        for sample in samples:
            yield sample
            image = Image.open(io.BytesIO(sample.jpeg)).convert("RGB")
            for scale, format, options in VARIANTS.values():
                size = [max(round(edge * scale), 1) for edge in image.size]
                scaled = image.resize(size, Image.Resampling.LANCZOS)
                yield sample._replace(jpeg=encoded(scaled, format, **options))

    print(f"{len(samples):,} photographs and {len(VARIANTS)} variants of each, keep='first'\n")
    tell_found(made(), [*VARIANTS], folder, [])


def find_transformed(samples: list[Sample], folder: Path) -> None:
    """The same of the transforms of imagededup's benchmark."""

    def made() -> Iterator[Sample]:
        for sample in samples:
            yield sample
            image = Image.open(io.BytesIO(sample.jpeg)).convert("RGB")
            for change in TRANSFORMS.values():
                yield sample._replace(jpeg=encoded(change(image), "JPEG", quality=90))

    print(f"{len(samples):,} photographs and imagededup's {len(TRANSFORMS)} transforms of each\n")
    tell_found(made(), [*TRANSFORMS], folder, ["mirrored", "flipped"])


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def tell_found(
    samples: Iterator[Sample], kinds: list[str], folder: Path, variants: list[str]
) -> None:
    """Print recall and precision, where each photograph comes before its ``kinds``."""
    shards = write_shards(folder, samples, per_shard=500)
    ddf = dii.read_webdataset_images(shards, backend="pandas")
    hashed = dii.curate.compute_fingerprints(ddf, ["pdq"], variants=variants)
    hashed = hashed.drop(columns=["image", "error"]).persist()
    each = len(kinds) + 1
    for distance in (15, 24, 31):
        found = dii.curate.find_duplicates(
            hashed, distance=distance, keep="first", variants=variants
        )
        table = found[["__key__", "duplicate.keep", "duplicate.of"]].compute()
        table = table.reset_index(drop=True)
        number = table["__key__"].astype(int)
        of = table["duplicate.of"].astype("Int64")
        gone = ~table["duplicate.keep"].astype(bool)
        right = (number // each == of // each).fillna(False).astype(bool)
        variant = number % each
        recall = right[variant > 0].mean()
        precision = (right & gone).sum() / max(gone.sum(), 1)
        print(f"distance {distance}: recall {recall:.4f}, precision {precision:.4f}")
        by_kind = right[variant > 0].groupby(variant).mean()
        worst = {name: by_kind[place] for place, name in enumerate(kinds, 1)}
        print("  " + ", ".join(f"{name} {share:.3f}" for name, share in worst.items()))
    quality = hashed["fingerprint.pdq_quality"].compute()
    print(f"of a PDQ quality below 50, and so never found: {(quality < 50).mean():.2%} of rows\n")


def times(samples: list[Sample], folder: Path, args: argparse.Namespace) -> None:
    """Print how fast signals and fingerprints are, beside the read alone and the peers."""
    shards = make_shards(folder, args.images, per_shard=250, sources=args.shards)
    ddf = dii.read_webdataset_images(shards, backend="pandas")
    signals = dii.curate.find_issues(ddf).drop(columns="image")
    hashes = dii.curate.compute_fingerprints(ddf, ["pdq"]).drop(columns="image")
    both = dii.curate.compute_fingerprints(dii.curate.measure_quality(ddf)).drop(columns="image")
    ways: dict[str, Callable[[], object]] = {
        "read alone": lambda: ddf["image"].map_partitions(len, meta=("n", int)).compute(),
        "fingerprint of bytes": dii.curate.compute_fingerprints(ddf, ["bytes"])[
            "fingerprint.bytes"
        ].compute,
        "quality, issues": signals.compute,
        "PDQ": hashes.compute,
        "quality and all fingerprints": both.compute,
    }
    files = folder / "files"
    files.mkdir()
    for number, sample in enumerate(islice(cycle(samples), args.images)):
        (files / f"{number:06d}.jpg").write_bytes(sample.jpeg)
    ways |= {name: way for name, package, way in peers(files) if find_spec(package)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            start, used = perf_counter(), process_time()
            way()
            if turn:  # the first one warms up
                seconds[name].append((perf_counter() - start, process_time() - used))
    print(f"{args.images:,} images, medians of {args.rounds} rounds")
    print(f"{'':36} {'images/s':>9} {'of the read':>12} {'core ms/image':>14}")
    read = statistics.median(wall for wall, _ in seconds["read alone"])
    for name, taken in seconds.items():
        wall, cpu = (statistics.median(values) for values in zip(*taken, strict=True))
        rate, core = args.images / wall, 1000 * cpu / args.images
        print(f"{name:36} {rate:9,.0f} {read / wall:12.2f} {core:14.2f}")
    missing = sorted({package for _, package, _ in peers(files) if not find_spec(package)})
    if missing:
        print(f"not installed, and so not compared: {', '.join(missing)}")


def peers(files: Path) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """What other packages make of the same images, as files: name, package, function.

    Processes of theirs do not count in the time of cores: both run in this one.
    """

    def cleanvision() -> object:
        from cleanvision import Imagelab

        lab = Imagelab(data_path=str(files), verbose=False)
        kinds = ["dark", "light", "blurry", "low_information", "odd_aspect_ratio", "odd_size"]
        lab.find_issues({kind: {} for kind in kinds}, n_jobs=1, verbose=False)
        return lab.issues

    def imagededup() -> object:
        from imagededup.methods import PHash

        return PHash(verbose=False).encode_images(str(files), num_enc_workers=0)

    yield "cleanvision, one process", "cleanvision", cleanvision
    yield "imagededup, pHash, one process", "imagededup", imagededup


if __name__ == "__main__":
    main()
