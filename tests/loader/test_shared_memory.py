"""Pixels of a worker on this machine are mapped, never change under a reader, and leave nothing."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from forked_python import Fork, run_main, run_python
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest.frames.pixel_pool import PixelMemory, SharedBlock, map_block
from dask_image_ingest.loader import mapped_pixels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NBYTES = 3_000_000


@pytest.fixture
def ddf(shards, client):
    """Three partitions of 2 MB, on workers of this machine."""
    with dask.config.set(scheduler=None):
        yield dii.read_webdataset_images(shards, size=300, backend="pandas")


def batches(ddf):
    return [batch["image"] for batch in ddf.images.iter_batches(8, columns=[])]


def mapped():
    """Where this process maps pixels of others, by the kernel's own list."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        # What is shared for writing ("s") is this process's own.
        addresses, permissions, *_ = line.split()
        if "memfd:pixels" in line and permissions.endswith("p"):
            start, end = addresses.split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    return ranges


def is_mapped(images):
    """Whether these are pixels of another process, where that has them."""
    address = images.__array_interface__["data"][0]
    return any(address in range_ for range_ in mapped())


@pytest.fixture
def block():
    block = SharedBlock(NBYTES)
    np.frombuffer(block, np.uint8)[:] = 7
    return block


def lent(block):
    return map_block(os.getpid(), block.file, NBYTES, block.seal)


def test_pixels_of_a_worker_here_are_mapped_and_not_copied(ddf):
    for images in batches(ddf):
        assert is_mapped(images)


def test_pixels_of_workers_that_never_read_before_are_mapped_too(shards):
    workers = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**workers) as cluster, Client(cluster), dask.config.set(scheduler=None):
        ddf = dii.read_webdataset_images(shards, size=300, backend="pandas")
        for images in batches(ddf):
            assert is_mapped(images)


def test_pixels_of_filtered_rows_are_mapped_too(ddf):
    filtered = ddf.map_partitions(lambda frame: frame[np.arange(len(frame)) % 4 > 0])
    for batch in filtered.images.iter_batches(6, columns=[]):
        assert is_mapped(batch["image"])


def test_pixels_that_were_persisted_before_are_mapped_too(ddf):
    for images in batches(ddf.persist()):
        assert is_mapped(images)


def test_pixels_stay_the_same_while_anyone_looks_at_them(ddf):
    held = batches(ddf)
    for _ in range(3):
        batches(ddf)
    want = ddf.compute(scheduler="synchronous").images.arrays()
    np.testing.assert_array_equal(np.concatenate(held), np.stack(want))


def test_nothing_is_mapped_or_held_when_nobody_looks_any_more(ddf, client):
    view = batches(ddf)[1][3:5, 0]
    assert len(mapped()) == 1
    del view
    gc.collect()
    assert not mapped()
    until(lambda: not client.sync(client.scheduler.who_has), "results stayed on the workers")


def test_long_captions_are_sent_beside_pixels_that_are_mapped(ddf):
    long = ddf.map_partitions(lambda frame: frame.assign(txt=frame.txt.str.pad(300_000)))
    for batch in long.images.iter_batches(8, columns=["txt"]):
        address = batch["image"].__array_interface__["data"][0]
        assert any(address in range_ for range_ in mapped())
        assert len(batch["txt"][0]) == 300_000


def test_a_client_that_is_not_the_default_one_will_do(ddf, client):
    with Client(client.cluster, set_as_default=False) as other, dask.config.set(scheduler=other):
        assert sum(map(len, batches(ddf))) == 24


def test_a_cluster_that_answers_no_questions_sends_its_pixels(ddf, monkeypatch):
    want = np.concatenate(batches(ddf))

    def refused(*args, **kwargs):
        raise ValueError("The 'broadcast' handler has been explicitly disallowed")

    monkeypatch.setattr(Client, "run", refused)
    sent = batches(ddf)
    monkeypatch.undo()
    assert not mapped()
    np.testing.assert_array_equal(np.concatenate(sent), want)


def test_a_python_without_files_in_memory_keeps_its_own(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    memory = PixelMemory()
    array = memory.take(NBYTES, keep=0)
    assert memory.shared_block(array.ctypes.data) is None
    array[:] = 1


def test_another_machine_sends_its_pixels(ddf, monkeypatch):
    want = np.concatenate(batches(ddf))
    monkeypatch.setattr(mapped_pixels, "this_machine", lambda: "another")
    sent = batches(ddf)
    assert not mapped()
    np.testing.assert_array_equal(np.concatenate(sent), want)


def test_pixels_are_sent_where_that_is_configured(ddf):
    """So that all can be tried on one machine that happens between several."""
    want = np.concatenate(batches(ddf))
    with dask.config.set({"image-ingest.share-pixels": False}):
        sent = batches(ddf)
    assert not any(map(is_mapped, sent))
    np.testing.assert_array_equal(np.concatenate(sent), want)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="mmap keeps a descriptor before Python 3.13")
