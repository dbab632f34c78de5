"""The garbage collector is off while a tar is indexed, and never for longer."""

import gc
import threading
from contextlib import contextmanager

import pytest
from forks import in_fork

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
def on(request):
    """Whether the collector is on."""
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
