"""The shards that the benchmarks read: photographs as JPEG, with a caption, a label and JSON."""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from PIL import Image

# In the wheels of scikit-image and scikit-learn, which the extra `demo` installs.
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "china.jpg",
    "coffee.png",
    "flower.jpg",
    "motorcycle_left.png",
    "rocket.jpg",
)
# Near the middle of ImageNet's, in pixels and in bytes.
WIDTH, HEIGHT, QUALITY = 500, 375, 92


class Sample(NamedTuple):
    """One photograph and what is said of it."""

    jpeg: bytes
    caption: str
    label: int


def make_shards(
    folder: Path, images: int, per_shard: int, sources: Sequence[str | Path] = ()
) -> list[Path]:
    """Write shards of ``images`` samples, each under a key of its own.

    The photographs are those of the tars ``sources``, or made here; they repeat if they are fewer.
    """
    samples = list(from_tars(sources) if sources else photographs())
    return write_shards(folder, islice(cycle(samples), images), per_shard)


def write_shards(folder: Path, samples: Iterator[Sample], per_shard: int) -> list[Path]:
    """Pack samples into shards of four members each: jpg, txt, json, cls."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    numbered = enumerate(samples)
    while part := list(islice(numbered, per_shard)):
        paths.append(folder / f"{len(paths):05d}.tar")
        with tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, sample in part:
                said = json.dumps({"caption": sample.caption, "number": number})
                add(tar, f"{number:08d}.jpg", sample.jpeg)
                add(tar, f"{number:08d}.txt", sample.caption.encode())
                add(tar, f"{number:08d}.json", said.encode())
                add(tar, f"{number:08d}.cls", str(sample.label).encode())
    return paths


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file of this content to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def from_tars(paths: Sequence[str | Path]) -> Iterator[Sample]:
    """The JPEG samples of some shards."""
    for path in paths:
        with tarfile.open(path) as tar:
            for number, member in enumerate(tar):
                if member.isfile() and member.name.lower().endswith((".jpg", ".jpeg")):
                    content = tar.extractfile(member).read()
                    yield Sample(content, f"{Path(path).name}, {member.name}", number % 1000)


def photographs(count: int = 210) -> Iterator[Sample]:
    """Cuttings of a few photographs, of ImageNet's usual size; always the same."""
    pictures = [(name, open_photograph(name)) for name in PHOTOGRAPHS]
    for number, (name, picture) in zip(range(count), cycle(pictures)):
        turn = number // len(pictures)
        # Each part of the picture in turn, of sizes between three and five quarters of the usual.
        scale = 0.75 + turn % 5 / 8
        width, height = (round(edge * scale) for edge in (WIDTH, HEIGHT))
        left = (picture.width - width) * (turn % 3) // 2
        top = (picture.height - height) * (turn % 4) // 3
        cutting = picture.crop((left, top, left + width, top + height))
        if turn % 2:
            cutting = cutting.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        yield Sample(as_jpeg(cutting), f"{name}, part {turn}", number % len(pictures))


def open_photograph(name: str, least: tuple[int, int] = (WIDTH * 5 // 4, HEIGHT * 5 // 4)):
    """A photograph, enlarged to this width and height at least."""
    # Their files alone: to import sklearn takes three seconds.
    folders = [
        Path(str(distribution("scikit-image").locate_file("skimage/data"))),
        Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/images"))),
    ]
    source = next(folder / name for folder in folders if (folder / name).is_file())
    with Image.open(source) as photograph:
        picture = photograph.convert("RGB")
    scale = max(1, *(b / a for a, b in zip(picture.size, least, strict=True)))
    width, height = (-(-round(edge * scale * 16) // 16) for edge in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def as_jpeg(image: Image.Image, quality: int = QUALITY) -> bytes:
    """An image as a JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
