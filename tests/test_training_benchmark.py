"""The benchmark of training is one command, and tells each way as a part of the bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
OURS, PEER = "ours, iter_batches, no cluster", "datago, shards from a server on this machine"


def test_each_way_is_told_as_a_part_of_the_bound_or_left_out():
    options = ["--quick", "--collections", "prepared", "--jobs", "crop", "--ways", OURS, PEER]
    finished = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "training.py", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    title, _, bound, ours, peer = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in finished.stdout.strip().splitlines()
    )
    assert title == ["prepared, crop", "images/s", "core ms/image", "E", "first batch", "MiB"]
    assert bound[3] == "1.00"
    assert ours[0] == OURS
    # Both costs are rounded to 0.01 ms.
    assert float(ours[3]) == pytest.approx(float(bound[2]) / float(ours[2]), rel=0.1)
    assert peer[0] == PEER
    assert peer[1].startswith("left out: ")  # it knows no random crop
