"""How often ``find_issues`` flags pictures that were made bad, and pictures that are good.

    python benchmarks/issues.py --shards train-000000.tar train-000001.tar

Of every other photograph of the shards: with those left out the thresholds were chosen. Each is
stored as JPEG of quality 90 after it was changed. Drawings are those of seeds that were not used
either.
"""

import argparse
import io
from collections.abc import Callable, Iterator

import _checkout  # noqa: F401
import numpy as np
import pandas as pd
from _shards import Sample, from_tars, photographs
from curate import encoded
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

import dask_image_ingest as dii
from dask_image_ingest.curate.quality import pixel_signals

HELD_OUT = 1000  # the first seed of the drawings


def moved(image: Image.Image, length: int, angle: float) -> Image.Image:
    """The mean of copies moved along a line of so many pixels, linearly interpolated."""
    pixels = np.pad(np.asarray(image, np.float32), [(length, length)] * 2 + [(0, 0)], "edge")
    places = np.linspace(-(length - 1) / 2, (length - 1) / 2, 2 * length - 1) + 0.0
    total = np.zeros((image.height, image.width, 3), np.float32)
    for place in places:
        x, y = (length + place * part for part in (np.cos(angle), np.sin(angle)))
        left, top = int(x), int(y)
        for down, weight in ((0, 1 - y + top), (1, y - top)):
            for right, share in ((0, 1 - x + left), (1, x - left)):
                rows = slice(top + down, top + down + image.height)
                total += weight * share * pixels[rows, left + right : left + right + image.width]
    return as_image(total / len(places))


def as_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray((pixels + 0.5).clip(0, 255).astype(np.uint8))


def exposed(image: Image.Image, stops: float) -> Image.Image:
    """As with so many stops more of light, which is proportional to the linear sRGB values."""
    share = np.asarray(image, np.float32) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = (linear * 2**stops).clip(0, 1)
    share = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return as_image(255 * share)


def stretched(image: Image.Image, factor: float, less: float = 0) -> Image.Image:
    """Values minus some, times a factor, and clipped."""
    return as_image((np.asarray(image, np.float32) - less) * factor)


