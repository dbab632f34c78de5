"""DALI is fed with files where they lie, for as long as it needs them and no longer."""

import gc
import weakref

import numpy as np
import pytest
from corpus import images

from dask_image_ingest.decode import DecodeSpec

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

from dask_image_ingest.decode.dali import DaliDecoder, tensor_list

JPEGS = [images()[name] for name in ("jpeg-444", "jpeg-420", "jpeg-grey", "jpeg-progressive")]


class Watched(np.ndarray):
    """An array to which there can be weak references."""


def arrays():
    return [np.frombuffer(bytes(data), np.uint8).view(Watched) for data in JPEGS]


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
    decoder = DaliDecoder(DecodeSpec(), "encoded")
    list(decoder.run([given[:2], given[2:]]))
    del given
    gc.collect()
    assert not any(array() is not None for array in alive)
