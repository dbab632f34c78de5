"""Slow listings say how far they are, where somebody looks; quick ones say nothing."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest
from faulty_server import faulty_server
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import listing_progress
from dask_image_ingest.cli import main
from dask_image_ingest.storage import find_shards

pytestmark = pytest.mark.slow

SHARD = tar({"a.jpg": b"1"})
LINE = r"\rlisting '[^']*-{0\.\.3}\.tar': (\d+) files in \d+\.\d s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def url(monkeypatch):
    """Four shards of a server that takes its time."""
    monkeypatch.setattr(listing_progress, "_PATIENCE", 0.1)
    monkeypatch.setattr(listing_progress, "_EVERY", 0.05)
    with faulty_server(files={f"/x-{n}.tar": SHARD for n in range(4)}, latency=0.3) as server:
        yield f"{server.url}/x-{{0..3}}.tar"


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "image-ingest-listing"]


@pytest.mark.parametrize("verb", [["describe"], ["head", "-n", "1"], ["check"]])
def test_the_command_line_shows_it_on_a_terminal(url, verb, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    main([verb[0], url, *verb[1:]])
    shown = terminal.getvalue()
    counts = list(map(int, re.findall(LINE, shown)))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert re.search(LINE + r"\n", shown)  # what follows begins on a line of its own


def test_files_and_pipes_get_none_of_it(url, capsys):
    main(["describe", url, "--json"])
    captured = capsys.readouterr()
    assert "listing" not in captured.err + captured.out


def test_elsewhere_it_is_shown_inside_progress(url):
    out = Terminal()
    assert len(find_shards(url)) == 4
    with dii.progress(out):
        assert len(find_shards(url)) == 4
    assert re.findall(LINE, out.getvalue())[-1] == "4"


def test_a_listing_that_fails_ends_its_line(url):
    out = Terminal()
    with dii.progress(out), pytest.raises(dii.ShardNotFoundError):
        find_shards(url.replace("x-", "y-"))
    assert re.search(r"\d s\n", out.getvalue())


def test_a_quick_listing_says_nothing(tmp_path):
    (tmp_path / "a.tar").write_bytes(SHARD)
    out = Terminal()
    with dii.progress(out):
        find_shards(tmp_path)
    assert out.getvalue() == ""
