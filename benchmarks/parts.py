"""Boxes, tiles and rows of them, beside the same by hand.

    python benchmarks/parts.py [boxes] [tiles] [rows]

Boxes: 24 synthetic photographs of 3 and of 12 megapixels as JPEG, 1 and 8 boxes of 256 x 256 each.
By hand: simplejpeg decodes each picture once, and boxes are sliced; or DALI decodes each box.
Tiles: a TIFF of 4096 x 4096 in tiles of 256, compressed by deflate; by hand: tifffile decodes all
of it, or a segment for each tile. Rows: a million boxes and a million tiles of 10,000 pictures that
have a header, and no pixels to decode.

Each way is a process of its own, after one call with a small picture: seconds of the processor, the
best of three, and the most memory beyond that before. FiftyOne's patches are exported by a decode
of each picture and slices, as by hand; it needs a server of MongoDB, and is left out.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import _checkout  # noqa: F401
import dask
import numpy as np
from _shards import add

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

PICTURES, SIDE, TILE, TIFF_SIDE, ROUNDS = 24, 256, 256, 4096, 3
SHAPES = {"3 MP": (1500, 2000), "12 MP": (3000, 4000)}
ROWS, PER_PICTURE = 1_000_000, 100


def main() -> None:
    if len(sys.argv) > 3:
        return run(*sys.argv[1:])
    wanted = sys.argv[1:] or ["boxes", "tiles", "rows"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "boxes" in wanted:
            small = write_boxes(folder / "small.tar", photographs(300, 400), 1)
            for shape, (height, width) in SHAPES.items():
                files = photographs(height, width)
                for boxes in (1, 8):
                    path = write_boxes(folder / "boxes.tar", files, boxes)
                    for way in ("boxes", "boxes by simplejpeg", "boxes by DALI"):
                        spawn(way, path, small, f"{shape}, {boxes} a picture")
        if "tiles" in wanted:
            path, small = (write_tiff(folder / str(side), side) for side in (TIFF_SIDE, TILE))
            for way in ("tiles", "tiles by tifffile, whole", "tiles by tifffile's segments"):
                spawn(way, path, small, f"{TIFF_SIDE} x {TIFF_SIDE}")
        if "rows" in wanted:
            path, small = (write_headers(folder / f"{rows}.tar", rows) for rows in (ROWS, 1_000))
            for way in ("rows of boxes", "rows of tiles"):
                spawn(way, path, small, "filtered, moved, joined")
    return None


def spawn(way: str, *arguments: str) -> None:
    subprocess.run([sys.executable, __file__, way, *arguments], check=True)


def run(way: str, path: str, small: str, what: str) -> None:
    dask.config.set(scheduler="synchronous")
    function = WAYS[way]
    function(small)
    gc.collect()
    before, best, count = peak(), float("inf"), 0
    for _ in range(1 if way.startswith("rows") else ROUNDS):
        start = process_time()
        result = function(path)
        best = min(best, process_time() - start)
        count = result if isinstance(result, int) else len(result)
        del result
    each = 1e3 * best / count
    print(
        f"{way:29} {what:23} {count:9,}: {best:6.2f} s, {each:7.3f} ms each, "
        f"{peak() - before:6.0f} MiB",
        flush=True,
    )


def peak() -> float:
    """The most memory of this process so far, MiB; of `getrusage` it would be the parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def photographs(height: int, width: int) -> list[bytes]:
    from synthetic import encode

    return [encode(enlarged(height, width, seed)) for seed in range(4)]


