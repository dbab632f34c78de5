"""Epoch and start of loops with workers: the order is that of ``iter_batches`` in one process."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import warnings

import pytest
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

data = pytest.importorskip("torch.utils.data", reason="pip install torch==2.13.0")

pytestmark = [
    pytest.mark.torch,
    # distributed warns where a process forks whose threads run.
    pytest.mark.filterwarnings("ignore"),
]

NONE, SOME, LASTING = {}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}
WORKERS = [NONE, {"num_workers": 1}, SOME, LASTING]


@pytest.fixture
def ddf():
    return lazy_frame([small_frame(range(at, at + 5)) for at in (0, 5, 10, 15)])


def keys(batches):
    return [batch["key"].tolist() for batch in batches]


def dataloader(ddf, start=0, **options):
    return ddf.images.dataloader(3, shuffle=3, start=start, **options)


def mixed(ddf, start=0, **options):
    """torch's own loader: nothing of it tells the dataset that a loop begins."""
    batches = dii.mix_batches([ddf, ddf], 3, format="torch", shuffle=3, start=start)
    return data.DataLoader(batches, batch_size=None, **options)


def whole(way, ddf, epoch):
    if way is mixed:
        return keys(dii.mix_batches([ddf, ddf], 3, shuffle=3, epoch=epoch))
    return keys(ddf.images.iter_batches(3, shuffle=3, epoch=epoch))


@pytest.mark.parametrize("way", [dataloader, mixed])
def test_start_holds_for_the_first_loop_and_the_process_knows_where_each_one_is(ddf, way):
    epochs = [whole(way, ddf, epoch) for epoch in range(3)]
    position = list(way(ddf).dataset.position_after(2))
    for workers in WORKERS:
        for start in (2, position):
            loader = way(ddf, start, **workers)
            for epoch, begun in ((0, 2), (0, 0), (1, 0), (2, 0)):
                loader.dataset.set_epoch(epoch)
                assert keys(loader) == epochs[epoch][begun:], (workers, start)
                reached = loader.dataset.position_after(1)
                assert (reached.epoch, reached.row) == (epoch, 3 * begun + 3), (workers, start)


@pytest.mark.parametrize("workers", [NONE, SOME, LASTING], ids=str)
def test_a_loop_that_is_left_early_begins_again_and_another_goes_on_beside_it(ddf, workers):
    import torch

    loader, (first, second) = dataloader(ddf, 2, **workers), [whole(None, ddf, e) for e in (0, 1)]
    for begun in (2, 0, 0):
        torch.manual_seed(0)  # with which workers would not be told apart by their seeds
        assert next(iter(loader))["key"].tolist() == first[begun]
    if workers is not LASTING:
        some = iter(loader)
        seen = keys([next(some)])
        loader.dataset.set_epoch(1)
        assert keys(loader) == second
        assert seen + keys(some) == first


def test_an_epoch_that_is_set_in_a_loop_is_the_next_also_for_a_late_worker(ddf, monkeypatch):
    from dask_image_ingest.loader import dataloader as module

    may_begin, set_up = multiprocessing.get_context("fork").Event(), module.set_up_worker

    def late():
        set_up()
        if data.get_worker_info().id == 1:
            assert may_begin.wait(60)

    monkeypatch.setattr(module, "set_up_worker", late)
    may_begin.set()
    loader = dataloader(ddf, multiprocessing_context="fork", **LASTING)
    keys(loader)
    may_begin.clear()
    loader.set_epoch(1)
    batches = iter(loader)
    seen = keys([next(batches)])
    loader.set_epoch(2)
    may_begin.set()
    assert seen + keys(batches) == whole(None, ddf, 1)
    assert keys(loader) == whole(None, ddf, 2)


def test_batches_in_any_order_are_refused_as_a_state_could_not_tell_which_came(ddf):
    with pytest.raises(dii.ArgumentError, match="in_order=False"):
        dataloader(ddf, in_order=False, **SOME)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_no_forks_have_the_same_loops(ddf, context):
    epochs = [whole(None, ddf, epoch) for epoch in range(2)]
    loader = dataloader(ddf, 2, multiprocessing_context=context, **SOME)
    assert keys(loader) == epochs[0][2:]
    loader.set_epoch(1)
    assert keys(loader) == epochs[1]
    assert loader.dataset.position_after(2).row == 6


