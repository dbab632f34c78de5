"""How far the pixels of DALI's resize, which a GPU uses, are from those of the CPU's and of Pillow.

Images of shards are decoded by Pillow, then resized with ``resize="stretch"`` by this package on
the CPU, by DALI (its operators for a CPU, which stand for those for a GPU: not run on a GPU yet)
and by Pillow. The filter is the same, but at an edge DALI repeats the outermost pixels of the
image, and the others give all weight to the pixels that there are: so the outermost pixels of the
result are counted apart.

    python benchmarks/resizers.py SHARD.tar ...
"""

import argparse
import io
import itertools
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import _checkout  # noqa: F401
import numpy as np
from PIL import Image

from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.decode.resize import ResizedImage

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from witnesses import resized_by_dali, resized_by_pillow

BATCH = 64

# Outermost pixels of the result to which a filter reaches from outside of the image.
EDGES = {"bilinear": 1, "bicubic": 2, "lanczos": 3}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", nargs="+", type=Path, help="tar files of photographs")
    parser.add_argument("--images", type=int, default=400, help="at most (default 400)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 64, 24])
    parser.add_argument("--interpolation", choices=EDGES, default="bilinear")
    arguments = parser.parse_args()
    images = list(itertools.islice(photographs(arguments.shards), arguments.images))
    print(f"{len(images)} images; levels of 255: at most, and in the mean (of the worst image)\n")
    print("| size | beside | all pixels | outermost | the rest |")
    print("|---:|---|---:|---:|---:|")
    for size in arguments.sizes:
        rows, took = compare(images, size, arguments.interpolation)
        for name, counts in rows.items():
            print(f"| {size} | {name} | {' | '.join(map(text, counts))} |")
        times = ", ".join(f"{name} {seconds * 1e3 / len(images):.2f}" for name, seconds in took)
        print(f"{size}: processor time of an image, ms: {times}", file=sys.stderr)


def photographs(shards: list[Path]) -> Iterator[np.ndarray]:
    """The JPEGs of shards, as RGB."""
    for path in shards:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.lower().endswith((".jpg", ".jpeg")):
                    content = tar.extractfile(member).read()
                    yield np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def compare(
    images: list[np.ndarray], size: int, filter: str
) -> tuple[dict[str, list[np.ndarray]], list[tuple[str, float]]]:
    """Largest and mean difference of each image: all pixels, the outermost, and the rest."""
    ways: dict[str, Callable] = {
        "DALI": lambda some: resized_by_dali(some, size=(size, size), interpolation=filter),
        "the CPU": lambda some: [
            np.asarray(ResizedImage(image, geometry, filter)) for image in some
        ],
        "Pillow": lambda some: [
            resized_by_pillow(image, (size, size), Image.Resampling[filter.upper()])
            for image in some
        ],
    }
    geometry, edge = DecodeSpec(size=(size, size)).geometry(size, size), EDGES[filter]
    seconds = dict.fromkeys(ways, 0.0)
    outermost = np.ones((size, size), bool)
    outermost[edge:-edge, edge:-edge] = False
    parts = np.ones((size, size), bool), outermost, ~outermost
    found: dict[str, list[list]] = {"the CPU": [[], [], []], "Pillow": [[], [], []]}
    for first in range(0, len(images), BATCH):
        batch = images[first : first + BATCH]
        made = {}
        for name, way in ways.items():
            start = time.process_time()
            made[name] = way(batch)
            seconds[name] += time.process_time() - start
        for name, counts in found.items():
            for image, other in zip(made["DALI"], made[name], strict=True):
                apart = np.abs(image.astype(np.int16) - other)
                for part, count in zip(parts, counts, strict=True):
                    count.append((apart[part].max(), apart[part].mean()))
    arrays = {name: [np.array(count) for count in counts] for name, counts in found.items()}
    return arrays, list(seconds.items())


def text(counts: np.ndarray) -> str:
    largest, mean = counts.T
    return f"{largest.max():.0f}, {mean.mean():.2f} ({mean.max():.2f})"


if __name__ == "__main__":
    main()