def enlarged(height: int, width: int, seed: int) -> Any:
    from PIL import Image
    from synthetic import photograph

    small = photograph(height // 4, width // 4, seed)
    return small.resize((width, height), Image.Resampling.BICUBIC)


def write_boxes(path: Path, files: list[bytes], boxes: int) -> str:
    from PIL import Image

    rng = random.Random(0)
    width, height = Image.open(io.BytesIO(files[0])).size
    with tarfile.open(path, "w") as tar:
        for number in range(PICTURES):
            corners = [
                (rng.randrange(width - SIDE), rng.randrange(height - SIDE)) for _ in range(boxes)
            ]
            found = json.dumps({"boxes": [[x, y, x + SIDE, y + SIDE] for x, y in corners]})
            add(tar, f"{number:03d}.jpg", files[number % len(files)])
            add(tar, f"{number:03d}.json", found.encode())
    return str(path)


def write_tiff(folder: Path, side: int) -> str:
    import tifffile

    folder.mkdir()
    picture = np.asarray(enlarged(side, side, 0))
    tifffile.imwrite(
        folder / "a.tif", picture, tile=(TILE, TILE), compression="deflate", photometric="rgb"
    )
    return str(folder)


def write_headers(path: Path, rows: int) -> str:
    """Pictures of 5120 x 5120 that end behind their header, with 100 boxes each."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (5120, 5120)).save(file, "JPEG")
    header = file.getvalue()[:700]
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(rows // PER_PICTURE):
            corners = rng.integers(0, 5000, (PER_PICTURE, 2))
            boxes = np.concatenate([corners, corners + 100], axis=1).tolist()
            add(tar, f"{number:06d}.jpg", header)
            add(tar, f"{number:06d}.json", json.dumps({"boxes": boxes}).encode())
    return str(path)


def references(path: str) -> Any:
    import dask_image_ingest as dii

    fields = {"boxes": "list<float32[4]>"}
    return dii.read_webdataset_images(path, decode=False, json_fields=fields, backend="pandas")


def boxes(path: str) -> Any:
    import dask_image_ingest as dii

    rows = references(path)[["__key__", "json.boxes", "image"]].explode("json.boxes")
    return dii.decode_images(rows, box="json.boxes").compute()


def pictures(path: str) -> Iterator[tuple[bytes, list[list[int]]]]:
    """The JPEG and the boxes of each sample, read by hand."""
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member).read()
            if member.name.endswith(".jpg"):
                jpeg = content
            else:
                yield jpeg, json.loads(content)["boxes"]


def boxes_by_hand(path: str) -> list[np.ndarray]:
    import simplejpeg

    crops = []
    for jpeg, boxes in pictures(path):
        image = simplejpeg.decode_jpeg(jpeg, colorspace="RGB")
        crops += [image[top:bottom, left:right].copy() for left, top, right, bottom in boxes]
    return crops


def boxes_by_dali(path: str) -> list[np.ndarray]:
    from nvidia.dali import fn, pipeline_def, types

    items = []
    for jpeg, boxes in pictures(path):
        data = np.frombuffer(jpeg, np.uint8)
        items += [(data, box) for box in boxes]

    @pipeline_def(
        batch_size=64,
        num_threads=1,
        device_id=None,
        prefetch_queue_depth=1,
        exec_async=False,
        exec_pipelined=False,
    )
    def regions() -> Any:
        files = fn.external_source(name="files", dtype=types.UINT8, ndim=1)
        boxes = fn.external_source(name="boxes", dtype=types.INT32, ndim=1)
        return fn.decoders.image_slice(
            files, start=boxes[:2], end=boxes[2:], axes=(0, 1), device="cpu"
        )

    pipeline = regions()
    pipeline.build()
    crops = []
    for start in range(0, len(items), 64):
        batch = items[start : start + 64]
        pipeline.feed_input("files", [jpeg for jpeg, _ in batch])
        pipeline.feed_input(
            "boxes", [np.array([y, x, b, r], np.int32) for _, (x, y, r, b) in batch]
        )
        (images,) = pipeline.run()
        crops += [np.array(images[row]) for row in range(len(batch))]
    return crops


def tiles(folder: str) -> Any:
    import dask_image_ingest as dii

    rows = dii.read_images(folder, decode=False, backend="pandas").images.tiles(TILE)
    return dii.decode_images(rows).compute()


def tiles_by_tifffile(folder: str) -> list[np.ndarray]:
    import tifffile

    image = tifffile.imread(os.path.join(folder, "a.tif"))
    side = len(image)
    corners = [(y, x) for y in range(0, side, TILE) for x in range(0, side, TILE)]
    return [image[y : y + TILE, x : x + TILE].copy() for y, x in corners]


def tiles_by_segments(folder: str) -> list[np.ndarray]:
    import tifffile

    with tifffile.TiffFile(os.path.join(folder, "a.tif")) as tiff:
        return [segment[0] for segment in tiff.pages[0].segments(maxworkers=1)]


def rows_of_boxes(path: str) -> int:
    return moved(references(path)[["__key__", "json.boxes", "image"]].explode("json.boxes"))


def rows_of_tiles(path: str) -> int:
    return moved(references(path)[["__key__", "height", "width", "image"]].images.tiles(512))


def moved(rows: Any) -> int:
    """Rows that are filtered, shuffled, joined and sampled; how many there were."""
    import pandas as pd

    memory = int(rows.memory_usage(deep=True).sum().compute())
    labels = pd.DataFrame({"__key__": [f"{number:06d}" for number in range(9_000)], "label": 1})
    rows = rows.repartition(npartitions=8)
    some = rows[rows["__key__"] != "000007"].shuffle("__key__").merge(labels, on="__key__")
    kept = len(some.sample(frac=0.5, random_state=0).persist())
    print(f"{kept:,} rows are left; the rows before take {memory / 2**20:,.0f} MiB")
    return kept


WAYS: dict[str, Callable[[str], Any]] = {
    "boxes": boxes,
    "boxes by simplejpeg": boxes_by_hand,
    "boxes by DALI": boxes_by_dali,
    "tiles": tiles,
    "tiles by tifffile, whole": tiles_by_tifffile,
    "tiles by tifffile's segments": tiles_by_segments,
    "rows of boxes": rows_of_boxes,
    "rows of tiles": rows_of_tiles,
}


if __name__ == "__main__":
    main()
