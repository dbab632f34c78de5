"""The steps for a GPU: each in a process of its own, its log kept, none in the way of another."""

import sys
import time
from pathlib import Path

import psutil
import pytest

TOOLS = Path(__file__).parents[1] / "tools"

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
