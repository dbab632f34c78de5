"""Speed of reading a shard's metadata on one core: the tar scan, and the table made from it.

The shard lies in memory and has four members per sample: a JPEG, a caption, JSON and a label. The
table has keys, offsets, sizes, captions, and what each JPEG's header tells. Peers: tarfile's own
walk, and a table made of webdataset's samples with Pillow reading the headers.

    python benchmarks/metadata.py
"""

import argparse
import io
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

from _shards import Sample as Photograph
from _shards import as_jpeg, open_photograph, write_shards
from PIL import Image

from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.samples import SampleRows
from dask_image_ingest.dataset.schema.columns import (
    ImageMember,
    make_schema,
    parse_image_extensions,
)
from dask_image_ingest.decode.decode_spec import MAX_PIXELS, DecodeSpec
from dask_image_ingest.storage import MemoryReader
from dask_image_ingest.tar import IMAGE_EXTENSIONS, index_tar

COLUMNS = ("__key__", "offset", "nbytes", "txt", "format", "height", "width", "channels", "error")
MEMBERS_PER_SAMPLE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000, help="default 20,000")
    parser.add_argument("--repeats", type=int, default=7, help="of each (default 7)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = small_shard(Path(folder), arguments.samples)
        shard = path.read_bytes()
        seconds = measure(shard, path, arguments.repeats)
    samples, members = arguments.samples, arguments.samples * MEMBERS_PER_SAMPLE
    print(f"{samples:,} samples, {members:,} members; Python {sys.version.split()[0]}; per core")
    print("| | per second | of the peer |\n|---|---:|---:|")
    line("tar scan, members", members, seconds["index_tar"], seconds["tarfile"])
    line("tarfile, members", members, seconds["tarfile"])
    line("table of index samples", samples, seconds["table"], seconds["peer"])
    line(
        "scan and table, samples", samples, seconds["index_tar"] + seconds["table"], seconds["peer"]
    )
    line("webdataset + Pillow's headers, samples", samples, seconds["peer"])


def line(what: str, count: int, seconds: float, peer: float | None = None) -> None:
    print(f"| {what} | {count / seconds:,.0f} | {f'{peer / seconds:.1f} ×' if peer else ''} |")


def measure(shard: bytes, path: Path, repeats: int) -> dict[str, float]:
    """Seconds of this process's processor time for each way, the median of some runs."""
    content = MemoryReader(shard)
    index = index_tar(content)
    images = parse_image_extensions(IMAGE_EXTENSIONS)
    options = ReadOptions((ImageMember("image", images, DecodeSpec(max_pixels=MAX_PIXELS)),))
    schema = make_schema(index, content, images={"image": images})
    member_columns = schema.select(COLUMNS)

    def table():
        rows = SampleRows(path.name, content, index, options, member_columns)
        return rows.table(COLUMNS, rows.numbers)

    ways: dict[str, Callable] = {
        "index_tar": lambda: index_tar(content),
        "table": table,
        "tarfile": lambda: tarfile.TarFile(fileobj=io.BytesIO(shard)).getmembers(),
        "peer": lambda: webdataset_headers(path),
    }
    for way in ways.values():
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time()
            way()
            found[name].append(time.process_time() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def webdataset_headers(path: Path) -> list[tuple]:
    """Keys, captions and sizes of a shard, as one would read them without this package."""
    try:
        import webdataset
    except ImportError:
        return []
    return [
        (sample["__key__"], sample["txt"].decode(), Image.open(io.BytesIO(sample["jpg"])).size)
        for sample in webdataset.WebDataset([os.fspath(path)], shardshuffle=False)
    ]


def small_shard(folder: Path, samples: int) -> Path:
    """A shard of thumbnails: what is measured does not depend on how large images are."""
    thumbnails = []
    for name in ("astronaut.png", "china.jpg", "flower.jpg"):
        picture = open_photograph(name)
        picture.thumbnail((64, 64))
        thumbnails.append(Photograph(as_jpeg(picture), f"a thumbnail of {name}, in words", 7))
    return write_shards(folder, islice(cycle(thumbnails), samples), samples)[0]


if __name__ == "__main__":
    main()
