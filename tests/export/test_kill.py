"""Killed at any moment, an export leaves no partial shard, and goes on to the same bytes.

``python tests/killed_exports.py moments FOLDER OUT 0 0`` tries every moment that there is.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest
from forked_python import results
from killed_exports import export
from processes import assert_all_went_on, start
from s3 import empty_bucket
from witnesses import contents, shards_in

pytestmark = [pytest.mark.slow, pytest.mark.newest]

SCRIPT = "killed_exports.py"
MOMENTS = 2


@pytest.fixture
def cluster_export(shards, tmp_path):
    """An export that runs on a cluster, and goes with its whole group in the end."""
    process = start(SCRIPT, "cluster", shards[0].parent, tmp_path / "out")
    yield process, tmp_path / "out"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.rounds(1, nightly=20)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(shards, tmp_path, seed):
    told = results(SCRIPT, "moments", shards[0].parent, tmp_path / "out", seed, MOMENTS)
    assert len(told) == 2 * MOMENTS
    assert_all_went_on(told)


@pytest.mark.nightly
@pytest.mark.rounds(1, nightly=5)
def test_killed_while_it_sends_to_s3_it_goes_on_to_the_same_bytes(shards, s3_server, seed):
    empty_bucket(s3_server, "killed")
    out = "s3://killed/out"
    told = results(SCRIPT, "moments", shards[0].parent, out, seed, 2, s3_server)
    assert len(told) == 2 * 2
    assert_all_went_on(told)


def goes_on(shards, out) -> bool:
    """Whether a resumed export gives what one gives that nobody disturbed."""
    found = []
    for resume in (True, False):
        export(str(shards[0].parent), str(out), resume=resume)
        found.append(contents(out))
        shutil.rmtree(out)
    return found[0] == found[1]


def test_a_killed_cluster_leaves_an_export_that_goes_on(shards, cluster_export):
    process, out = cluster_export
    while process.poll() is None and not shards_in(out):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert goes_on(shards, out)


@pytest.mark.nightly
def test_a_killed_worker_costs_no_shard(shards, cluster_export):
    process, out = cluster_export
    _, first, _ = process.stdout.readline().split()
    while process.poll() is None and not shards_in(out):
        time.sleep(0.005)
    os.kill(int(first), signal.SIGKILL)
    output, errors = process.communicate(timeout=280)
    assert "done" in output, errors
    assert goes_on(shards, out)
