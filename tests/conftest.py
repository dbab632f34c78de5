"""Shards of real photographs, made once for all tests."""

from pathlib import Path

import dask
import pytest
from photo_shards import Photo, make_photos, write_photo_shards


@pytest.fixture(scope="session")
def photos() -> list[Photo]:
    """24 photographs with captions, labels and JSON, in JPEG, PNG and WebP."""
    return make_photos(24)


@pytest.fixture(scope="session")
def shards(photos, tmp_path_factory) -> list[Path]:
    """The photographs in 3 shards of 8."""
    return write_photo_shards(photos, tmp_path_factory.mktemp("shards"), per_shard=8)


@pytest.fixture(autouse=True)
def synchronous():
    """Tests run tasks in their own thread, unless they say otherwise."""
    with dask.config.set(scheduler="synchronous"):
        yield
