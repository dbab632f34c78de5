"""Killed at any moment, a checkpoint has only whole files, and goes on with those.

``python tests/support/killed_checkpoints.py moments FOLDER OUT 0 1000`` tries every moment.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from forked_python import results
from processes import assert_all_went_on, start
from query_answers import answer
from s3 import empty_bucket

SCRIPT = "killed_checkpoints.py"
MOMENTS = 3

pytestmark = [pytest.mark.slow, pytest.mark.newest]


@pytest.mark.rounds(1, nightly=20)
def test_killed_at_any_moment_it_goes_on_to_the_same_files(shards, tmp_path, seed):
    told = results(SCRIPT, "moments", shards[0].parent, tmp_path / "out", seed, MOMENTS)
    assert len(told) == MOMENTS
    assert_all_went_on(told)


@pytest.mark.nightly
@pytest.mark.rounds(1, nightly=5)
def test_killed_while_it_sends_to_s3_it_goes_on_to_the_same_files(shards, s3_server, seed):
    empty_bucket(s3_server, "checkpoints")
    out = "s3://checkpoints/out"
    assert_all_went_on(results(SCRIPT, "moments", shards[0].parent, out, seed, 2, s3_server))


@pytest.mark.parametrize("where", ["here", pytest.param("cluster", marks=pytest.mark.nightly)])
def test_what_was_stored_when_all_processes_were_killed_is_not_computed_again(
    where, shards, tmp_path
):
    out, calls = tmp_path / "out", tmp_path / "calls"
    arguments = ("run", shards[0].parent, out, calls, where)
    process = start(SCRIPT, *arguments)
    while process.poll() is None and not list(out.glob("*.parquet")):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    stored = list(out.glob("*.parquet"))
    times = {file: file.stat().st_mtime_ns for file in stored}
    calls.write_text("")
    process = start(SCRIPT, *arguments)
    _, errors = process.communicate(timeout=280)
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
