"""Commands of the guide have options that the installed programs take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

COMMANDS = [
    shlex.split(line.removeprefix("$ "))
    for page in sorted(DOCS.rglob("*.md"))
    for line in page.read_text().splitlines()
    if re.match(r"\$ (\w+=\S+ )*dask ", line)
]


def program(words):
    """Name and arguments of a command, whose first words are those of the program or variables."""
    words = words[words.index("dask") + 1 :]
    first = next(at for at, word in enumerate(words) if word.startswith("-") or "://" in word)
    return " ".join(words[:first]), words[first:]


def options_of(name: str) -> set[str]:
    if name == "cuda worker":
        main = pytest.importorskip("dask_cuda.cli").worker
    elif name == "scheduler":
        from distributed.cli.dask_scheduler import main
    else:
        from distributed.cli.dask_worker import main
    return {option for param in main.params for option in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("name", ["scheduler", "worker", "cuda worker"])
def test_commands_have_options_that_their_programs_take(name):
    given = [
        arguments for words in COMMANDS for each, arguments in [program(words)] if each == name
    ]
    assert given
    known = options_of(name)
    for arguments in given:
        assert {word for word in arguments if word.startswith("--")} <= known
