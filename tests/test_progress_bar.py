"""``progress``: lines that say how many tasks and images are done, few of them in a file.

Slow listings say how far they are, where somebody looks; quick ones say nothing.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
import threading
import time

import dask
import numpy as np
import pandas as pd
import pytest
from faulty_server import faulty_server
from hashes import random_hashes
from synthetic import encode, photograph, write_shard
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import computing
from dask_image_ingest.cli import main
from dask_image_ingest.curate import hash_tables
from dask_image_ingest.storage import find_shards

pytestmark = pytest.mark.slow

LINE = (
    r"\[#*-*\] (\d+)/(\d+) tasks in \d+ s(?:, (\d+) images \(\d+/s\))?(?:, (\d+) bad)?"
    r"(?:, (\d+) written \(\d+/s\))?(?:, about \d+ s left)?"
)
LISTING = r"\rlisting '[^']*-{0\.\.3}\.tar': (\d+) files in \d+\.\d s"

SHARD = tar({"a.jpg": b"1"})


SECONDS_PER_LINE = 0.5


@pytest.fixture
def often(monkeypatch):
    """More lines than users get, so that no test has to wait for half a minute."""
    monkeypatch.setattr(computing, "_IN_FILE", SECONDS_PER_LINE)


def run_and_count(numbers):
    """How many lines there may be at most, by the time that it took."""
    start = time.monotonic()
    with dii.progress():
        assert computing.one_task_per_item(slow, numbers) == list(numbers)
    return (time.monotonic() - start) / SECONDS_PER_LINE + 1


def slow(number):
    time.sleep(0.15)
    return number


def lines(capsys):
    text = capsys.readouterr().err
    assert "\r" not in text
    found = [re.fullmatch(LINE, line) for line in text.splitlines()]
    assert all(found), text
    return [tuple(int(number or 0) for number in line.groups()) for line in found]


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_a_file_gets_a_line_from_time_to_time(often, capsys, scheduler):
    with dask.config.set(scheduler=scheduler, num_workers=1):
        most = run_and_count(range(14))
    told = lines(capsys)
    assert 2 <= len(told) <= most
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    assert told[-1][0] == told[-1][1]


def test_with_a_cluster_too(often, client, capsys):
    with dask.config.set(scheduler=client):
        most = run_and_count(range(20))
    told = lines(capsys)
    assert 1 <= len(told) <= most
    assert 20 <= told[-1][0] == told[-1][1]


def test_what_is_quick_or_not_to_be_shown_writes_nothing(capsys, monkeypatch):
    monkeypatch.setattr(computing, "_PATIENCE", 60.0)  # quick even on a busy machine
    with dii.progress():
        assert computing.one_task_per_item(str, [1]) == ["1"]
    assert computing.one_task_per_item(slow, range(9)) == list(range(9))
    assert capsys.readouterr().err == ""


def test_by_default_a_line_comes_twice_a_minute(capsys):
    with dask.config.set(scheduler="synchronous"), dii.progress():
        computing.one_task_per_item(slow, range(9))
    assert len(lines(capsys)) == 1  # the last


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def mixed(tmp_path):
    """Shards of 30 images, each sixth of which can't be decoded."""
    images = [encode(photograph(16, 24, number)) for number in range(30)]
    images[5::6] = [b"no image"] * 5
    named = [(f"{number:03d}.jpg", image) for number, image in enumerate(images)]
    return [
        str(write_shard(tmp_path / f"{start}.tar", dict(named[start : start + 10])))
        for start in (0, 10, 20)
    ]


def slowly(frame):
    time.sleep(0.5)
    return frame


@pytest.mark.parametrize("on_cluster", [False, True])
def test_images_and_bad_ones_are_counted(on_cluster, request, mixed):
    scheduler = request.getfixturevalue("client") if on_cluster else "synchronous"
    ddf = dii.read_webdataset_images(mixed, backend="pandas", errors="null")
    out = io.StringIO()
    with dask.config.set(scheduler=scheduler), dii.progress(out):
        for _ in range(2):
            frame = ddf.map_partitions(slowly, meta=ddf._meta).compute()
    assert len(frame) == 30
    groups = re.fullmatch(LINE, out.getvalue().strip()).groups()
    done, tasks, images, bad, written = (number and int(number) for number in groups)
    assert done == tasks >= 6
    assert written is None
    assert (images, bad) == (50, 10)


async def answers(key):
    await asyncio.sleep(0.1)
    if key.endswith("7"):
        raise ValueError(key)
    return key


