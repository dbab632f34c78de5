"""Images that are shown as one array are one buffer, or a copy."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import dask_image_ingest as dii  # noqa: F401 - registers .images
from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.pandas_backend import flat_views, stack_views

SHAPE = (4, 5, 3)
SIZE = 4 * 5 * 3


@pytest.fixture
def backend():
    return get_backend("pandas")


def frame_over(memory, backend):
    """A frame of images that lie in this memory."""
    count = len(memory) // SIZE
    table = pa.table({"__key__": [str(n) for n in range(count)]})
    shapes = np.full((count, 3), SHAPE, np.int32)
    return backend.frame(table, np.arange(count), Pixels(memory, shapes, [None] * count))


def test_buffers_that_happen_to_be_neighbours_are_not_taken_for_one(backend):
    """An allocator may put one partition right behind another, and take either back."""
    memory = np.random.default_rng(0).integers(0, 256, 6 * SIZE, np.uint8)
    want = memory.reshape(6, *SHAPE).copy()
    parts = [frame_over(memory[start : start + 2 * SIZE], backend) for start in (0, 120, 240)]
    frame = pd.concat(parts)
    stacked = frame.images.stack()
    (batch,) = (batch["image"] for batch in frame.images.iter_batches(6, columns=[]))
    shown = []
    frame.images.map_batches(lambda images: shown.append(images) or [0] * 6, {"o": "int64"})
    del parts, frame
    memory[:] = 0
    for images in (stacked, batch, shown[0]):
        np.testing.assert_array_equal(images, want)


def test_an_array_over_one_buffer_keeps_all_of_it(backend):
    memory = np.random.default_rng(1).integers(0, 256, 4 * SIZE, np.uint8)
    frame = frame_over(memory, backend)
    stacked = frame.images.stack()
    assert np.shares_memory(stacked, memory)
    for images in (frame.iloc[1:3].images.stack(), frame.iloc[[2]].images.stack()):
        assert images.shape[1:] == SHAPE
    np.testing.assert_array_equal(stacked, memory.reshape(4, *SHAPE))


def test_arrays_that_own_their_memory_are_copied(backend):
    arrays = [np.full(SHAPE, n, np.uint8) for n in range(3)]
    images = stack_views(arrays, backend)
    assert not any(np.shares_memory(images, array) for array in arrays)
    np.testing.assert_array_equal(images, np.stack(arrays))


def on_a_device(memory, address):
    """What `stack_views` looks at in a CuPy array."""
    return SimpleNamespace(
        shape=(2, 2, 1),
        dtype=np.dtype("uint8"),
        nbytes=4,
        strides=(2, 1, 1),
        data=SimpleNamespace(mem=memory),
        __cuda_array_interface__={"data": (address, False)},
    )


@pytest.mark.parametrize(("memories", "copied"), [((1, 1), False), ((1, 2), True)])
def test_the_same_holds_for_memory_on_a_device(memories, copied):
    library = SimpleNamespace(
        stack=lambda arrays: "copied",
        lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=lambda *_: "not copied")),
    )
    arrays = [on_a_device(memory, 100 + 4 * n) for n, memory in enumerate(memories)]
    got = stack_views(arrays, SimpleNamespace(numpy=library))
    assert got == ("copied" if copied else "not copied")


def test_runs_are_all_pixels_in_as_few_arrays_as_there_are_stretches_of_memory(backend):
    memory = np.random.default_rng(2).integers(0, 256, 8 * SIZE, np.uint8)
    first, second = frame_over(memory[: 5 * SIZE], backend), frame_over(memory[5 * SIZE :], backend)
    arrays = [*first.images.arrays(), *second.images.arrays()]
    alone = np.full((2, 7, 3), 9, np.uint8)
    given = [*arrays[:2], arrays[4], alone, alone, *arrays[5:]]
    found = list(flat_views(given, backend))
    assert [run.size for run in found] == [2 * SIZE, SIZE, alone.size, alone.size, 3 * SIZE]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate([a.ravel() for a in given]))
    assert np.shares_memory(found[0], memory)
    assert list(flat_views([], backend)) == []


def test_images_of_several_shapes_are_one_run(backend):
    memory = np.arange(3 * (2 + 6 + 4), dtype=np.uint8)
    shapes = np.array([(1, 2, 3), (0, 0, 0), (2, 3, 3), (4, 1, 3)], np.int32)
    pixels = Pixels(memory, shapes, [None, "why", None, None])
    table = pa.table({"__key__": ["a", "b", "c", "d"]})
    images = backend.frame(table, np.arange(4), pixels).images.arrays()
    (run,) = flat_views([array for array in images if array is not None], backend)
    np.testing.assert_array_equal(run, memory)
