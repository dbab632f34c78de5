"""A model is built once in a process, and what nobody uses any more is let go."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections import Counter

import pytest
from small_frames import lazy_frame, small_frame

from dask_image_ingest.ops import batch_function
from dask_image_ingest.ops.batch_function import Models


class Adds:
    """A model that writes down when it is built, where its token does not see it."""

    def __init__(self, number):
        self.number = number
        with open(os.environ["MODELS_BUILT"], "a") as file:
            file.write(f"{number}\n")

    def __call__(self, images):
        return images.max(axis=(1, 2, 3)) + self.number


@pytest.fixture(autouse=True)
def models(monkeypatch):
    """Those of a fresh process."""
    fresh = Models()
    monkeypatch.setattr("dask_image_ingest.ops.batch_function._models", [fresh])
    return fresh


@pytest.fixture
def built(monkeypatch, tmp_path):
    """How often each model was built."""
    path = tmp_path / "built"
    path.touch()
    monkeypatch.setenv("MODELS_BUILT", str(path))
    return lambda: Counter(map(int, path.read_text().split()))


def chained(count, partitions=6):
    frame = lazy_frame([small_frame([part]) for part in range(partitions)])
    for number in range(count):
        model = functools.partial(Adds, number)
        frame = frame.images.map_batches(model, {f"m{number}": "int64"}, keep_image=True)
    return frame[[f"m{number}" for number in range(count)]]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_models_that_take_turns_are_built_once(count, scheduler, built):
    query = chained(count)
    frame = query.compute(scheduler=scheduler)
    for number in range(count):
        assert frame[f"m{number}"].tolist() == [part + number for part in range(6)]
    query.compute(scheduler=scheduler)
    assert built() == Counter(range(count))


@pytest.mark.slow
def test_models_that_are_used_no_more_are_let_go(built):
    frame = small_frame([1])
    for number in range(40):
        frame.images.map_batches(functools.partial(Adds, number), {"m": "int64"})
    gc.collect()
    alive = {each.number for each in gc.get_objects() if type(each) is Adds}
    assert alive == set(range(32, 40))
    assert built().total() == 40


def test_threads_that_need_a_model_at_once_build_one(models):
    barrier, built = threading.Barrier(8), []

    def make():
        time.sleep(0.05)
        built.append(1)
        return object()

    def get(place):
        barrier.wait()
        got[place] = models.get("token", make)

    got = [None] * 8
    threads = [threading.Thread(target=get, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == len(set(map(id, got))) == 1


def test_a_model_may_use_another_when_it_is_built(models):
    def one():
        """As a constructor does that computes something of a frame."""
        thread = threading.Thread(target=models.get, args=("other", lambda: "other"), daemon=True)
        thread.start()
        thread.join(20)
        return "one" if not thread.is_alive() else "waits"

    assert models.get("one", one) == "one"
    assert models.get("other", one) == "other"


def test_a_model_that_can_not_be_built_is_tried_again(models):
    def fails():
        raise OSError("no weights")

    for _ in range(2):
        with pytest.raises(OSError, match="no weights"):
            models.get("token", fails)
    assert models.get("token", lambda: "built") == "built"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_models_of_its_own_and_waits_for_no_thread_of_its_parent(monkeypatch):
    monkeypatch.undo()  # the cache of the process, which its forks know
    caches = batch_function._models
    models = caches[-1]
    begun, done = threading.Event(), threading.Event()

    def slow():
        begun.set()
        done.wait()
        return "of the parent"

    first = models.get("first of this test", lambda: "of the parent")
    thread = threading.Thread(target=models.get, args=("second of this test", slow))
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        names = ("first of this test", "second of this test")
        got = [caches[-1].get(name, lambda: "of the child") for name in names]
        os._exit(0 if got == ["of the child"] * 2 else 1)
    try:
        status = None
        for _ in range(600):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the fork waits for a lock that nobody releases")
    finally:
        done.set()
        thread.join()
    assert status == 0
    assert first == models.get("second of this test", str) == "of the parent"
