"""``progress=True`` where standard error is a file: few lines, and those say something."""

from __future__ import annotations

import re
import time

import dask
import pytest

from dask_image_ingest import progress

LINE = r"(\d+) of (\d+) tasks are done after \d+ s(?:, about \d+ s left)?"


SECONDS_PER_LINE = 0.5


@pytest.fixture
def often(monkeypatch):
    """More lines than users get, so that no test has to wait for half a minute."""
    monkeypatch.setattr(progress, "_SECONDS_PER_LINE", SECONDS_PER_LINE)


def run_and_count(numbers):
    """How many lines there may be at most, by the time that it took."""
    start = time.monotonic()
    assert progress.run(slow, numbers, show=True) == list(numbers)
    return (time.monotonic() - start) / SECONDS_PER_LINE + 1


def slow(number):
    time.sleep(0.15)
    return number


def lines(capsys):
    text = capsys.readouterr().err
    assert "\r" not in text
    found = [re.fullmatch(LINE, line) for line in text.splitlines()]
    assert all(found), text
    return [tuple(map(int, line.groups())) for line in found]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_a_file_gets_a_line_from_time_to_time(often, capsys, scheduler):
    with dask.config.set(scheduler=scheduler, num_workers=1):
        most = run_and_count(range(14))
    told = lines(capsys)
    assert 2 <= len(told) <= most
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.slow
def test_with_a_cluster_too(often, client, capsys):
    with dask.config.set(scheduler=client):
        most = run_and_count(range(20))
    told = lines(capsys)
    assert 1 <= len(told) <= most
    assert told[-1] == (20, 20)


def test_what_is_quick_or_not_to_be_shown_writes_nothing(capsys):
    assert progress.run(str, [1], show=True) == ["1"]
    assert progress.run(slow, range(9), show=False) == list(range(9))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_by_default_a_line_comes_twice_a_minute(capsys):
    progress.run(slow, range(9), show=True)
    assert len(lines(capsys)) == 1  # the last
