"""Pictures and their captions: a small model learns which caption fits which picture.

    python examples/07_captions.py [FOLDER]

Writes shards of pictures of one shape each, with captions such as "a small red disc on the left",
to FOLDER (default: demo-captions); every tenth caption is of another picture. A ridge regression in
NumPy learns the words of a caption from simple features of the picture. It then finds the captions
of pictures that it has not seen, and the captions that are wrong. CLIP takes its place.
"""

import io
import sys
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

import dask_image_ingest as dii

COLOURS = {"red": (210, 60, 50), "green": (60, 170, 70), "blue": (60, 80, 200)}
COLOURS |= {"yellow": (220, 200, 60)}
SHAPES = ("disc", "square", "diamond")
PLACES = {"left": (0.5, 0.3), "right": (0.5, 0.7), "top": (0.3, 0.5), "bottom": (0.7, 0.5)}
SIZES = {"small": 0.14, "large": 0.24}
WORDS = np.array([*COLOURS, *SHAPES, *PLACES, *SIZES])
SIDE, GRID, ANGLES, SHARDS, PER_SHARD = 64, 4, 8, 5, 160

Images = Sequence[np.ndarray] | np.ndarray
Model = tuple[np.ndarray, np.ndarray, np.ndarray]


def main(folder: str = "demo-captions") -> None:
    write_shards(Path(folder))
    ddf = dii.read_webdataset_images(f"{folder}/*.tar", backend="pandas")
    seen, unseen = ddf.partitions[:-1], ddf.partitions[-1:]

    outputs = {"features": "list<float32>", "words": "list<float32>"}
    pairs = seen.images.map_batches(describe, outputs, inputs=("image", "txt"))[list(outputs)]
    pairs = pairs.compute()
    model = learn(np.stack(pairs["features"]), np.stack(pairs["words"]))

    fit = partial(fits, model=model)
    scored = unseen.images.map_batches(fit, {"score": "float32"}, inputs=("image", "txt"))
    scored = scored[["score", "cls"]].compute()
    wrong = scored["cls"].to_numpy() == 1
    lowest = np.argsort(scored["score"].to_numpy())[: wrong.sum()]
    print(f"{wrong[lowest].mean():.0%} of the wrong captions have the lowest scores")

    right = unseen[unseen["cls"] == 0]
    captions = sorted(set(right["txt"].compute()))
    choose = partial(best, captions=captions, model=model)
    chosen = right.images.map_batches(choose, {"chosen": "string"})[["txt", "chosen"]].compute()
    found = (chosen["txt"] == chosen["chosen"]).mean()
    print(f"{found:.0%} of the pictures find their caption among {len(captions)}")


def describe(images: Images, captions: list[str]) -> dict[str, np.ndarray]:
    """Features of pictures, and the words of their captions: what the model learns from."""
    return {"features": features(images), "words": words(captions)}


def fits(images: Images, captions: list[str], model: Model) -> np.ndarray:
    """How well each picture and its caption fit, 1 at best: the cosine of their words."""
    return (predicted(images, model) * directions(words(captions), model)).sum(axis=1)


def best(images: Images, captions: list[str], model: Model) -> np.ndarray:
    """The one of some captions that fits each picture best."""
    scores = predicted(images, model) @ directions(words(captions), model).T
    return np.array(captions)[scores.argmax(axis=1)]


def features(images: Images) -> np.ndarray:
    """Colour, place, extent and edges of what is no background: float32 (pictures, 44)."""
    pixels = np.stack(list(images)).astype(np.float32) / 255
    apart = np.abs(pixels - np.median(pixels, axis=(1, 2), keepdims=True)).sum(axis=3)
    shown = (apart > 0.4).astype(np.float32)
    area = shown.sum(axis=(1, 2))[:, None] + 1
    colour = (pixels * shown[..., None]).sum(axis=(1, 2)) / area
    cell = SIDE // GRID
    grid = shown.reshape(len(shown), GRID, cell, GRID, cell).sum(axis=(2, 4)).reshape(-1, GRID**2)
    steps = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    soft = np.minimum(apart, 0.8)
    soft = np.mean([np.roll(soft, step, axis=(1, 2)) for step in steps], axis=0)
    rows, columns = np.gradient(soft, axis=(1, 2))
    # Opposite edges have one direction.
    angle = (np.arctan2(rows, columns) / np.pi * ANGLES).round().astype(int) % ANGLES
    strength = np.hypot(rows, columns)
    edges = np.stack([(strength * (angle == a)).sum(axis=(1, 2)) for a in range(ANGLES)], axis=1)
    edges /= edges.sum(axis=1, keepdims=True) + 1
    return np.concatenate(
        [colour, grid / cell**2, grid / area, np.sqrt(area) / SIDE, edges], axis=1
    )


def words(captions: list[str]) -> np.ndarray:
    """1 for each word of WORDS that a caption has: float32 (captions, words)."""
    return np.array([np.isin(WORDS, caption.split()) for caption in captions], np.float32)


def learn(x: np.ndarray, y: np.ndarray, ridge: float = 0.1) -> Model:
    """A linear map from features to words: its weights, and the means of both."""
    of_x, of_y = x.mean(axis=0), y.mean(axis=0)
    x, y = x - of_x, y - of_y
    return np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y), of_x, of_y


def predicted(images: Images, model: Model) -> np.ndarray:
    weights, mean, _ = model
    return unit((features(images) - mean) @ weights)


def directions(words: np.ndarray, model: Model) -> np.ndarray:
    return unit(words - model[2])


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"captions-{shard:06d}.tar", "w") as tar:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                picture, caption = scene(random)
                wrong = number % 10 == 0
                while wrong and caption == (other := scene(random)[1]):
                    pass
                file = io.BytesIO()
                picture.save(file, "JPEG")
                text = (other if wrong else caption).encode()
                members = {"jpg": file.getvalue(), "txt": text, "cls": str(int(wrong)).encode()}
                for name, data in members.items():
                    member = tarfile.TarInfo(f"{number:06d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def scene(random: np.random.Generator) -> tuple[Image.Image, str]:
    """A noisy picture of one shape, and what it shows."""
    colour, shape, place, size = (
        str(random.choice(list(each))) for each in (COLOURS, SHAPES, PLACES, SIZES)
    )
    y, x = (np.array(PLACES[place]) + random.normal(0, 0.03, 2)) * SIDE
    rows, columns = np.abs(np.mgrid[:SIDE, :SIDE] - np.array([y, x])[:, None, None])
    distance = {"disc": np.hypot(rows, columns), "square": np.maximum(rows, columns)}
    distance["diamond"] = (rows + columns) / np.sqrt(2)
    radius = SIZES[size] * SIDE * random.uniform(0.85, 1.15)
    picture = np.full((SIDE, SIDE, 3), random.uniform(60, 160, 3))
    picture[distance[shape] < radius] = np.array(COLOURS[colour]) * random.uniform(0.8, 1.2)
    picture += random.normal(0, 12, picture.shape)
    image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    return image, f"a {size} {colour} {shape} on the {place}"


if __name__ == "__main__":
    main(*sys.argv[1:])
