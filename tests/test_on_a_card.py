"""The steps for a GPU: each in a process of its own, its log kept, none in the way of another."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from processes import until

pytestmark = pytest.mark.packaging

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


def test_a_step_that_fails_or_hangs_keeps_no_other_from_running(
    tool, tmp_path, monkeypatch, capsys
):
    first = (
        tool.Step("wrong", "a failure", "python -c 'print(1); raise SystemExit(3)'"),
        tool.Step("slow", "a hang", f'python -c "{HANGS}"', 0.03),
    )
    second = (
        tool.Step("absent", "no such program", "no-such-program --version"),
        tool.Step(
            "right", "a variable", "python -c 'import os; print(os.environ[\"X\"])'", 1, {"X": "y"}
        ),
    )
    groups = (tool.Group("1", "what is wrong", first), tool.Group("2", "what is right", second))
    monkeypatch.setattr(tool, "GROUPS", groups)
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", str(tmp_path / "out")])
    assert tool.main() == 1
    logs = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.log")}
    assert set(logs) == {"group-1.log", "group-2.log"}
    assert "\n1\n===== slow" in logs["group-1.log"]
    assert logs["group-2.log"].endswith("y\n")
    summary = (tmp_path / "out" / "summary.md").read_text()
    for row in (
        "| exit status 3 |",
        "| not done after 0.03 minutes |",
        "no-such-program",
        "| ok |",
    ):
        assert row in summary
    told = capsys.readouterr().out
    assert "group 1: what is wrong" in told
    assert "group 2: what is right" in told

    def running():
        return [str(process.cmdline()) for process in psutil.Process().children(recursive=True)]

    until(lambda: not any("sleep(60)" in command for command in running()))


def test_a_group_runs_alone_and_its_figures_are_gathered(tool, tmp_path, monkeypatch, capsys):
    speak = 'python -c \'print("noise"); print("speed:", 3 + 4, "images/s")\''
    groups = (
        tool.Group("1", "nothing", (tool.Step("other", "", "no-such-program"),)),
        tool.Group("2", "a speed", (tool.Step("speed", "it", speak, figures="images/s"),)),
    )
    monkeypatch.setattr(tool, "GROUPS", groups)
    for _ in range(2):  # once more, into the same folder
        monkeypatch.setattr(sys, "argv", ["on_a_card.py", str(tmp_path), "--group", "2"])
        assert tool.main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"group-2.log", "summary.md"}
    summary = (tmp_path / "summary.md").read_text()
    _, copied = summary.split("## Into docs/benchmarks.md")
    assert f"$ {speak}" in copied
    assert copied.count("speed: 7 images/s") == 1
    assert "    noise" not in copied


def test_no_step_begins_after_the_minutes_that_are_given(tool, tmp_path, monkeypatch):
    sleep = tool.Step("slow", "takes all of it", "python -c 'import time; time.sleep(60)'")
    groups = (tool.Group("1", "two", (sleep, sleep._replace(name="late", shows="comes too late"))),)
    monkeypatch.setattr(tool, "GROUPS", groups)
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", str(tmp_path), "--minutes", "0.02"])
    assert tool.main() == 1
    summary = (tmp_path / "summary.md").read_text()
    assert "| slow | takes all of it | not done after 0.02 minutes |" in summary
    assert "| late | comes too late | not begun |" in summary


def test_each_group_fits_a_call(tool):
    for group in tool.GROUPS:
        assert group.minutes <= tool.CALL_MINUTES
        assert all(step.minutes > 0 for step in group.steps)
        assert group.shows
    for names in (
        [step.name for group in tool.GROUPS for step in group.steps],
        [group.name for group in tool.GROUPS],
    ):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("minutes", [15, 30])
def test_a_plan_fits_its_minutes_and_names_what_is_left(tool, monkeypatch, capsys, minutes):
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", "--plan", str(minutes)])
    assert tool.main() == 0
    planned, left = capsys.readouterr().out.split("Left for another time")
    calls = re.findall(
        r"^ *([0-9.]+) min  python tools/on_a_card.py OUT --group (\w+)$", planned, re.MULTILINE
    )
    assert sum(float(each) for each, _ in calls) <= minutes
    names = [name for _, name in calls]
    # The first day comes first, and what is not planned is left.
    assert names[0] == "first"
    assert len(names) > 1
    assert all((f"--group {g.name}:" in left) == (g.name not in names) for g in tool.GROUPS)


def test_what_is_done_is_not_planned_again(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", "--plan", "--done", "first", "0b"])
    assert tool.main() == 0
    told = capsys.readouterr().out
    assert "--group first" not in told
    assert "--group 0b" not in told
    assert "--group 4" in told


def test_a_machine_that_vanished_between_two_calls_is_noticed_and_begun_again(
    tool, tmp_path, monkeypatch, capsys
):
    """The next one is bare. Parts of packages come in calls of their own, and steps in the last."""
    parts = {"part-00": "brought_a", "part-01": "brought_b"}
    prints = "python -c 'import brought_a, brought_b; print(brought_a.__file__)'"
    group = tool.Group(
        "first", "both", (tool.Step("both", "parts", prints),), tuple(parts.values())
    )
    monkeypatch.setattr(tool, "GROUPS", (group,))

    class Machine:
        """A folder that packages are unpacked to; a fresh machine has an empty one."""

        def __init__(self, name):
            self.site = tmp_path / name
            self.site.mkdir()

        def unpack(self, part):
            (self.site / f"{parts[part]}.py").touch()

        def call(self):
            monkeypatch.setenv("PYTHONPATH", str(self.site))
            monkeypatch.setattr(sys, "path", [str(self.site), *sys.path])
            importlib.invalidate_caches()
            monkeypatch.setattr(sys, "argv", ["on_a_card.py", str(tmp_path / "out")])
            return tool.main(), capsys.readouterr().out, (tmp_path / "out/summary.md").read_text()

    first = Machine("first")
    first.unpack("part-00")
    # It is given back, and the next call gets another one.
    second = Machine("second")
    second.unpack("part-01")
    status, told, summary = second.call()
    assert status == tool.BARE
    assert "brought_a" in told
    assert "brought_b" not in told
    assert "Begin again" in told
    assert "| both | parts | not begun | |" in summary
    assert not (tmp_path / "out" / "group-first.log").exists()
    for part in parts:
        second.unpack(part)
    status, told, summary = second.call()
    assert status == 0
    assert str(second.site / "brought_a.py") in told
    assert "| ok |" in summary


def test_no_group_begins_without_the_modules_of_its_tests(tool):
    """RAPIDS and DALI are not here."""
    for group in tool.GROUPS:
        assert set(tool.absent(group)) <= set(group.modules)
        assert group.modules
        if not importlib.util.find_spec("cudf"):
            assert {"cupy"} <= set(tool.absent(group))


def test_the_steps_lead_to_files_that_there_are(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_a_card.py", "--list"])
    assert tool.main() == 0
    listed = capsys.readouterr().out
    for step in (step for group in tool.GROUPS for step in group.steps):
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


def test_a_package_that_is_missing_is_named_by_the_first_steps(tool, tmp_path, monkeypatch):
    (tmp_path / "cupy.py").write_text(CUPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (step,) = (s for group in tool.GROUPS for s in group.steps if s.name == "machine")
    log = tmp_path / "group-1.log"
    assert tool.run(step, log)[0] == "ok", tool.printed(step, log)[-5:]
    lacking = step._replace(command=step.command.replace("cykooz_resizer", "cykooz_absent"))
    assert tool.run(lacking, log)[0] == "exit status 1"
    assert tool.printed(lacking, log)[-1] == "missing: cykooz_absent"


@pytest.mark.parametrize("name", ["corruption.py", "engines.py"])
def test_a_probe_finds_what_it_imports(tmp_path, name):
    """From anywhere, as a script whose own folder alone is on the path."""
    lines = (
        "import runpy",
        f"made = runpy.run_path({str(ROOT / 'tests' / 'gpu' / name)!r})",
        "import synthetic, gpu_probes",
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, env=environment, check=True
    )


def test_what_the_steps_start_finds_the_modules_of_the_tests(tool, tmp_path):
    """Workers too, which know of no settings of pytest."""
    step = tool.Step("imports", "", "python -c 'import synthetic, gpu_probes, contract'")
    log = tmp_path / "imports.log"
    assert tool.run(step, log)[0] == "ok", tool.printed(step, log)
