"""What DALI is fed with: the files where they lie, for as long as it needs them and no longer."""

import gc
import weakref

import numpy as np
import pytest
from corpus import images

from dask_image_ingest.dataset.scan.samples import SampleRows
from dask_image_ingest.decode import Decoding

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

from dask_image_ingest import read_webdataset_images
from dask_image_ingest.decode.dali import BatchPipeline, Decoder, tensor_list

JPEGS = [images()[name] for name in ("jpeg-444", "jpeg-420", "jpeg-grey", "jpeg-progressive")]


class Watched(np.ndarray):
    """An array to which there can be weak references."""


def arrays():
    return [np.frombuffer(bytes(data), np.uint8).view(Watched) for data in JPEGS]


def test_a_tensor_list_gives_the_pixels_that_arrays_give(monkeypatch):
    (fed,) = Decoder(Decoding(), "encoded").run([arrays()])
    monkeypatch.setattr(Decoder, "_as_input", lambda _, batch: batch)
    (witness,) = Decoder(Decoding(), "encoded").run([arrays()])
    assert len(fed) == len(witness) == len(JPEGS)
    for mine, theirs in zip(fed, witness, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_a_tensor_list_keeps_the_files_alive_and_shares_their_memory():
    given = arrays()
    alive = [weakref.ref(array) for array in given]
    address = given[0].__array_interface__["data"][0]
    made = tensor_list(given)
    del given
    gc.collect()
    assert all(array() is not None for array in alive)
    assert np.asarray(made[0]).__array_interface__["data"][0] == address
    del made
    gc.collect()
    assert not any(array() is not None for array in alive)


def test_files_are_let_go_of_when_they_are_decoded():
    given = arrays()
    alive = [weakref.ref(array) for array in given]
    decoder = Decoder(Decoding(), "encoded")
    list(decoder.run([given[:2], given[2:]]))
    del given
    gc.collect()
    assert not any(array() is not None for array in alive)


def test_the_table_is_made_while_images_are_decoded(shards, monkeypatch):
    steps = []

    def noted(owner, name):
        method = getattr(owner, name)

        def noting(*args, **kwargs):
            steps.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    monkeypatch.setattr("dask_image_ingest.decode.planner._FIRST_BATCH", {"cpu": 2})
    noted(SampleRows, "table")
    noted(BatchPipeline, "schedule")
    noted(BatchPipeline, "collect")
    frame = read_webdataset_images(shards[0], backend="pandas").compute()
    assert frame["image"].notna().any()
    first = steps.index("table")
    # It has begun with the second batch, and nobody has waited for it.
    assert steps[:first].count("schedule") > steps[:first].count("collect")
    assert steps.count("table") == 1
