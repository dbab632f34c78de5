"""Real photographs as WebDataset shards: those that scikit-image and scikit-learn ship."""

import io
import json
import tarfile
from collections.abc import Iterator
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path

from PIL import Image

CAPTIONS = {
    "astronaut.png": "Eileen Collins in an orange space suit, before a flag",
    "camera.png": "a man in a coat behind a film camera, in black and white",
    "chelsea.png": "a tabby cat looks past the camera",
    "china.jpg": "a Chinese pavilion above a lake",
    "coffee.png": "a cup of espresso with a spoon on a wooden table",
    "coins.png": "Greek coins from Pompeii on a dark cloth",
    "flower.jpg": "an orange dahlia in front of dark leaves",
    "hubble_deep_field.jpg": "far galaxies, the Hubble eXtreme Deep Field",
    "ihc.png": "stained tissue under a microscope",
    "moon.png": "craters on the surface of the moon",
    "motorcycle_left.png": "a motorcycle in a crowded garage",
    "retina.jpg": "the retina of a human eye",
    "rocket.jpg": "a Falcon 9 rocket on its pad at dusk",
}
DAMAGED = 18  # the sample whose JPEG is cut short
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


def write_shards(folder: Path, samples_per_shard: int = 13) -> list[Path]:
    """Write 52 samples as ``photos-000000.tar`` ..., one of them with a damaged image."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = list(chain(*zip(*(_variants(*photo) for photo in _photos()), strict=True)))
    samples[DAMAGED]["jpg"] = samples[DAMAGED]["jpg"][:5000]

    shards = []
    for number, start in enumerate(range(0, len(samples), samples_per_shard)):
        shards.append(folder / f"photos-{number:06d}.tar")
        with tarfile.open(shards[-1], "w") as tar:
            for index, members in enumerate(samples[start : start + samples_per_shard], start):
                _add(tar, f"{index:04d}", members)
    return shards


def _photos() -> Iterator[tuple[int, str, Image.Image]]:
    # Their files alone: to import sklearn takes three seconds.
    folders = [
        Path(str(distribution("scikit-image").locate_file("skimage/data"))),
        Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/images"))),
    ]
    for label, name in enumerate(CAPTIONS):
        source = next(folder / name for folder in folders if (folder / name).is_file())
        with Image.open(source) as photo:
            yield label, name, photo.copy()


def _variants(label: int, name: str, photo: Image.Image) -> Iterator[dict[str, bytes]]:
    """The whole photograph and three crops of it, as JPEG, WebP, JPEG and PNG in turn."""
    w, h = photo.size
    boxes = {
        "whole": (0, 0, w, h),
        "left": (0, 0, w * 2 // 3, h),
        "right": (w // 3, 0, w, h),
        "middle": (w // 4, h // 4, w * 3 // 4, h * 3 // 4),
    }
    for turn, (crop, box) in enumerate(boxes.items()):
        extension = ["jpg", "webp", "jpg", "png"][(turn + label) % 4]
        encoded = io.BytesIO()
        photo.crop(box).save(encoded, FORMATS[extension], quality=90, icc_profile=None)
        part = (box[2] - box[0]) * (box[3] - box[1]) / (w * h)
        yield {
            extension: encoded.getvalue(),
            "txt": CAPTIONS[name].encode(),
            "json": json.dumps({"source": name, "crop": crop, "part": round(part, 3)}).encode(),
            "cls": str(label).encode(),
        }


def _add(tar: tarfile.TarFile, key: str, members: dict[str, bytes]) -> None:
    for extension, content in members.items():
        info = tarfile.TarInfo(f"{key}.{extension}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
