"""Real photographs from the scikit-learn and scikit-image wheels, cut up and packed into shards."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from PIL import Image

_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@dataclass(frozen=True)
class Photo:
    """One sample: its key, its encoded image, and what lies beside it."""

    key: str
    extension: str
    encoded: bytes
    caption: str
    label: int
    similarity: float

    @property
    def members(self) -> dict[str, bytes]:
        """The sample's members by extension."""
        fields = {"similarity": self.similarity, "source": {"name": self.key}}
        return {
            self.extension: self.encoded,
            "txt": self.caption.encode(),
            "cls": str(self.label).encode(),
            "json": json.dumps(fields).encode(),
        }

    @property
    def pixels(self) -> np.ndarray:
        """What Pillow decodes."""
        return np.asarray(Image.open(io.BytesIO(self.encoded)).convert("RGB"))


def make_photos(count: int) -> list[Photo]:
    """``count`` crops of photographs, each of another size, always the same."""
    # Their files alone: to import sklearn takes three seconds.
    sklearn = Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/images")))
    skimage = Path(str(distribution("scikit-image").locate_file("skimage/data")))
    files = [sklearn / "china.jpg", sklearn / "flower.jpg", skimage / "astronaut.png"]
    sources = [Image.open(file).convert("RGB") for file in files]
    random = np.random.default_rng(7)
    photos = []
    for number in range(count):
        source = sources[number % len(sources)]
        width, height = (int(random.integers(80, 320)) for _ in range(2))
        left = int(random.integers(0, source.width - width))
        top = int(random.integers(0, source.height - height))
        crop = source.crop((left, top, left + width, top + height))
        extension = ("jpg", "jpg", "png", "jpg", "webp")[number % 5]
        photos.append(
            Photo(
                key=f"folder.v1/{number:05d}",
                extension=extension,
                encoded=encode(crop, extension),
                caption=f"photograph {number} of {width} × {height}",
                label=number % 4,
                similarity=round(number / count, 3),
            )
        )
    return photos


def encode(image: Image.Image, extension: str = "jpg") -> bytes:
    """An image in a format, at a quality that keeps decoders close to each other."""
    file = io.BytesIO()
    image.save(file, _FORMATS[extension], quality=92)
    return file.getvalue()


def write_photo_shards(photos: list[Photo], folder: Path, per_shard: int) -> list[Path]:
    """Pack photographs into shards."""
    paths = []
    for number, start in enumerate(range(0, len(photos), per_shard)):
        members = (
            (f"{photo.key}.{extension}", content)
            for photo in photos[start : start + per_shard]
            for extension, content in photo.members.items()
        )
        paths.append(write_tar(folder / f"photos-{number:03d}.tar", members))
    return paths


def write_tar(path: Path, members: Iterable[tuple[str, bytes]] | Mapping[str, bytes]) -> Path:
    """Write a tar of files."""
    pairs = members.items() if isinstance(members, Mapping) else members
    with tarfile.open(path, "w") as tar:
        for name, content in pairs:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
