"""``progress=True`` where standard error is a file: few lines, and those say something."""

from __future__ import annotations

import re
import time

import dask
import pytest
from distributed import Client, LocalCluster

from dask_image_ingest import progress

LINE = r"(\d+) of (\d+) tasks are done after \d+ s"


@pytest.fixture
def often(monkeypatch):
    """A line each half second, so that no test has to wait for half a minute."""
    monkeypatch.setattr(progress, "_SECONDS_PER_LINE", 0.5)


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
        assert progress.run(slow, range(14), show=True) == list(range(14))
    told = lines(capsys)
    assert 2 <= len(told) <= 6
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.slow
def test_with_a_cluster_too(often, capsys):
    settings = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with (
        LocalCluster(**settings) as cluster,
        Client(cluster) as client,
        dask.config.set(scheduler=client),
    ):
        assert progress.run(slow, range(20), show=True) == list(range(20))
    told = lines(capsys)
    assert 1 <= len(told) <= 8
    assert told[-1] == (20, 20)


def test_what_is_quick_or_not_to_be_shown_writes_nothing(capsys):
    assert progress.run(str, [1], show=True) == ["1"]
    assert progress.run(slow, range(9), show=False) == list(range(9))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_by_default_a_line_comes_twice_a_minute(capsys):
    progress.run(slow, range(9), show=True)
    assert len(lines(capsys)) == 1  # the last
