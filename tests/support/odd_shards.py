"""Shards of photographs, the last of them with samples that something is wrong with."""

from __future__ import annotations

from pathlib import Path

import dask
import pytest
from photo_shards import make_photos, write_photo_shards, write_tar

import dask_image_ingest as dii

PHOTOS = 24


def write_odd_shards(folder: Path, *more: tuple[str, bytes]) -> list[str]:
    """Good photographs, and one image that is bad, one missing, one there twice; and ``more``."""
    photos = make_photos(PHOTOS)
    jpeg = photos[0].members["jpg"]
    odd = [("bad.jpg", b"<html>"), ("bad.cls", b"1"), ("none.cls", b"3")]
    odd += [("twice.jpg", jpeg), ("twice.jpg", jpeg), ("twice.cls", b"2")]
    paths = [
        *write_photo_shards(photos, folder, 9),
        write_tar(folder / "zz-odd.tar", [*odd, *more]),
    ]
    return list(map(str, paths))


def read(shards: list[str], **options):
    """Read them small, in pandas."""
    options = {"members": {"cls": "int64", "txt": "string"}, "size": 16, **options}
    return dii.read_webdataset_images(shards, backend="pandas", **options)


@pytest.fixture(autouse=True)
def in_this_process():
    """Tasks run in the test's own thread, and shuffles are made of tasks."""
    with dask.config.set({"scheduler": "sync", "dataframe.shuffle.method": "tasks"}):
        yield
