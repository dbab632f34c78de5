"""What contributors and CI run: make targets, workflows, bounds of dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def made(text: str) -> set[str]:
    """The targets that a script makes."""
    return set(re.findall(r"^\W*(?:- run: )?make ([a-z-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("path", [ROOT / ".ci" / "run", *WORKFLOWS], ids=lambda path: path.name)
def test_ci_calls_make_targets_that_exist(path):
    assert made(path.read_text())
    assert made(path.read_text()) <= TARGETS


def test_workflows_run_what_a_contributor_runs():
    in_workflows = set().union(*(made(path.read_text()) for path in WORKFLOWS))
    assert in_workflows >= {
        "lint", "test", "test-packaging", "nightly", "oldest", "coverage", "docs", "wheel",
        "gpu-api",
    }  # fmt: skip


def test_workflows_test_every_python_that_is_promised():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    promised = [entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if "3." in entry]
    assert jobs["test"]["strategy"]["matrix"]["python"] == promised
    assert jobs["oldest"]["steps"][1]["with"]["python-version"] == promised[0]
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_the_oldest_environment_has_the_lower_bounds():
    printed = subprocess.run(
        [sys.executable, ROOT / "tools" / "oldest.py"], capture_output=True, text=True, check=True
    ).stdout
    pins = {}
    for pin in map(Requirement, printed.splitlines()):
        pins[pin.name, str(pin.marker)] = pin.specifier
    extras = PROJECT["optional-dependencies"]
    requirements = [
        Requirement(each) for each in [*PROJECT["dependencies"], *extras["cpu"], *extras["tiff"]]
    ]
    assert set(pins) == {(each.name, str(each.marker)) for each in requirements}
    for requirement in requirements:
        (pin,) = pins[requirement.name, str(requirement.marker)]
        assert pin.operator == "=="
        assert pin.version in requirement.specifier
        lower = [Version(spec.version) for spec in requirement.specifier if spec.operator == ">="]
        assert lower == [Version(pin.version)]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_what_is_gathered_for_a_gpu_machine_is_neither_committed_nor_removed():
    """`.gpu` is made anew by `make gpu-api`; `.gpu-pack` takes long to gather."""
    for folder in (".gpu", ".gpu-pack"):
        done = subprocess.run(["git", "check-ignore", f"{folder}/part"], cwd=ROOT, check=False)
        assert done.returncode == 0, folder
    assert ".gpu-pack" not in (ROOT / "Makefile").read_text()