def test_what_is_borrowed_takes_no_descriptor(block):
    before = len(os.listdir("/proc/self/fd"))
    held = lent(block)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not block.claim()
    del held
    gc.collect()
    assert block.claim()


def test_pixels_that_cannot_be_mapped_are_sent(ddf, monkeypatch):
    def refuse(*_):
        raise PermissionError

    want = np.concatenate(batches(ddf))
    monkeypatch.setattr(mapped_pixels, "map_block", refuse)
    np.testing.assert_array_equal(np.concatenate(batches(ddf)), want)


def test_a_worker_that_dies_takes_no_pixels_along(ddf, client):
    held = batches(ddf)
    want = np.concatenate(held)
    reading = ddf.images.iter_batches(8, columns=[])
    first = next(reading)["image"]
    victim = next(iter(client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    got = [first, *(batch["image"] for batch in reading)]
    np.testing.assert_array_equal(np.concatenate(got), want)
    np.testing.assert_array_equal(np.concatenate(held), want)
    client.wait_for_workers(2)


def test_a_block_has_no_other_use_while_it_is_lent(block):
    view = lent(block)[100:200]
    assert not block.claim()
    del view
    gc.collect()
    assert block.claim()


def test_a_borrower_that_is_killed_holds_nothing(block, tmp_path):
    program = (
        "import sys, time; from dask_image_ingest.frames.pixel_pool import map_block;"
        f"seal = bytes.fromhex('{block.seal.hex()}');"
        f"a = map_block({os.getpid()}, {block.file}, {NBYTES}, seal);"
        "print(int(a.sum()), flush=True); time.sleep(60)"
    )
    told = tmp_path / "told"
    borrower = Fork(run_main, program, output=told, errors=told)
    until(lambda: told.read_text().endswith("\n"))
    assert int(told.read_text()) == 7 * NBYTES
    assert not block.claim()
    os.kill(borrower.pid, signal.SIGKILL)
    borrower.wait(SECONDS)
    assert block.claim()


def test_whoever_comes_too_late_gets_nothing(block):
    seal = block.seal
    assert block.claim()
    with pytest.raises(OSError, match="has released"):
        map_block(os.getpid(), block.file, NBYTES, seal)
    file = block.file
    del block
    gc.collect()
    with pytest.raises(OSError, match=r"has released|No such file|Permission|Invalid"):
        map_block(os.getpid(), file, NBYTES, seal)


def test_what_a_borrower_writes_is_its_own(block):
    view = lent(block)
    view.flags.writeable = True
    view[:] = 1
    assert set(block[:1000]) == {7}


def test_a_fork_does_not_write_where_its_parent_reads(block):
    program = (
        "import os; from dask_image_ingest.frames.pixel_pool import SharedBlock;"
        "block = SharedBlock(5000); child = os.fork();"
        "os._exit(block.claim()) if not child else None;"
        "assert os.waitpid(child, 0)[1] == 0 and block.claim()"
    )
    finished = run_python(program)
    assert finished.returncode == 0, finished.stderr


FORK = """
import os
from dask_image_ingest.frames.pixel_pool import pixel_memory

images, unused = (pixel_memory.take(3_000_000, keep=10**9) for _ in range(2))
images[:], unused[:] = 7, 1
addresses = images.ctypes.data, unused.ctypes.data
del unused
go, went = os.pipe(), os.pipe()
child = os.fork()
if not child:
    os.read(go[0], 1)
    same = (images == 7).all()
    # What the fork takes is its own.
    pixel_memory.take(3_000_000, keep=10**9)[:] = 9
    os._exit(0 if same else 1)
del images
for _ in range(3):
    again = pixel_memory.take(3_000_000, keep=10**9)
    again[:] = 8
    assert again.ctypes.data != addresses[0], "a fork looks at this memory"
    assert (again == 8).all()
os.write(go[1], b"!")
assert os.waitpid(child, 0)[1] == 0, "the images of the fork have changed"
assert addresses[1] == again.ctypes.data, "memory that nobody looks at was not used again"
"""


def test_images_of_a_fork_stay_what_they_are():
    """As in a task that starts the workers of a torch DataLoader."""
    finished = run_python(FORK)
    assert finished.returncode == 0, finished.stderr


def test_memory_that_is_lent_serves_no_new_array():
    memory = PixelMemory()
    array = memory.take(NBYTES, keep=10**9)
    array[:] = 7
    block = memory.shared_block(array.ctypes.data)
    view = lent(block)
    del array, block
    assert memory.unused
    memory.take(NBYTES, keep=10**9)[:] = 8
    assert (view == 7).all()
    memory.release()
    assert (view == 7).all()


def test_pickling_a_partition_copies_no_pixels(ddf):
    frame = ddf.get_partition(0).compute(scheduler="synchronous")
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(frame, protocol=5, buffer_callback=buffers.append)
    largest = max((buffer.raw() for buffer in buffers), key=len)
    address = np.frombuffer(largest, np.uint8).ctypes.data
    assert address == frame.images.arrays()[0].__array_interface__["data"][0]
    assert len(pickle.dumps(frame.iloc[:1])) < len(largest) / 4
