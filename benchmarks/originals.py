"""How often ``find_duplicates(keep="best")`` drops an original, for each kind of copy.

    python benchmarks/originals.py --shards train-000000.tar
    python benchmarks/originals.py

Each original makes a pair with each copy. Without shards the originals are whole pictures of
scikit-image and scikit-learn as they are stored, and quarters of them as JPEG of quality 95; then
drawings as PNG. The constants of the rule were fixed while looking at the figures of 67 other
pictures, ImageNet photographs.
"""

import argparse
import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import _checkout  # noqa: F401
import dask
import numpy as np
from _shards import Sample, add, from_tars
from curate import captioned, cropped, encoded
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

import dask_image_ingest as dii

PICTURES = (
    *(f"skimage/data/{name}.png" for name in (
        "astronaut", "brick", "camera", "chelsea", "clock_motion", "coffee", "coins", "grass",
        "gravel", "ihc", "moon", "motorcycle_left", "page",
    )),
    *(f"skimage/data/{name}.jpg" for name in ("hubble_deep_field", "retina", "rocket")),
    *(f"sklearn/datasets/images/{name}.jpg" for name in ("china", "flower")),
)  # fmt: skip


def scaled(factor: float, kind: Image.Resampling) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.resize([max(round(side * factor), 1) for side in image.size], kind)


def noisy(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, 6, (image.height, image.width, 1))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def brighter(image: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1.2)


def as_they_are(image: Image.Image) -> Image.Image:
    return image


R = Image.Resampling
# Kind of copy -> how it is made, and stored.
COPIES: dict[str, tuple[Callable[[Image.Image], Image.Image], str, dict[str, int]]] = {
    "JPEG 30": (as_they_are, "JPEG", {"quality": 30}),
    "JPEG 50": (as_they_are, "JPEG", {"quality": 50}),
    "JPEG 70": (as_they_are, "JPEG", {"quality": 70}),
    "JPEG 85": (as_they_are, "JPEG", {"quality": 85}),
    "JPEG 95": (as_they_are, "JPEG", {"quality": 95}),
    "WebP 80": (as_they_are, "WEBP", {"quality": 80}),
    "½": (scaled(0.5, R.LANCZOS), "JPEG", {"quality": 90}),
    "¾": (scaled(0.75, R.LANCZOS), "JPEG", {"quality": 90}),
    "cropped by 1 %": (lambda image: cropped(image, 0.01), "JPEG", {"quality": 90}),
    "cropped by 5 %": (lambda image: cropped(image, 0.05), "JPEG", {"quality": 90}),
    "grey": (lambda image: image.convert("L"), "JPEG", {"quality": 90}),
    "CMYK": (lambda image: image.convert("CMYK"), "JPEG", {"quality": 90}),
    "blurred by 1 pixel": (
        lambda image: image.filter(ImageFilter.GaussianBlur(1)),
        "JPEG",
        {"quality": 90},
    ),
    "mirrored": (ImageOps.mirror, "JPEG", {"quality": 90}),
    "1.25 × (Lanczos)": (scaled(1.25, R.LANCZOS), "JPEG", {"quality": 90}),
    "1.25 × (cubic)": (scaled(1.25, R.BICUBIC), "JPEG", {"quality": 90}),
    "1.25 × (linear)": (scaled(1.25, R.BILINEAR), "JPEG", {"quality": 90}),
    "1.5 × (Lanczos)": (scaled(1.5, R.LANCZOS), "JPEG", {"quality": 90}),
    "1.5 × (cubic)": (scaled(1.5, R.BICUBIC), "JPEG", {"quality": 90}),
    "1.5 × (linear)": (scaled(1.5, R.BILINEAR), "JPEG", {"quality": 90}),
    "2 × (Lanczos)": (scaled(2, R.LANCZOS), "JPEG", {"quality": 90}),
    "2 × (cubic)": (scaled(2, R.BICUBIC), "JPEG", {"quality": 90}),
    "2 × (repeated pixels)": (scaled(2, R.NEAREST), "JPEG", {"quality": 90}),
    "brighter": (
        lambda image: ImageEnhance.Brightness(image).enhance(1.2),
        "JPEG",
        {"quality": 90},
    ),
    "caption": (captioned, "JPEG", {"quality": 90}),
    "noise": (noisy, "JPEG", {"quality": 90}),
    "stretched by 15 %": (
        lambda image: image.resize((round(image.width * 1.15), image.height), R.LANCZOS),
        "JPEG",
        {"quality": 90},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="*", default=())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="threads"):
        if args.shards:
            tell(list(from_tars(args.shards)), "pictures of the shards", Path(folder) / "a.tar")
        else:
            tell(list(pictures()), "pictures", Path(folder) / "a.tar")
            tell(list(drawings()), "drawings", Path(folder) / "b.tar")


def pictures() -> Iterator[Sample]:
    """Whole pictures as they are stored, then their quarters."""
    whole = []
    for name in PICTURES:
        package = "scikit-learn" if name.startswith("sklearn") else "scikit-image"
        whole.append(Path(str(distribution(package).locate_file(name))).read_bytes())
        yield Sample(whole[-1], name, 0)
    for content in whole:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        right, bottom = image.width // 2, image.height // 2
        for left, top in ((0, 0), (right, 0), (0, bottom), (right, bottom)):
            quarter = image.crop((left, top, left + right, top + bottom))
            yield Sample(encoded(quarter, "JPEG", quality=95), "a quarter", 0)


def drawings(count: int = 24) -> Iterator[Sample]:
    """Flat forms and lines of text, as PNG."""
    random = np.random.default_rng(0)
    for number in range(count):
        picture = Image.new("RGB", (480, 360), tuple(random.integers(200, 256, 3)))
        draw = ImageDraw.Draw(picture)
        for _ in range(5):
            left, top, wide, high = random.integers(0, 200, 4) + 20
            colour = tuple(random.integers(0, 256, 3))
            draw.ellipse((left, top, left + wide, top + high), fill=colour)
        for line in range(number % 3 * 6):
            draw.text((20, 20 * line), f"line {line}: {random.integers(1e9)} words", fill="black")
        yield Sample(encoded(picture, "PNG"), "a drawing", 0)


def tell(originals: list[Sample], what: str, tar: Path) -> None:
    """Print the share of the originals that are dropped, for each kind of copy."""
    with tarfile.open(tar, "w") as file:
        for number, original in enumerate(originals):
            image = Image.open(io.BytesIO(original.jpeg)).convert("RGB")
            for kind, (change, format, options) in enumerate(COPIES.values()):
                pair = number * len(COPIES) + kind
                # Of equal ones the first key stays: that is not the original.
                add(file, f"{pair:06d}a.jpg", encoded(change(image), format, **options))
                add(file, f"{pair:06d}z.jpg", original.jpeg)
    ddf = dii.read_webdataset_images(tar, backend="pandas")
    pair_number = ddf["__key__"].str.slice(0, 6)
    # Near are those of one pair, whatever their hashes are.
    ddf = ddf.assign(**{"fingerprint.pdq": pair_number.str.pad(64, fillchar="0")})
    found = dii.curate.find_duplicates(ddf, distance=0)[["__key__", "duplicate.keep"]].compute()
    found = found[found["__key__"].str.endswith("z")]
    kind = found["__key__"].str.slice(0, 6).astype(int) % len(COPIES)
    lost = (~found["duplicate.keep"]).groupby(kind).mean()
    print(f"{len(originals):,} {what}; share of the originals that are dropped for a copy:")
    for number, name in enumerate(COPIES):
        print(f"  {name:24} {lost[number]:.2f}")


if __name__ == "__main__":
    main()
