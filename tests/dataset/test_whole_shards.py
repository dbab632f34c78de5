"""A shard that is read in one go gives the frame that it gives when it is read bit by bit."""

import os

import numpy as np
import pandas as pd
import pytest
from corpus import bad_images, images
from photo_shards import write_tar

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import samples
from dask_image_ingest.frames import encoded_memory, pandas_backend

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

MAX_PIXELS = 1 << 22


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    """Counts the bytes that are read ahead."""
    counts = []
    preadv = os.preadv

    def counting(number, buffers, offset):
        counts.append(preadv(number, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counts


@pytest.fixture
def always(monkeypatch):
    """Images are read ahead however small they are, and however far between."""
    monkeypatch.setattr(samples, "_LEAST_WHOLE", 1)
    monkeypatch.setattr(samples, "_DENSE", 0)


def mixed(folder):
    """Good images of all formats, bad ones, and samples without any, each with a caption."""
    files = [
        *images().items(),
        *((name, data) for name, (data, _) in bad_images().items()),
    ]
    members = []
    for number, (name, data) in enumerate(files):
        members += [(f"{number:04}.jpg", data), (f"{number:04}.txt", name.encode())]
    return write_tar(folder / "mixed.tar", [*members, ("last.txt", b"no image")])


def read(path, **options):
    return dii.read_webdataset_images(
        str(path), backend="pandas", max_pixels=MAX_PIXELS, partition_size=None, **options
    ).compute()


def assert_same(one, other):
    pixels = one.pop("image").images.arrays(), other.pop("image").images.arrays()
    pd.testing.assert_frame_equal(one, other)
    for mine, theirs in zip(*pixels, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def bit_by_bit(monkeypatch, path, ahead, **options):
    with monkeypatch.context() as patched:
        for module in (samples, samples):
            patched.setattr(module, "encoded_memory", lambda _: None)
        before = len(ahead)
        frame = read(path, **options)
        assert len(ahead) == before
        return frame


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"size": 32, "resize": "crop"}, {"filters": [("width", ">", 20)]}]
)
@pytest.mark.usefixtures("always")
def test_rows_pixels_and_errors_are_the_same(tmp_path, monkeypatch, ahead, indexed, options):
    path = mixed(tmp_path)
    if indexed:
        dii.write_index(str(path))
    wanted = bit_by_bit(monkeypatch, path, ahead, **options)
    found = read(path, **options)
    assert sum(ahead) > 0
    assert_same(found, wanted)


def test_a_shard_that_ends_too_early_keeps_its_whole_samples(tmp_path, monkeypatch, ahead, always):
    path = mixed(tmp_path)
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.warns(UserWarning, match="mixed.tar"):
        wanted = bit_by_bit(monkeypatch, path, ahead)
    with pytest.warns(UserWarning, match="mixed.tar"):
        found = read(path)
    assert sum(ahead) > 0
    assert_same(found, wanted)


def test_members_that_nobody_asked_for_are_not_read(tmp_path, ahead):
    photo, members = images()["jpeg-444"], []
    for number in range(20):
        members += [(f"{number:04}.jpg", photo), (f"{number:04}.npy", bytes(100_000))]
    path = write_tar(tmp_path / "large.tar", members)
    frame = dii.read_webdataset_images(str(path), backend="pandas")[["__key__", "image"]].compute()
    assert len(frame) == 20
    assert not ahead


def test_a_shard_that_is_large_for_a_worker_is_not_held(monkeypatch):
    monkeypatch.setattr(pandas_backend, "worker_memory", lambda: 1 << 30)
    assert len(encoded_memory(1 << 26)) >= 1 << 26
    assert encoded_memory((1 << 26) + 1) is None
    monkeypatch.setattr(pandas_backend, "worker_memory", lambda: 1 << 40)
    assert encoded_memory((1 << 28) + 1) is None
