"""Scripts that are killed, or that kill what they start, as the tests see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask_image_ingest as dii

ROOT = Path(dii.__file__).parents[1]


def start(script: str, *arguments: Any) -> subprocess.Popen:
    """A script of this folder, in a process group of its own."""
    folder = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, folder / script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def results(process: subprocess.Popen) -> list[dict]:
    """What a script tells of each process that it killed."""
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def assert_all_went_on(told: list[dict]) -> None:
    for run in told:
        assert run["killed"], run
        assert run["partial"] == [], run
        assert run["resumed"], run
        assert run["same"], run
    # Of few, all may have died before anything was finished.
    assert len(told) < 5 or any(run["finished"] for run in told)
