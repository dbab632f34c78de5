"""A small file that claims to be a large picture is an error row, and memory stays where it was."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib

import pytest
from corpus import bad_images, images, picture, save
from handmade import PNG_SIGNATURE, png_chunk
from photo_shards import write_tar

pytestmark = pytest.mark.slow

# What reading the bombs may add to the peak, of which most is Python's and DALI's own unrest.
ROOM = 64 << 20


def bombs() -> dict[str, bytes]:
    """Name → a file that would take gigabytes if it were believed."""
    found = {name: data for name, (data, code) in bad_images().items() if code == "too-large"}
    plain = images()["png-rgb-8"]
    zeros = compressed_zeros(1 << 30)
    before, after = plain[:33], plain[33:]
    found["png-iccp"] = before + png_chunk(b"iCCP", b"profile\0\0" + zeros) + after
    found["png-ztxt"] = before + png_chunk(b"zTXt", b"Comment\0\0" + zeros) + after
    found["png-itxt"] = before + png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + zeros) + after
    header = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    found["png-large-and-cut"] = (
        PNG_SIGNATURE + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", b"") + plain[-12:]
    )
    gif = save(picture("P"), "GIF")
    found["gif-canvas"] = gif[:6] + struct.pack("<HH", 65_535, 65_535) + gif[10:]
    tiff = save(picture("1"), "TIFF")
    at = tiff.index(struct.pack("<HHI", 256, 4, 1)) + 8 if b"II" in tiff[:2] else 0
    found["tiff-width"] = tiff[:at] + struct.pack("<I", 2_000_000_000) + tiff[at + 4 :]
    # A tile of 65,520 x 32,768.
    tile = [(324, 4, 200), (325, 4, 1000), (322, 4, 65_520), (323, 4, 32_768)]
    plain = [(256, 4, 8), (257, 4, 8), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1)]
    entries = b"".join(struct.pack("<HHII", *tag[:2], 1, tag[2]) for tag in sorted(plain + tile))
    head = b"II*\0" + struct.pack("<IH", 8, 10) + entries
    found["tiff-tile"] = head.ljust(200, b"\0") + zlib.compress(bytes(1 << 20))
    return found


def compressed_zeros(size: int) -> bytes:
    """As ``zlib.compress(bytes(size))``: the same block many times, which takes no time to make."""
    deflate = zlib.compressobj(9, wbits=-15)
    block = deflate.compress(bytes(1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    # Adler-32: of zeros the first sum stays 1, and the second one counts them.
    checksum = struct.pack(">HH", size % 65_521, 1)
    return b"\x78\xda" + block * (size >> 20) + deflate.flush() + checksum


SCRIPT = """
import json, resource, sys
import dask_image_ingest as dii
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def read(path):
    return dii.read_webdataset_images(path, backend="pandas").compute(scheduler="synchronous")
read(sys.argv[1])
before = peak()
frame = read(sys.argv[2])
error = frame["error"].astype(object).where(frame["error"].notna(), None)
print(json.dumps([peak() - before, dict(zip(frame["__key__"], error))]))
"""


def read_in_a_process(clean, path):
    # A new Python: a fork shares pages with its parent, and its peak is not its own.
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, clean, path], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    sound = {f"{name}.img": data for name, data in images().items() if "1x1" not in name}
    return write_tar(tmp_path_factory.mktemp("bombs") / "clean.tar", sound)


@pytest.mark.newest
def test_bombs_are_error_rows_and_memory_stays_where_it_was(clean, tmp_path):
    """In a process of its own, whose peak the system counts."""
    files = {f"{name}.img": data for name, data in bombs().items()}
    path = write_tar(tmp_path / "bombs.tar", files)
    growth, errors = read_in_a_process(clean, path)
    assert list(errors) == list(bombs())
    # The picture is sound where only what is told beside it is a bomb.
    sound = {name for name in errors if name.startswith(("png-iccp", "png-ztxt", "png-itxt"))}
    assert {name for name, error in errors.items() if error is None} <= sound
    assert growth < ROOM + sum(map(len, files.values())), f"{growth / 2**20:.0f} MiB"
