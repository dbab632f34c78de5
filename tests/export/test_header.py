"""Headers are those of Python's tarfile, byte for byte, where USTAR holds the name."""

from __future__ import annotations

import io
import random
import tarfile

import numpy as np
import pytest

from dask_image_ingest.export.write_shards import (
    headers,
    padding,
    room_for_members,
    tar_size,
)


def made_by_tarfile(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def random_name(rng: random.Random) -> str:
    folder = "".join(rng.choice("ab./-_ ") for _ in range(rng.choice([0, 10, 60]))).strip("/")
    return f"{folder}/{rng.randrange(10**9)}.jpg".lstrip("/")


def test_plain_headers_are_those_of_tarfile():
    rng = random.Random(1)
    names = [random_name(rng) for _ in range(500)]
    names += ["n" * 100, "f" * 155 + "/" + "n" * 100, "f" * 50 + "/" + "n" * 99]
    sizes = np.array([rng.randrange(2 ** rng.randrange(1, 33)) for _ in names])
    made = headers(names, sizes, np.arange(len(names)))
    for name, size, header in zip(names, sizes.tolist(), made, strict=True):
        assert bytes(header) == made_by_tarfile(name, size)


@pytest.mark.parametrize(
    ("name", "size"),
    [("é.jpg", 3), ("n" * 101, 0), ("n" * 500 + ".jpg", 10), ("a.jpg", 8**11), ("ü", 9 * 2**30)],
)
def test_odd_headers_are_read_by_tarfile(name, size):
    [header] = headers([name], np.array([size]), np.array([7]))
    info = tarfile.TarFile(fileobj=io.BytesIO(bytes(header) + bytes(1024))).next()
    assert (info.name, info.size, info.offset_data) == (name, size, len(header))


def test_the_size_of_an_archive_is_that_of_tarfile():
    for size in (0, 1, 512, 513, 8704, 8705, 9216, 10240, 100_000):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            info = tarfile.TarInfo("a")
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
        members = 512 + size + int(padding(np.array([size]))[0])
        assert len(out.getvalue()) == tar_size(members)
        assert members <= room_for_members(tar_size(members))
        assert members > room_for_members(tar_size(members) - 1)
