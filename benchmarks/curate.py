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
import numpy as np
from _shards import Sample, from_tars, make_shards, photographs, write_shards
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

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


def cropped(image: Image.Image, share: float) -> Image.Image:
    """Without this share of the width and of the height, half of it at each end."""
    across, down = round(image.width * share / 2), round(image.height * share / 2)
    return image.crop((across, down, image.width - across, image.height - down))


def captioned(image: Image.Image) -> Image.Image:
    """With a white bar over the lowest tenth, and a line of black text on it."""
    image, bar = image.copy(), image.height // 10
    draw, top = ImageDraw.Draw(image), image.height - bar
    draw.rectangle((0, top, image.width, image.height), fill="white")
    draw.text((image.width // 10, top), "A line of text", fill="black", font_size=0.7 * bar)
    return image


def with_logo(image: Image.Image) -> Image.Image:
    """With a red disc in the lower right corner, a fifth of the shorter side wide."""
    image, wide = image.copy(), min(image.size) // 5
    left, top = image.width - wide - wide // 5, image.height - wide - wide // 5
    ImageDraw.Draw(image).ellipse((left, top, left + wide, top + wide), fill="#d02020")
    return image


def with_meme_text(image: Image.Image) -> Image.Image:
    """With large white text, outlined, at the top and at the bottom."""
    image, size = image.copy(), image.height // 9
    draw = ImageDraw.Draw(image)
    for top, text in ((0.02, "WHEN YOU SEE"), (0.86, "IT AT LAST")):
        place = (image.width / 2, image.height * top)
        outline = {"stroke_width": max(1, size // 10), "stroke_fill": "black"}
        draw.text(place, text, fill="white", font_size=size, anchor="ma", **outline)
    return image


def cut_off(image: Image.Image, left: float, top: float = 0) -> Image.Image:
    """Without these shares of the width and of the height, at one end."""
    return image.crop((round(image.width * left), round(image.height * top), *image.size))


def with_inset(image: Image.Image, share: float) -> Image.Image:
    """With the picture turned upside down over this share of it, in the middle."""
    inset, image = ImageOps.flip(ImageOps.scale(image, share**0.5)), image.copy()
    image.paste(inset, ((image.width - inset.width) // 2, (image.height - inset.height) // 2))
    return image


# Small changes, which people make by hand; the last ones make another picture of one scene.
CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "encoded again": lambda image: image,
    "halved": lambda image: ImageOps.scale(image, 0.5),
    "cropped by 1 %": lambda image: cropped(image, 0.01),
    "cropped by 2 %": lambda image: cropped(image, 0.02),
    "cropped by 5 %": lambda image: cropped(image, 0.05),
    "the left 5 % cut off": lambda image: cut_off(image, 0.05),
    "left and top 5 %": lambda image: cut_off(image, 0.05, 0.05),
    # Without the corners that a rotation leaves empty.
    "rotated by 1 degree": lambda image: cropped(image.rotate(1, Image.Resampling.BICUBIC), 0.04),
    "border of 1 %": lambda image: ImageOps.expand(image, round(max(image.size) / 100), "black"),
    "border of 3 %": lambda image: ImageOps.expand(image, round(max(image.size) * 0.03), "white"),
    "brighter by 40 %": lambda image: ImageEnhance.Brightness(image).enhance(1.4),
    "caption": captioned,
    "meme text": with_meme_text,
    "logo": with_logo,
    "another 5 % of it": lambda image: with_inset(image, 0.05),
    "another 10 %": lambda image: with_inset(image, 0.1),
    "another 20 %": lambda image: with_inset(image, 0.2),
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
        find_changed(photos, Path(folder) / "changed")
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
            yield from changed(sample, TRANSFORMS)

    print(f"{len(samples):,} photographs and imagededup's {len(TRANSFORMS)} transforms of each\n")
    tell_found(made(), [*TRANSFORMS], folder, ["mirrored", "flipped"])


def find_changed(samples: list[Sample], folder: Path) -> None:
    """Print which changed photographs are found beside the photographs alone, and how else.

    Of every other photograph: with those left out the second look's thresholds were chosen.
    """
    samples = samples[1::2]
    pages = write_shards(folder / "pages", drawn_pages(), per_shard=500)
    made = (new for sample in samples for new in changed(sample, CHANGES))
    every = write_shards(folder / "changed", made, per_shard=500)
    originals = write_shards(folder / "originals", iter(samples), per_shard=500)
    hashed = []
    for shards in (every, originals, pages):
        ddf = dii.read_webdataset_images(shards, backend="pandas")
        fingerprints = dii.curate.compute_fingerprints(ddf, ["pdq", "pixels", "thumbnail"])
        hashed.append(fingerprints.drop(columns=["image", "error"]).persist())
    *hashed, hashed_pages = hashed
    shares, wrong, wrong_pages = {}, {}, {}
    for name, options in {
        "24 bits": {"second_look": 0},
        "31 bits": {"distance": 31, "second_look": 0},
        "64 bits": {"distance": 64, "second_look": 0},
        "second look": {},
        "look at 80": {"second_look": 80},
    }.items():
        table = dii.curate.find_overlaps(*hashed, **options)[["__key__", "overlap.of"]].compute()
        number, of = table["__key__"].astype(int), table["overlap.of"].astype("Int64")
        right = (number // len(CHANGES) == of).fillna(False).astype(bool)
        shares[name] = right.groupby(number % len(CHANGES)).mean().tolist()
        wrong[name] = int((of.notna() & ~right).sum())
        kept = dii.curate.find_duplicates(hashed_pages, **options)["duplicate.keep"].compute()
        wrong_pages[name] = int((~kept).sum())
    for name, (package, hash_of, most) in HASHES.items():
        if find_spec(package):
            shares[name], wrong[name] = found_by(hash_of, most, samples)
            hashes = np.stack([hash_of(opened(page)) for page in drawn_pages()])
            near = np.tril((hashes[:, None] != hashes).sum(axis=2) <= most, -1)
            wrong_pages[name] = int(near.any(axis=1).sum())
    print(f"{len(samples):,} photographs, each changed, found beside the photographs:")
    print(f"{'':20} " + " ".join(f"{name:>18}" for name in shares))
    for number, change in enumerate(CHANGES):
        print(f"{change:20} " + " ".join(f"{of[number]:18.2f}" for of in shares.values()))
    print(f"{'wrong ones':20} " + " ".join(f"{count:18}" for count in wrong.values()))
    print(f"{'pages near others':20} " + " ".join(f"{n:18}" for n in wrong_pages.values()) + "\n")


def drawn_pages(count: int = 30) -> Iterator[Sample]:
    """So many of ten kinds of pages: those of `issues.py`, and forms and slides of one layout."""
    from issues import drawings

    for seed in range(2000, 2000 + count):
        random = np.random.default_rng(seed)
        pages = [image for _, image in drawings(seed)]
        for paper, ink in (("white", "black"), ("#d8d4c8", "black"), ("#18285c", "white")):
            is_slide = ink == "white"
            page = Image.new("RGB", (960, 540) if is_slide else (620, 877), paper)
            draw = ImageDraw.Draw(page)
            if is_slide:
                draw.rectangle((0, 0, 960, 90), fill="#0e183c")
            for line in range(random.integers(3, 7) if is_slide else 13):
                top = 60 * line + (130 if is_slide else 40)
                if not is_slide:
                    draw.rectangle((60, top, 560, top + 40), outline=ink)
                letters = random.integers(97, 123, (random.integers(1, 5), 6)).astype(np.uint8)
                text = " ".join(bytes(word).decode() for word in letters)
                draw.text((80, top + 8), text, fill=ink, font_size=22)
            pages.append(page)
        yield from (Sample(encoded(page, "JPEG", quality=90), "a page", 0) for page in pages)


def phash(image: Image.Image) -> np.ndarray:
    import imagehash

    return imagehash.phash(image).hash.ravel()


def pdqhash(image: Image.Image) -> np.ndarray:
    import pdqhash

    return pdqhash.compute(np.asarray(image))[0].astype(bool)


def imagededup_phash(image: Image.Image) -> np.ndarray:
    from imagededup.methods import PHash

    text = PHash(verbose=False).encode_image(image_array=np.asarray(image))
    return np.array([digit == "1" for digit in f"{int(text, 16):064b}"])


# Hashes of other packages: the package, the function, and the most bits of a match.
HASHES = {
    "imagededup, 10 of 64": ("imagededup", imagededup_phash, 10),
    "imagehash, 10 of 64": ("imagehash", phash, 10),
    "pdqhash, 31 of 256": ("pdqhash", pdqhash, 31),
}


def found_by(
    hash_of: Callable[[Image.Image], np.ndarray], most: int, samples: list[Sample]
) -> tuple[list[float], int]:
    """Share of each change that is nearest to its photograph, and how many to another one."""
    originals = np.stack([hash_of(opened(sample)) for sample in samples])
    found, wrong = np.zeros((len(samples), len(CHANGES)), bool), 0
    for row, sample in enumerate(samples):
        for column, new in enumerate(changed(sample, CHANGES)):
            bits = (originals != hash_of(opened(new))).sum(axis=1)
            found[row, column] = bits[row] <= most and bits[row] == bits.min()
            wrong += int(not found[row, column] and bits.min() <= most)
    return found.mean(axis=0).tolist(), wrong


def opened(sample: Sample) -> Image.Image:
    return Image.open(io.BytesIO(sample.jpeg)).convert("RGB")


def changed(
    sample: Sample, changes: dict[str, Callable[[Image.Image], Image.Image]]
) -> Iterator[Sample]:
    """The sample after each change, encoded as JPEG of quality 90."""
    image = opened(sample)
    for change in changes.values():
        yield sample._replace(jpeg=encoded(change(image), "JPEG", quality=90))


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
