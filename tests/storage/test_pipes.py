"""Commands whose output is a shard, as webdataset runs them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import webdataset as wds
from processes import until
from tars import COMPRESSIONS, tar

import dask_image_ingest as dii
from dask_image_ingest.storage import find_shards, open_shard

ROOT = Path(__file__).parents[2]
ALLOWED = {"allow_pipes": True}


@pytest.fixture
def commands(shards):
    """One command for each of the three shards."""
    folder = shlex.quote(str(shards[0].parent))
    return f"pipe:cat {folder}/photos-{{000..002}}.tar"


def read(paths, **options):
    return dii.read_webdataset_images(paths, backend="pandas", **options)


def test_samples_are_those_that_webdataset_reads(commands):
    theirs = list(wds.WebDataset(commands, shardshuffle=False, empty_check=False))
    frame = read(commands, allow_pipes=True, members={"txt": "string", "json": "binary"})
    frame = frame.drop(columns=["image", "error"]).compute()
    assert frame["__key__"].tolist() == [sample["__key__"] for sample in theirs]
    assert frame["__url__"].tolist() == [sample["__url__"] for sample in theirs]
    assert frame["txt"].tolist() == [sample["txt"].decode() for sample in theirs]
    assert frame["json"].tolist() == [sample["json"] for sample in theirs]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_shell_runs_what_it_knows(compression, tmp_path):
    stored = COMPRESSIONS[compression](tar({"a.txt": b"1", "b.txt": b"2"}))
    (tmp_path / "a b").write_bytes(stored)
    command = f"pipe:cd {tmp_path} && VAR='a b'; cat < \"$VAR\" | cat"
    (shard,) = find_shards(command, ALLOWED)
    assert (shard.url, shard.size, shard.version) == (command, -1, "")
    with open_shard(command, ALLOWED) as content:
        assert bytes(content[:]) == tar({"a.txt": b"1", "b.txt": b"2"})


def test_a_command_has_no_input(tmp_path):
    with open_shard("pipe:cat", ALLOWED) as content:
        assert len(content) == 0


@pytest.mark.slow
def test_each_partition_runs_its_command_once(shards, tmp_path):
    log = tmp_path / "log"
    paths = [f"pipe:echo {n} >> {log}; cat {path}" for n, path in enumerate(shards)]

    def runs():
        found = log.read_text().split() if log.exists() else []
        log.write_text("")
        return found

    ddf = read(paths, allow_pipes=True, partition_size="200 KiB")
    assert ddf.npartitions == 3
    assert runs() == ["0"]
    assert len(ddf) == 24
    assert sorted(runs()) == ["0", "1", "2"]
    ddf.partitions[1].compute()
    assert runs() == ["1"]


def test_shards_beside_commands_are_split_and_these_are_not(shards):
    ddf = read([shards[0], f"pipe:cat {shards[1]}"], allow_pipes=True, partition_size="200 KiB")
    urls = [part["__url__"].iloc[0] for part in map(whole, ddf.partitions)]
    assert urls.count(f"pipe:cat {shards[1]}") == 1
    assert urls.count(str(shards[0])) > 1


def whole(partition):
    return partition[["__url__"]].compute()


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("cat {}; echo no such bucket >&2; exit 3", r"exit status 3\).*no such bucket"),
        ("cat {}; kill -9 $$", r"signal 9\).*said: nothing"),
        ("no-such-command {}", r"exit status 127\) after 0 bytes.*not found"),
    ],
)
def test_a_command_that_fails_is_an_error_though_it_wrote_all(shards, command, how):
    command = command.format(shards[1])
    with pytest.raises(dii.ShardError, match=f"the command .*{how}") as caught:
        read(f"pipe:{command}", allow_pipes=True)
    assert command[:20] in str(caught.value)
    ddf = read([shards[0], f"pipe:{command}"], allow_pipes=True, shard_errors="drop")
    with pytest.warns(UserWarning, match="skipped: the command"):
        assert len(ddf) == 8


@pytest.mark.newest
@pytest.mark.slow
def test_an_interrupt_ends_the_command_too(tmp_path):
    def interrupt(*args):
        raise KeyboardInterrupt

    evidence = tmp_path / "evidence"
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        interrupted = pytest.raises(KeyboardInterrupt)
        with interrupted, open_shard(f"pipe:(sleep 2; touch {evidence}) | cat", ALLOWED):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(2.5)
    assert not evidence.exists()


@pytest.mark.parametrize("status", [0, 3])
def test_what_a_command_leaves_in_the_background_ends_with_it(shards, tmp_path, status):
    noted = tmp_path / "pid"
    command = f"sleep 97 >/dev/null 2>&1 & echo $! > {noted}; cat {shards[0]}; exit {status}"
    if status:
        with (
            pytest.raises(dii.ShardError, match="exit status 3"),
            open_shard(f"pipe:{command}", ALLOWED),
        ):
            pass
    else:
        with open_shard(f"pipe:{command}", ALLOWED) as content:
            assert bytes(content[:]) == shards[0].read_bytes()
    until(lambda: not is_running(int(noted.read_text())))


def is_running(pid):
    try:
        told = psutil.Process(pid)
        return told.status() != psutil.STATUS_ZOMBIE and "sleep" in told.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_what_a_command_leaves_in_a_session_of_its_own_is_not_waited_for(shards, monkeypatch):
    monkeypatch.setattr("dask_image_ingest.storage.streams._POLL_EVERY", 0.5)
    began = time.monotonic()
    with open_shard(f"pipe:cat '{shards[0]}'; setsid sleep 60 & exit 0", ALLOWED) as content:
        assert bytes(content[:]) == Path(shards[0]).read_bytes()
    assert time.monotonic() - began < 30


INTERRUPTED = """
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import dask
import dask_image_ingest as dii

