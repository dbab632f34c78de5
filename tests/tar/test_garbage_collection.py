"""The garbage collector is off while a tar is indexed, and never for longer."""

import gc
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
from processes import in_fork

from dask_image_ingest.tar import garbage_collection
from dask_image_ingest.tar.garbage_collection import gc_paused


@contextmanager
def another_thread_inside():
    """While a thread is where the collector is paused."""
    inside, done = threading.Event(), threading.Event()

    def walk():
        with gc_paused():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=walk)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture(params=[True, False])
def on(request, monkeypatch):
    """Whether the collector is on; the clock stands still, or a busy machine would end a pause."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(garbage_collection, "time", clock)
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_a_fork_has_the_collector_of_its_parent(on):
    def answer():
        if gc.isenabled() is not on:
            return 1
        with gc_paused():
            if gc.isenabled():
                return 2
        return 0 if gc.isenabled() is on else 3

    assert in_fork(answer) == 0
    with another_thread_inside():
        assert not gc.isenabled()
        assert in_fork(answer) == 0
        with gc_paused():
            assert in_fork(lambda: gc.isenabled()) == 0
    assert gc.isenabled() is on


def test_a_fork_of_the_thread_that_is_inside_ends_its_own_pause(on):
    context = gc_paused()
    context.__enter__()

    def answer():
        if gc.isenabled():
            return 1
        context.__exit__(None, None, None)
        return 0 if gc.isenabled() is on else 2

    with another_thread_inside():
        assert in_fork(answer) == 0
    context.__exit__(None, None, None)
    assert gc.isenabled() is on


def test_the_last_thread_that_leaves_turns_it_on(on):
    with another_thread_inside():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is on


def test_a_pause_ends_after_a_second_and_the_next_begins_after_a_rest(on, monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(garbage_collection, "time", clock, raising=False)
    with another_thread_inside():
        for _ in range(3):
            with gc_paused():
                now[0] += 0.9
            assert not gc.isenabled()
            with gc_paused():
                now[0] += 0.2
                assert not gc.isenabled()
            assert gc.isenabled() is on
            now[0] += 0.05
            with gc_paused():
                assert gc.isenabled() is on
            now[0] += 0.1
            with gc_paused():
                assert not gc.isenabled()
        now[0] += 1.1
        with gc_paused():
            assert gc.isenabled() is on
    assert gc.isenabled() is on


@pytest.mark.newest
@pytest.mark.slow
def test_the_collector_runs_though_some_thread_is_always_inside():
    runs = []

    def note(phase, _):
        runs.append(time.monotonic())

    gc.callbacks.append(note)
    try:
        last = gc_paused()
        last.__enter__()
        began = time.monotonic()
        while time.monotonic() < began + 4:
            following = gc_paused()
            following.__enter__()
            last.__exit__(None, None, None)
            last = following
            kept = [[] for _ in range(1000)]
            time.sleep(0.01)
        last.__exit__(None, None, None)
    finally:
        gc.callbacks.remove(note)
    seen = [began, *runs, time.monotonic()]
    assert kept
    assert max(b - a for a, b in pairwise(seen)) < 2