def cut_out(image: Image.Image, ground: str) -> Image.Image:
    """The middle of the picture, as a thing in front of a white or black ground."""
    width, height = image.size
    mask = Image.new("L", image.size)
    box = (width // 4, height // 4, 3 * width // 4, 3 * height // 4)
    ImageDraw.Draw(mask).ellipse(box, fill=255)
    result = Image.new("RGB", image.size, ground)
    result.paste(image, (0, 0), mask.filter(ImageFilter.GaussianBlur(2)))
    return result


def turned_by(number: int) -> float:
    """The direction in which a picture moves: another one for each."""
    return float(number * 47 % 180 * np.pi / 180)


Change = Callable[[Image.Image, int], Image.Image]

GOOD: dict[str, Change] = {
    "as it is": lambda image, n: image,
    "halved": lambda image, n: ImageOps.scale(image, 0.5),
    "enlarged 1.5 times": lambda image, n: ImageOps.scale(image, 1.5),
    "in grey": lambda image, n: image.convert("L").convert("RGB"),
    "a fifth brighter": lambda image, n: stretched(image, 1.2),
    "more contrast (1.4)": lambda image, n: ImageEnhance.Contrast(image).enhance(1.4),
    "less contrast (0.6)": lambda image, n: ImageEnhance.Contrast(image).enhance(0.6),
    "cut out, on white": lambda image, n: cut_out(image, "white"),
    "cut out, on black": lambda image, n: cut_out(image, "black"),
    "wide white border": lambda image, n: ImageOps.expand(image, image.height // 3, "white"),
    "wide black border": lambda image, n: ImageOps.expand(image, image.height // 3, "black"),
}

# Issue → pictures that should have it.
BAD: dict[str, dict[str, Change]] = {
    "blurry": {
        **{
            f"sigma of {sigma} pixels": lambda image, n, sigma=sigma: image.filter(
                ImageFilter.GaussianBlur(sigma)
            )
            for sigma in (1, 1.5, 2, 3, 5)
        },
        **{
            f"moved by {length} pixels": lambda image, n, length=length: moved(
                image, length, turned_by(n)
            )
            for length in (5, 9, 15, 21)
        },
    },
    "light": {
        **{
            f"{stops} stops more": lambda image, n, stops=stops: exposed(image, stops)
            for stops in (1, 2, 3)
        },
        **{
            f"times {factor}": lambda image, n, factor=factor: stretched(image, factor)
            for factor in (2, 3)
        },
        "plus 100": lambda image, n: stretched(image, 1, -100),
    },
    "dark": {
        **{
            f"{-stops} stops less": lambda image, n, stops=stops: exposed(image, stops)
            for stops in (-2, -3, -4)
        },
        **{
            f"minus {less}, times 1.5": lambda image, n, less=less: stretched(image, 1.5, less)
            for less in (50, 100, 150)
        },
    },
}


def drawings(seed: int) -> Iterator[tuple[str, Image.Image]]:
    """A drawing of each kind."""
    random = np.random.default_rng(seed)
    width, height = (int(side) for side in random.integers(300, 900, 2))

    def sheet(colour: object = "white") -> tuple[Image.Image, ImageDraw.ImageDraw]:
        image = Image.new("RGB", (width, height), colour)
        return image, ImageDraw.Draw(image)

    def place() -> tuple[int, int]:
        return int(random.integers(0, width)), int(random.integers(0, height))

    def colour() -> tuple[int, ...]:
        return tuple(int(level) for level in random.integers(0, 256, 3))

    image, draw = sheet()
    for _ in range(int(random.integers(5, 40))):
        ends, thick = (place(), place()), int(random.integers(1, 4))
        if random.random() < 0.5:
            draw.line(ends, fill="black", width=thick)
        else:
            box = np.sort(np.array(ends), axis=0).ravel().tolist()
            draw.ellipse(box, outline="black", width=thick)
    yield "line art", image

    image, draw = sheet()
    draw.line((40, 20, 40, height - 40, width - 20, height - 40), fill="black")
    bars = int(random.integers(4, 12))
    step = (width - 80) / bars
    for bar in range(bars):
        left, top = 50 + bar * step, int(random.integers(20, height - 60))
        draw.rectangle((left, top, left + step * 0.7, height - 41), fill=colour())
        draw.text((left, height - 35), f"{bar * 10}", fill="black")
    yield "bar chart", image

    image, draw = sheet()
    draw.rectangle((40, 20, width - 20, height - 40), outline="black")
    for _ in range(3):
        line = height / 2 + np.cumsum(random.normal(0, 8, 100))
        points = [(40 + n * (width - 60) / 100, float(y)) for n, y in enumerate(line)]
        draw.line(points, fill=colour(), width=2)
    yield "line chart", image

    image, draw = sheet()
    for top in range(30, height - 30, int(random.integers(14, 30))):
        letters = random.integers(97, 123, (width // 60, 6))
        words = " ".join(bytes(word.astype(np.uint8)).decode() for word in letters)
        draw.text((30, top), words, fill="black", font_size=12)
    yield "page of text", image

    image, draw = sheet(tuple(int(level) for level in random.integers(200, 256, 3)))
    for _ in range(6):
        left, top = place()
        draw.ellipse((left, top, left + width // 4, top + height // 4), fill=colour())
    yield "flat forms", image

    image, draw = sheet("black")
    for _ in range(20):
        draw.line((place(), place()), fill="white", width=2)
    draw.text((width // 4, height // 2), "Title of a slide", fill="white", font_size=40)
    yield "white on black", image

    image, draw = sheet()
    for pure in ("#ff0000", "#ffff00", "#00ffff", "#ff00ff"):
        left, top = place()
        draw.rectangle((left, top, left + width // 3, top + height // 3), fill=pure)
    yield "pure colours", image


def flags(images: list[Image.Image]) -> pd.DataFrame:
    """The issues of pictures, bool."""
    signals = [pixel_signals([np.asarray(image)[None]], np) for image in images]
    table = pd.DataFrame([{n: float(v[0]) for n, v in of.items()} for of in signals])
    found = dii.curate.find_issues(table.add_prefix("quality.")).filter(like="issue.")
    return found.rename(columns=lambda name: name.removeprefix("issue."))


def share_by_cleanvision(images: list[Image.Image]) -> float:
    """Share of pictures that cleanvision's score of blur flags, at its threshold."""
    scores = [pixel_signals([np.asarray(image)[None]], np, ["blur"]) for image in images]
    return float(np.mean([of["blur"][0] < 0.29 for of in scores]))


def stored(image: Image.Image, quality: int = 90) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality))).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", nargs="*", default=(), help="default: photographs made here")
    parser.add_argument("--chosen", action="store_true", help="the other half instead")
    args = parser.parse_args()
    samples: list[Sample] = list(from_tars(args.shards) if args.shards else photographs())
    half = samples[0 if args.chosen else 1 :: 2]
    photos = [Image.open(io.BytesIO(sample.jpeg)).convert("RGB") for sample in half]
    kinds = {name: [stored(c(p, n)) for n, p in enumerate(photos)] for name, c in GOOD.items()}
    kinds["quality 30"] = [stored(photo, 30) for photo in photos]
    for seed in range(0 if args.chosen else HELD_OUT, (0 if args.chosen else HELD_OUT) + 20):
        for name, image in drawings(seed):
            kinds.setdefault(name, []).append(image)
    good = {name: flags(images) for name, images in kinds.items()}
    print(f"{len(photos)} photographs, and 20 drawings of each kind; share that is flagged:")
    print(f"{'':24} " + " ".join(f"{issue:>8}" for issue in BAD))
    for name, found in good.items():
        print(f"{name:24} " + " ".join(f"{found[issue].mean():8.2f}" for issue in BAD))
    as_they_are = good["as it is"]
    for issue, changes in BAD.items():
        print(f"\n{issue}: recall, and precision among as many that are as they are")
        for name, change in changes.items():
            images = [stored(change(photo, n)) for n, photo in enumerate(photos)]
            found = flags(images)[issue]
            right, wrong = found.sum(), as_they_are[issue].sum()
            theirs = f" cleanvision {share_by_cleanvision(images):.2f}" if issue == "blurry" else ""
            print(f"{name:24} {found.mean():8.2f} {right / max(right + wrong, 1):8.2f}{theirs}")


if __name__ == "__main__":
    main()
