"""Killed at any moment, an export leaves no partial shard, and goes on to the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from witnesses import contents, shards_in

import dask_image_ingest as dii

SCRIPT = Path(__file__).parents[1] / "support" / "killed_export.py"
ROOT = Path(dii.__file__).parents[1]


def start(folder, out, moment=0, **options):
    """The script in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, folder, out / "{shard:03d}.tar", str(moment), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process) -> str:
    output, _ = process.communicate(timeout=240)
    return output


@pytest.fixture(scope="session")
def folder(shards):
    return shards[0].parent


@pytest.fixture(scope="session")
def whole(folder, tmp_path_factory):
    """What an export that nobody disturbs gives, and how many moments it has."""
    out = tmp_path_factory.mktemp("whole") / "out"
    output = end(start(folder, out))
    assert "done" in output, output
    expected = contents(out)
    shutil.rmtree(out)
    return out, expected


def assert_nothing_partial(out, expected):
    """Whatever has the name of a shard is that shard."""
    for path in shards_in(out):
        found = contents(out)
        for name in (path.name, path.stem + ".parquet", path.stem + ".idx"):
            assert found[name] == expected[name], name
        with tarfile.open(path) as tar:
            assert tar.getnames()


@pytest.mark.parametrize("shuffle", [None, 1])
def test_killed_before_any_change_of_the_disk_it_goes_on(shuffle, folder, whole, request):
    """Twelve moments from the first to the last, drawn anew for each kind of export."""
    out, expected = whole
    if shuffle is not None:
        assert "done" in end(start(folder, out, shuffle=shuffle))
        expected = contents(out)
        shutil.rmtree(out)
    rng = random.Random(7 if shuffle is None else 8)
    moments = [*sorted(rng.sample(range(1, 160), 11)), 1]
    died = 0
    for moment in moments:
        output = end(start(folder, out, moment, shuffle=shuffle))
        died += "done" not in output
        assert "Traceback" not in output, (moment, output)
        assert_nothing_partial(out, expected)
        output = end(start(folder, out, resume=True, shuffle=shuffle))
        assert "done" in output, (moment, output)
        assert contents(out) == expected, moment
        shutil.rmtree(out)
    assert died >= 8


def test_killed_again_and_again_it_ends(folder, whole):
    out, expected = whole
    for moment in range(20, 2000, 20):
        output = end(start(folder, out, moment, resume=True))
        assert "Traceback" not in output, output
        if out.exists():
            assert_nothing_partial(out, expected)
        if "done" in output:
            break
    assert contents(out) == expected
    shutil.rmtree(out)


def test_a_killed_cluster_leaves_an_export_that_goes_on(folder, whole):
    out, expected = whole
    process = start(folder, out, workers=2)
    assert process.stdout.readline().startswith("ready")
    while process.poll() is None and not list(out.glob("*.tar")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    end(process)
    assert_nothing_partial(out, expected)
    output = end(start(folder, out, resume=True))
    assert "done" in output, output
    assert contents(out) == expected
    shutil.rmtree(out)


def test_a_killed_worker_costs_no_shard(folder, whole):
    out, expected = whole
    process = start(folder, out, workers=2)
    _, first, *_ = process.stdout.readline().split()
    while process.poll() is None and not (out / "_staging").exists():
        time.sleep(0.01)
    os.kill(int(first), signal.SIGKILL)
    output = end(process)
    assert "done" in output, output
    assert contents(out) == expected
    shutil.rmtree(out)