# A shell has programs that it starts in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
shard, command = sys.argv[1:]
# Both threads are there before the interrupt: Python never ends a program that is interrupted while
# a pool starts one, since the pool does not know the thread yet.
pool, both = ThreadPoolExecutor(2), threading.Barrier(2)
list(pool.map(lambda _: both.wait(), range(2)))
with dask.config.set(scheduler="threads", pool=pool):
    ddf = dii.read_webdataset_images([shard, command], backend="pandas", allow_pipes=True)
    ddf.compute()
"""


@pytest.mark.more
@pytest.mark.newest
@pytest.mark.slow
def test_one_interrupt_ends_a_program_and_its_command(shards, tmp_path):
    noted = tmp_path / "pid"
    command = f"pipe:echo $$ > '{noted}.new'; mv '{noted}.new' '{noted}'; exec sleep 97"
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, shards[0], command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        until(lambda: noted.exists() or program.poll() is not None)
        assert program.poll() is None
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=280)
    assert "KeyboardInterrupt" in said
    assert not is_running(int(noted.read_text()))


@pytest.mark.slow
def test_images_can_be_decoded_late(commands, photos):
    table = read(commands, allow_pipes=True).drop(columns=["image", "error"])
    some = table[table.width > 120]
    with pytest.raises(dii.ArgumentError, match="is a command"):
        dii.decode_images(some).compute()
    frame = dii.decode_images(some, allow_pipes=True).compute()
    pixels = {photo.key: photo.pixels for photo in photos}
    assert len(frame) > 5
    for key, array in zip(frame["__key__"], frame.images.arrays(), strict=True):
        assert array.shape == pixels[key].shape
        assert np.abs(array.astype(int) - pixels[key]).mean() < 3


def test_pages_of_thumbnails_ask_no_more_permission_than_the_read(commands):
    page = read(commands, allow_pipes=True).images.show(4)
    assert not [card.error for card in page.cards if card.error]


@pytest.mark.slow
def test_an_export_copies_what_commands_give(commands, shards, tmp_path):
    table = read(commands, allow_pipes=True).drop(columns=["image", "error"])
    dii.to_webdataset(table, tmp_path / "a" / "{shard:03d}.tar", samples_per_shard=10)
    plain = read(shards).drop(columns=["image", "error"])
    dii.to_webdataset(plain, tmp_path / "b" / "{shard:03d}.tar", samples_per_shard=10)
    for n in range(3):
        name = f"{n:03d}.tar"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_nothing_else_than_true_is_a_permission(commands):
    for options in (None, {}, {"allow_pipes": 1}, {"allow_pipes": "true"}, {"allow_pipes": False}):
        with pytest.raises(dii.ArgumentError, match="is a command"):
            find_shards(commands, options)
    with pytest.raises(dii.ArgumentError, match="allow_pipes="):
        read(commands, allow_pipes="yes")


def test_the_permission_reaches_no_file_system(tmp_path):
    data = tar({"a.txt": b"1"})
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("x.tar", data)
    (shard,) = find_shards(f"zip://x.tar::{tmp_path}/x.zip", ALLOWED)
    with open_shard(shard.url, ALLOWED) as content:
        assert bytes(content[:]) == data
