"""``progress``: lines that say how many tasks and images are done, few of them in a file."""

from __future__ import annotations

import asyncio
import io
import re
import threading
import time

import dask
import numpy as np
import pandas as pd
import pytest
from hashes import random_hashes
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest import computing
from dask_image_ingest.curate import table_plan

pytestmark = pytest.mark.slow

RATE = r" \([\d,]+/s\)"
LINE = (
    rf"(\d+)/(\d+) tasks in \d+ s(?:, (\d+) images decoded{RATE})?"
    rf"(?:, (\d+) images not decoded{RATE})?(?:, (\d+) samples written{RATE})?"
    r"(?:, about \d+ s left)?"
)

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


@pytest.mark.more
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


@pytest.mark.parametrize("on_cluster", [pytest.param(False, marks=pytest.mark.more), True])
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
    monkeypatch.setattr(table_plan, "_ALL", 1e9)  # as if all with all were too costly
    scheduler = request.getfixturevalue("client") if on_cluster else "synchronous"
    hashes = random_hashes(np.random.default_rng(0), 3000)
    table = pd.DataFrame(
        {"number": range(3000), "fingerprint.pdq": [one.tobytes().hex() for one in hashes]}
    )
    out = io.StringIO()
    with dask.config.set(scheduler=scheduler), dii.progress(out):
        dii.curate.find_duplicates(table, keep="first", identity="number")
    assert re.search(r", 3,000 rows searched \([\d,]+/s\)", out.getvalue())


def test_vectors_are_counted_once_however_often_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(computing, "_PATIENCE", 0.0)
    table = pd.DataFrame({"number": range(60), "vector": list(np.eye(20).repeat(3, axis=0))})
    out = io.StringIO()
    with dask.config.set(scheduler="synchronous"), dii.progress(out):
        dii.curate.find_semantic_duplicates(table, column="vector", keep="first", identity="number")
    assert re.search(r", 60 rows searched \([\d,]+/s\)", out.getvalue())


def test_a_terminal_has_one_line(monkeypatch):
    monkeypatch.setattr(computing, "_EVERY", 0.1)
    out = Terminal()
    # The line of the inner one would be a second.
    with dask.config.set(scheduler="synchronous"), dii.progress(out), dii.progress(out):
        computing.one_task_per_item(slow, range(10))
    assert out.getvalue().count("\n") == 1
    moments = [moment.strip() for moment in out.getvalue().strip().split("\r")]
    assert len(moments) >= 3
    assert all(re.fullmatch(LINE, moment) for moment in moments), moments
    done = [int(moment.partition("/")[0]) for moment in moments]
    assert done == sorted(done)
    assert re.match(rf"{done[-1]}/{done[-1]} tasks", moments[-1])


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "image-ingest-progress"]
