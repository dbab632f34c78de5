"""Killed at any moment, a checkpoint has only whole files, and goes on with those.

``python tests/support/killed_checkpoints.py moments FOLDER OUT 0 1000`` tries every moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from killed_exports import s3_options
from query_answers import answer

import dask_image_ingest as dii

ROOT = Path(dii.__file__).parents[1]
SCRIPT = ROOT / "tests" / "support" / "killed_checkpoints.py"
SEED, MOMENTS = 5, 12

pytestmark = pytest.mark.slow


def start(*arguments):
    """The script, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPT.parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def told_of(process) -> list[dict]:
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def assert_all_went_on(told):
    for run in told:
        assert run["killed"], run
        assert run["partial"] == [], run
        assert run["resumed"], run
        assert run["same"], run
    assert any(run["finished"] for run in told)


def test_killed_at_any_moment_it_goes_on_to_the_same_files(shards, tmp_path):
    told = told_of(start("moments", shards[0].parent, tmp_path / "out", SEED, MOMENTS))
    assert len(told) == MOMENTS
    assert_all_went_on(told)


def test_killed_while_it_sends_to_s3_it_goes_on_to_the_same_files(shards, s3_server):
    fsspec.filesystem("s3", **s3_options(s3_server)).mkdir("checkpoints")
    out = "s3://checkpoints/out"
    assert_all_went_on(told_of(start("moments", shards[0].parent, out, SEED, 6, s3_server)))


@pytest.mark.parametrize("where", ["here", "cluster"])
def test_what_was_stored_when_all_processes_were_killed_is_not_computed_again(
    where, shards, tmp_path
):
    out, calls = tmp_path / "out", tmp_path / "calls"
    arguments = ("run", shards[0].parent, out, calls, where)
    process = start(*arguments)
    while process.poll() is None and not list(out.glob("*.parquet")):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    stored = list(out.glob("*.parquet"))
    times = {file: file.stat().st_mtime_ns for file in stored}
    calls.write_text("")
    process = start(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    # Another process knows the model for the same; it is called for what is missing.
    assert len(calls.read_text().splitlines()) == len(shards) - len(stored)
    assert {file: file.stat().st_mtime_ns for file in stored} == times
    assert len(list(out.glob("*.parquet"))) == len(shards)
    assert not (out / "_staging").exists()


def test_the_results_are_those_of_a_run_that_nobody_disturbed(shards, tmp_path):
    from killed_checkpoints import checkpoint, frame

    folder = str(shards[0].parent)
    stored = checkpoint(folder, str(tmp_path / "out"))
    assert answer(stored.compute()) == answer(frame(folder).compute())