@pytest.mark.parametrize("workers", [NONE, SOME], ids=str)
def test_a_state_is_that_of_the_batches_that_were_taken_for_any_workers(ddf, workers):
    epochs = [whole(None, ddf, epoch) for epoch in range(2)]
    states, loader = [], dataloader(ddf, **workers)
    states.append(loader.state_dict())
    loader.set_epoch(1)
    states.extend(loader.state_dict() for _ in loader)
    assert [state["position"][:2] for state in states[1:]] == [
        [1, min(3 * done, 20)] for done in range(1, 8)
    ]
    for done in (1, 6):
        state = json.loads(json.dumps(states[done + 1]))
        for others in (NONE, LASTING):
            loader = dataloader(ddf, **others)
            keys(loader)  # workers of an earlier loop, with which it has nothing to do
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert keys(loader) == epochs[1][done + 1 :]
            loader.set_epoch(0)
            assert keys(loader) == epochs[0]
    loader = dataloader(ddf, **workers)
    loader.load_state_dict(states[0])
    assert keys(loader) == epochs[0]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_the_end_of_an_epoch_is_followed_by_any_other_and_the_middle_by_itself(ddf, workers):
    epochs = [whole(None, ddf, epoch) for epoch in range(3)]
    finished, stopped = dataloader(ddf, **workers), dataloader(ddf, **workers)
    keys(finished)
    batches = iter(stopped)
    keys([next(batches), next(batches)])
    end, middle = finished.state_dict(), stopped.state_dict()
    del batches

    loader = dataloader(ddf, **workers)
    loader.load_state_dict(end)
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert keys(loader) == epochs[epoch]

    loader = dataloader(ddf, **workers)
    loader.load_state_dict(middle)
    loader.set_epoch(1)
    with pytest.raises(dii.ArgumentError, match=r"in the middle of epoch 0.*set_epoch\(1\)"):
        keys(loader)
    for epoch, begun in ((0, 2), (1, 0)):
        loader.set_epoch(epoch)
        assert keys(loader) == epochs[epoch][begun:]
        assert loader.dataset.position_after(1).row == 3 * begun + 3


@pytest.mark.parametrize(
    "state", [{}, {"position": 3}, {"position": "3"}, {"position": [0, 3, 4, 20, "x"]}], ids=str
)
def test_a_state_of_something_else_is_refused_at_once(ddf, state):
    with pytest.raises(dii.ArgumentError, match=r"no state of such a loader|start="):
        dataloader(ddf).load_state_dict(state)


def test_a_position_at_the_end_is_the_start_of_any_later_epoch(ddf):
    end = dataloader(ddf).dataset.position_after(100)
    for workers in (NONE, SOME):
        loader = dataloader(ddf, end, **workers)
        assert keys(loader) == []
        loader.set_epoch(1)
        assert keys(loader) == whole(None, ddf, 1)
        loader = dataloader(ddf, end, **workers)
        loader.set_epoch(1)
        assert keys(loader) == whole(None, ddf, 1)
        middle = dataloader(ddf).dataset.position_after(2)
        loader = dataloader(ddf, middle, **workers)
        loader.set_epoch(1)
        with pytest.raises(dii.ArgumentError, match="in the middle of epoch 0"):
            keys(loader)
        loader.set_epoch(0)
        assert keys(loader) == whole(None, ddf, 0)[2:]


def test_a_loop_over_a_mix_begins_again_after_a_break_with_and_without_workers(ddf):
    for workers in (NONE, SOME):
        loader = mixed(ddf, **workers)
        assert [next(iter(loader))["key"].tolist()] == whole(mixed, ddf, 0)[:1]
        assert keys(loader) == whole(mixed, ddf, 0)
    loader.dataset.set_epoch(1)
    assert keys(loader) == whole(mixed, ddf, 1)


def test_copies_have_loops_of_their_own(ddf):
    loader = dataloader(ddf, 2)
    copied = pickle.loads(pickle.dumps(loader.dataset))
    for dataset in (loader.dataset, copied):
        assert keys(dataset) == whole(None, ddf, 0)[2:]
        assert keys(dataset) == whole(None, ddf, 0)


@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}],
    ids=str,
)
def test_without_a_process_group_no_variable_takes_rows_away(ddf, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for way in (dataloader, mixed):
        for workers in (NONE, SOME):
            loader = way(ddf, **workers)
            batches = keys(loader)
            assert (len(loader), batches) == (len(batches), whole(way, ddf, 0))


def test_a_part_that_is_passed_holds_in_workers(ddf):
    shares = [keys(dataloader(ddf, shard=(rank, 2), **SOME)) for rank in range(2)]
    assert [len(share) for share in shares] == [4, 4]
    for rank, share in enumerate(shares):
        assert share == keys(ddf.images.iter_batches(3, shuffle=3, shard=(rank, 2)))
    assert keys(dataloader(ddf, shard=None)) == whole(None, ddf, 0)
    with pytest.raises(dii.ArgumentError, match=r"shard=\(2, 2\)"):
        dataloader(ddf, shard=(2, 2))


def repetitions_told(loader, epochs):
    """How often a loop over each epoch is said to be the one before it; None sets no epoch."""
    told = []
    for epoch in epochs:
        if epoch is not None:
            loader.dataset.set_epoch(epoch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                pass
        told.append(sum("same random crops" in str(each.message) for each in caught))
    return told


@pytest.mark.parametrize("workers", [NONE, SOME], ids=str)
def test_a_second_loop_with_the_same_order_is_told_once(ddf, workers):
    assert repetitions_told(dataloader(ddf, **workers), [0, 1, None, None]) == [0, 0, 1, 0]


def test_it_is_told_of_crops_and_mixes_and_not_of_an_evaluation(ddf, shards):
    read = {"size": 8, "backend": "pandas"}
    plain = dii.read_webdataset_images(shards, **read)
    crops = dii.read_webdataset_images(shards, augment="random_resized_crop", **read)
    assert repetitions_told(mixed(ddf), [None, None, None]) == [0, 1, 0]
    assert repetitions_told(crops.images.dataloader(9, columns=[]), [None] * 3) == [0, 1, 0]
    assert repetitions_told(plain.images.dataloader(9, columns=[]), [None] * 3) == [0, 0, 0]
    assert repetitions_told(dataloader(ddf), [0, 0]) == [0, 0], "it was asked for"
