"""Photographs and masks of one collection: a small model learns which pixels belong to what.

    python examples/06_segment.py [FOLDER]

Writes shards of pictures with discs and bars, and their masks (classes 0, 1 and 9), to FOLDER
(default: demo-masks). Both are cut, turned and mirrored alike, at random. A softmax regression of
a pixel's neighbourhood, in NumPy, then learns the classes in seconds; a network takes its place.
"""

import io
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn
from nvidia.dali.types import DALIInterpType
from PIL import Image, ImageFilter

import dask_image_ingest as dii

CLASSES = np.array([0, 1, 9], np.uint8)
SIZE, EPOCHS, RATE = 48, 4, 0.5


def main(folder: str = "demo-masks") -> None:
    write_shards(Path(folder))
    nearest = partial(augment, interp=DALIInterpType.INTERP_NN)
    ddf = dii.read_webdataset_images(
        f"{folder}/*.tar",
        image={
            "image": "jpg",
            "mask": dii.ImageColumn("seg.png", mode="labels", transform=nearest),
        },
        transform=partial(augment, interp=DALIInterpType.INTERP_LINEAR),
        backend="pandas",
    )
    ddf.images.show(12, size=96, mask="mask").save(f"{folder}/masks.html")
    weights = np.zeros((28, len(CLASSES)), np.float32)
    for epoch in range(EPOCHS):
        right = seen = 0
        for batch in ddf.images.iter_batches(8, columns=["mask"], shuffle=epoch):
            features = neighbourhoods(batch["image"])
            labels = np.searchsorted(CLASSES, batch["mask"].reshape(-1))
            scores = features @ weights
            right, seen = right + int((scores.argmax(1) == labels).sum()), seen + len(labels)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            shares[np.arange(len(labels)), labels] -= 1
            weights -= RATE * features.T @ shares / len(labels)
        print(f"epoch {epoch + 1}: {right / seen:.1%} of pixels right")


def augment(images: Any, interp: DALIInterpType) -> Any:
    """The same for a photograph and its mask, but for the interpolation."""
    angle = fn.random.uniform(range=(-20.0, 20.0))
    images = fn.rotate(images, angle=angle, interp_type=interp, keep_size=True, fill_value=0)
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    x, y = fn.random.uniform(range=(0.0, 1.0)), fn.random.uniform(range=(0.0, 1.0))
    return fn.crop(images, crop=(SIZE, SIZE), crop_pos_x=x, crop_pos_y=y)


def neighbourhoods(images: np.ndarray) -> np.ndarray:
    """The 27 values around each pixel, -1 to 1, and a constant: float32 (pixels, 28)."""
    padded = np.pad(images.astype(np.float32) / 127.5 - 1, ((0, 0), (1, 1), (1, 1), (0, 0)), "edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    values = windows.reshape(-1, 27)
    return np.concatenate([values, np.ones((len(values), 1), np.float32)], axis=1)


def write_shards(folder: Path, shards: int = 4, per_shard: int = 16) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"masks-{shard:06d}.tar", "w") as tar:
            for number in range(per_shard):
                picture, mask = scene(random)
                key = f"{shard * per_shard + number:06d}"
                for name, image, form in (("jpg", picture, "JPEG"), ("seg.png", mask, "PNG")):
                    file = io.BytesIO()
                    image.save(file, form)
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = file.tell()
                    file.seek(0)
                    tar.addfile(member, file)


def scene(random: np.random.Generator, side: int = 80) -> tuple[Image.Image, Image.Image]:
    """A noisy picture of a disc and a bar, and the class of each of its pixels."""
    rows, columns = np.mgrid[:side, :side]
    (y, x, bar), radius = random.integers(15, side - 15, 3), random.integers(8, 20)
    mask = np.zeros((side, side), np.uint8)
    mask[:, bar - 5 : bar + 5] = 9
    mask[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = 1
    colours = {0: (90, 110, 90), 1: (200, 90, 60), 9: (70, 90, 190)}
    picture = np.zeros((side, side, 3))
    for label, colour in colours.items():
        picture[mask == label] = colour
    picture += random.normal(0, 25, picture.shape)
    image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    return image.filter(ImageFilter.SMOOTH), Image.fromarray(mask)


if __name__ == "__main__":
    main(*sys.argv[1:])