@pytest.mark.parametrize("on_cluster", [False, True])
def test_rows_with_an_answer_are_counted(on_cluster, request, mixed):
    scheduler = request.getfixturevalue("client") if on_cluster else "synchronous"
    ddf = dii.read_webdataset_images(mixed, backend="pandas")
    named = ddf.images.map_rows(
        answers, {"o": "string"}, inputs=["__key__"], concurrency=2, errors="null"
    )
    out = Terminal()
    with dask.config.set(scheduler=scheduler), dii.progress(out):
        named["o"].compute()
    counts = list(map(int, re.findall(r"(\d+) rows answered \(\d+/s\)", out.getvalue())))
    assert counts[-1] == 27
    if not on_cluster:  # else they come with their task
        assert len({*counts}) > 2


def test_samples_that_an_export_writes_are_counted(mixed, tmp_path, monkeypatch):
    monkeypatch.setattr(computing, "_PATIENCE", 0.0)
    ddf = dii.read_webdataset_images(mixed, backend="pandas").drop(columns=["image", "error"])
    out = io.StringIO()
    with dask.config.set(scheduler="synchronous"), dii.progress(out):
        dii.to_webdataset(ddf, tmp_path / "out" / "{shard}.tar", samples_per_shard=10)
    assert re.fullmatch(LINE, out.getvalue().strip())[5] == "30"


@pytest.mark.parametrize("on_cluster", [False, True])
def test_hashes_are_counted_once_however_many_tables_search_them(on_cluster, request, monkeypatch):
    monkeypatch.setattr(computing, "_PATIENCE", 0.0)
    monkeypatch.setattr(hash_tables, "_ALL", 1e9)  # as if all with all were too costly
    scheduler = request.getfixturevalue("client") if on_cluster else "synchronous"
    hashes = random_hashes(np.random.default_rng(0), 3000)
    table = pd.DataFrame(
        {"number": range(3000), "fingerprint.pdq": [one.tobytes().hex() for one in hashes]}
    )
    out = io.StringIO()
    with dask.config.set(scheduler=scheduler), dii.progress(out):
        dii.curate.find_duplicates(table, keep="first", identity="number")
    assert re.search(r", 3,000 hashes searched \([\d,]+/s\)", out.getvalue())


def test_a_terminal_has_one_line_with_a_bar(monkeypatch):
    monkeypatch.setattr(computing, "_EVERY", 0.1)
    out = Terminal()
    # The line of the inner one would be a second.
    with dask.config.set(scheduler="synchronous"), dii.progress(out), dii.progress(out):
        computing.one_task_per_item(slow, range(10))
    assert out.getvalue().count("\n") == 1
    moments = [moment.strip() for moment in out.getvalue().strip().split("\r")]
    assert len(moments) >= 3
    assert all(re.fullmatch(LINE, moment) for moment in moments), moments
    lengths = [moment.count("#") for moment in moments]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 10


@pytest.fixture
def url(monkeypatch):
    """Four shards of a server that takes its time."""
    monkeypatch.setattr(computing, "_PATIENCE", 0.1)
    monkeypatch.setattr(computing, "_EVERY", 0.05)
    with faulty_server(files={f"/x-{n}.tar": SHARD for n in range(4)}, latency=0.3) as server:
        yield f"{server.url}/x-{{0..3}}.tar"


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "image-ingest-progress"]


@pytest.mark.parametrize("verb", [["describe"], ["head", "-n", "1"], ["check"]])
def test_the_command_line_shows_it_on_a_terminal(url, verb, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    main([verb[0], url, *verb[1:]])
    shown = terminal.getvalue()
    counts = list(map(int, re.findall(LISTING, shown)))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert re.search(LISTING + r" *\n", shown)  # what follows begins on a line of its own


def test_files_and_pipes_get_none_of_it(url, capsys):
    main(["describe", url, "--json"])
    captured = capsys.readouterr()
    assert "listing" not in captured.err + captured.out


def test_elsewhere_it_is_shown_inside_progress(url):
    out = Terminal()
    assert len(find_shards(url)) == 4
    with dii.progress(out):
        assert len(find_shards(url)) == 4
    assert re.findall(LISTING, out.getvalue())[-1] == "4"


def test_a_listing_that_fails_ends_its_line(url):
    out = Terminal()
    with dii.progress(out), pytest.raises(dii.ShardNotFoundError):
        find_shards(url.replace("x-", "y-"))
    assert re.search(r"\d s +\n", out.getvalue())


def test_a_quick_listing_says_nothing(tmp_path):
    (tmp_path / "a.tar").write_bytes(SHARD)
    out = Terminal()
    with dii.progress(out):
        find_shards(tmp_path)
    assert out.getvalue() == ""
