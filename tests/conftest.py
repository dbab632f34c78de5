"""Shards of real photographs, made once for all tests."""

from pathlib import Path

import dask
import pytest

pytest.register_assert_rewrite("contract")


@pytest.fixture(scope="session")
def photos():
    """24 photographs with captions, labels and JSON, in JPEG, PNG and WebP."""
    # Here, since they come out of packages that a GPU machine may not have.
    from photo_shards import make_photos

    return make_photos(24)


@pytest.fixture(scope="session")
def shards(photos, tmp_path_factory) -> list[Path]:
    """The photographs in 3 shards of 8."""
    from photo_shards import write_photo_shards

    return write_photo_shards(photos, tmp_path_factory.mktemp("shards"), per_shard=8)


@pytest.fixture(autouse=True)
def synchronous():
    """Tests run tasks in their own thread, unless they or their module have a client."""
    if dask.config.get("scheduler", None) is None:
        with dask.config.set(scheduler="synchronous"):
            yield
    else:
        yield
