"""An iterator of batches and a fork of its process: an answer or an error, and never a wait."""

import dask
import pytest
from processes import in_fork

import dask_image_ingest as dii


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, size=16, backend="pandas")


def is_refused(batches):
    with pytest.raises(dii.ArgumentError, match=r"cannot be used after a fork.*start="):
        next(batches)
    return 0


def keys(batches):
    return [key for batch in batches for key in batch["__key__"]]


@pytest.mark.slow
@pytest.mark.parametrize(("prefetch", "shuffle"), [(None, None), (0, None), (2, None), (None, 1)])
def test_an_iterator_that_was_begun_is_refused_in_a_fork_and_goes_on_outside(
    ddf, prefetch, shuffle
):
    whole = keys(ddf.images.iter_batches(5, shuffle=shuffle))
    batches = ddf.images.iter_batches(5, prefetch=prefetch, shuffle=shuffle)
    before = next(batches)["__key__"].tolist()

    def answer():
        is_refused(batches)
        batches.close()
        assert batches.position == position
        return 0

    position = batches.position
    assert in_fork(answer) == 0
    assert before + keys(batches) == whole
    # At its end nothing of it is left here, and a loop in a fork begins again.
    assert in_fork(lambda: len(keys(batches)) - len(whole)) == 0


@pytest.mark.slow
def test_an_iterator_that_was_not_begun_may_begin_in_a_fork(ddf):
    frame = ddf.drop(columns=["error"])
    batches = frame.images.iter_batches(5, start=2)
    assert batches.position == (0, 10, None, None, None)
    assert in_fork(lambda: len(keys(batches))) == 14
    assert len(keys(batches)) == 14


def test_a_frame_in_memory_is_iterated_in_a_fork(ddf):
    batches = ddf.compute().images.iter_batches(5)
    assert len(next(batches)["__key__"]) == 5
    assert in_fork(lambda: len(keys(batches))) == len(keys(batches)) > 10


@pytest.mark.slow
def test_shards_are_read_in_a_fork_of_the_process_of_a_client(ddf, shards, client):
    def read():
        again = dii.read_webdataset_images(shards, size=16, backend="pandas")
        with dask.config.set(scheduler="synchronous"):
            assert len(again.compute()) == 24
        return len(keys(ddf.images.iter_batches(5)))

    with dask.config.set(scheduler=None):
        assert in_fork(read) == len(keys(ddf.images.iter_batches(5)))


@pytest.mark.slow
def test_an_iterator_of_a_cluster_is_refused_in_a_fork(ddf, client):
    with dask.config.set(scheduler=None):
        begun, waiting = ddf.images.iter_batches(5), ddf.images.iter_batches(5, start=1)
        count = len(next(begun)["__key__"])
        assert in_fork(lambda: is_refused(begun)) == 0
        assert in_fork(lambda: is_refused(waiting)) == 0
        assert count + len(keys(begun)) == 5 + len(keys(waiting))
