"""``progress``: lines that say how many tasks and images are done, few of them in a file."""

from __future__ import annotations

import io
import re
import time

import dask
import pytest
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest import computing, progress_bar

LINE = (
    r"(\d+)/(\d+) tasks in \d+ s(?:, (\d+) images \(\d+/s\))?(?:, (\d+) bad)?"
    r"(?:, about \d+ s left)?"
)


SECONDS_PER_LINE = 0.5


@pytest.fixture
def often(monkeypatch):
    """More lines than users get, so that no test has to wait for half a minute."""
    monkeypatch.setattr(progress_bar, "_IN_FILE", SECONDS_PER_LINE)


def run_and_count(numbers):
    """How many lines there may be at most, by the time that it took."""
    start = time.monotonic()
    assert computing.run(slow, numbers, show=True) == list(numbers)
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


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_a_file_gets_a_line_from_time_to_time(often, capsys, scheduler):
    with dask.config.set(scheduler=scheduler, num_workers=1):
        most = run_and_count(range(14))
    told = lines(capsys)
    assert 2 <= len(told) <= most
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.slow
def test_with_a_cluster_too(often, client, capsys):
    with dask.config.set(scheduler=client):
        most = run_and_count(range(20))
    told = lines(capsys)
    assert 1 <= len(told) <= most
    assert 20 <= told[-1][0] == told[-1][1]


def test_what_is_quick_or_not_to_be_shown_writes_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "_PATIENCE", 60.0)  # quick even on a busy machine
    assert computing.run(str, [1], show=True) == ["1"]
    assert computing.run(slow, range(9), show=False) == list(range(9))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_by_default_a_line_comes_twice_a_minute(capsys):
    computing.run(slow, range(9), show=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("on_cluster", [False, True])
def test_images_and_bad_ones_are_counted(on_cluster, request, mixed):
    scheduler = request.getfixturevalue("client") if on_cluster else "synchronous"
    ddf = dii.read_webdataset_images(mixed, backend="pandas", errors="null")
    out = io.StringIO()
    with dask.config.set(scheduler=scheduler), dii.progress(out):
        for _ in range(2):
            frame = ddf.map_partitions(slowly, meta=ddf._meta).compute()
    assert len(frame) == 30
    done, tasks, images, bad = map(int, re.fullmatch(LINE, out.getvalue().strip()).groups())
    assert done == tasks >= 6
    assert (images, bad) == (50, 10)


@pytest.mark.slow
def test_a_terminal_has_one_line_with_a_bar(monkeypatch):
    monkeypatch.setattr(progress_bar, "_EVERY", 0.1)
    out = Terminal()
    with dask.config.set(scheduler="synchronous"), dii.progress(out):
        computing.run(slow, range(10), show=True)  # whose own line would be a second one
    assert out.getvalue().count("\n") == 1
    moments = [moment.strip() for moment in out.getvalue().strip().split("\r")]
    found = [re.fullmatch(r"\[(#*)-*\] " + LINE, moment) for moment in moments]
    assert len(found) >= 3
    assert all(found), moments
    lengths = [len(moment[1]) for moment in found]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 10
