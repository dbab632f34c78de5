"""Without DALI, Pillow decodes on a CPU: the same rows, pixels and errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from nvidia.dali import fn
from odd_shards import in_this_process, read, write_odd_shards  # noqa: F401

import dask_image_ingest as dii
from dask_image_ingest.decode import dali
from dask_image_ingest.errors import MissingDependencyError


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_odd_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def no_dali(monkeypatch):
    """An environment that lacks DALI."""
    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        monkeypatch.setitem(sys.modules, name, None)
    caches = (dali.dali, dali.has_dali)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


OPTIONS = {
    "at their size": {"size": None},
    "resized": {"size": 32},
    "grey": {"size": 32, "mode": "L"},
    "cropped at random": {"size": 32, "augment": "random_resized_crop"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_images_are_those_of_a_read_with_dali(options, shards, no_dali, monkeypatch):
    lazy = read(shards, **OPTIONS[options])
    with pytest.warns(UserWarning, match="Pillow decodes all images.*dask-image-ingest.cpu"):
        without = lazy.compute()
    monkeypatch.undo()
    dali.dali.cache_clear()
    dali.has_dali.cache_clear()
    with_dali = lazy.compute()

    assert without.error.tolist() == with_dali.error.tolist()
    pairs = zip(without.images.arrays(), with_dali.images.arrays(), strict=True)
    compared = [pair for pair in pairs if pair[0] is not None or pair[1] is not None]
    assert len(compared) == 24
    for ours, theirs in compared:
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours.astype(int), theirs.astype(int), atol=1)


def test_what_needs_dali_says_so(shards, no_dali):
    lazy = read(shards, transform=lambda images: fn.flip(images))
    with (
        pytest.warns(UserWarning, match="Pillow decodes"),
        pytest.raises(MissingDependencyError, match=r"transform=.*dask-image-ingest\[cpu\]"),
    ):
        lazy.compute()


def test_versions_show_that_it_is_missing(no_dali):
    assert dii.versions()["dali"] is None
