"""The steps for a GPU: each in a process of its own, its log kept, none in the way of another."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
README = (ROOT / "tests" / "gpu" / "README.md").read_text()

HANGS = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
)


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import on_a_card

    return on_a_card


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_keeps_no_other_from_running(
    tool, tmp_path, monkeypatch, capsys
):
    steps = (
        tool.Step("wrong", "a failure", "python -c 'print(1); raise SystemExit(3)'"),
        tool.Step("slow", "a hang", f'python -c "{HANGS}"', 0.03),
        tool.Step("absent", "no such program", "no-such-program --version"),
        tool.Step(
            "right", "a variable", "python -c 'import os; print(os.environ[\"X\"])'", 1, {"X": "y"}
        ),
    )
    monkeypatch.setattr(tool, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", str(tmp_path / "out")])
    assert tool.main() == 1
    logs = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.log")}
    assert logs["01-wrong.log"].endswith("1\n")
    assert logs["04-right.log"].endswith("y\n")
    summary = (tmp_path / "out" / "summary.md").read_text()
    for row in (
        "| exit status 3 |",
        "| not done after 0.03 minutes |",
        "no-such-program",
        "| ok |",
    ):
        assert row in summary
    time.sleep(0.1)
    assert not [
        p for p in psutil.Process().children(recursive=True) if "sleep(60)" in str(p.cmdline())
    ]


def test_the_steps_lead_to_files_that_there_are(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", str(tmp_path), "--list"])
    assert tool.main() == 0
    listed = capsys.readouterr().out
    for step in tool.STEPS:
        assert step.command in listed
        for word in step.command.split():
            if word.endswith(".py") or word.startswith("tests/"):
                assert (tool.ROOT / word).exists(), word


MODULES = {"pillow": "PIL"}

# As much of CuPy as the step asks, and Dask.
CUPY = """
class ndarray:
    pass

class cuda:
    class runtime:
        getDeviceProperties = staticmethod(lambda number: {"name": b"card", "totalGlobalMem": 1})
        driverGetVersion = staticmethod(lambda: 1)
"""


def test_the_packages_to_bring_are_those_that_the_package_needs(tool):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pytest_ = next(n for n in project["optional-dependencies"]["test"] if n.startswith("pytest>"))
    in_the_extra = {"dask", "numpy", "pandas"}
    for each in map(Requirement, [*project["dependencies"], pytest_]):
        module = MODULES.get(each.name, each.name.replace("-", "_"))
        assert module in tool.IMPORTED.split()
        if each.name not in in_the_extra:
            assert f"`{each}`" in README


@pytest.mark.newest
@pytest.mark.slow
def test_a_package_that_is_missing_is_named_by_the_first_steps(tool, tmp_path, monkeypatch):
    (tmp_path / "cupy.py").write_text(CUPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (step,) = (step for step in tool.STEPS if step.name == "machine")
    assert tool.run(step, 1, tmp_path)[0] == "ok", tool.tail(tmp_path / "01-machine.log", 5)
    lacking = step._replace(command=step.command.replace("cykooz_resizer", "cykooz_absent"))
    assert tool.run(lacking, 2, tmp_path)[0] == "exit status 1"
    assert tool.tail(tmp_path / "02-machine.log", 1) == "missing: cykooz_absent"


@pytest.mark.slow
def test_the_probe_of_pixels_under_load_finds_what_it_imports(tmp_path):
    """From anywhere, as a script whose own folder alone is on the path."""
    lines = (
        "import runpy",
        f"made = runpy.run_path({str(ROOT / 'tests' / 'gpu' / 'corruption.py')!r})",
        "import synthetic, gpu_probes",
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, env=environment, check=True
    )


@pytest.mark.slow
def test_what_the_steps_start_finds_the_modules_of_the_tests(tool, tmp_path):
    """Workers too, which know of no settings of pytest."""
    step = tool.Step("imports", "", "python -c 'import synthetic, gpu_probes, contract'")
    assert tool.run(step, 1, tmp_path)[0] == "ok", tool.tail(tmp_path / "01-imports.log", 5)
