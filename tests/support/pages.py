"""The code blocks of a Markdown page, and running them from top to bottom as a reader would."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_FENCE = re.compile(
    r"(?:^<!-- (?P<kind>not run|needs): (?P<reason>[^\n]+?) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# How many bytes an encoded image has depends on the release of Pillow that wrote it.
_SIZE = re.compile(r"[\d.]+ [kMG]iB")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    A comment on the line before it says that it is not run, and why (``<!-- not run: it needs an
    account of S3 -->``), or with which package it is (``<!-- needs: torch -->``).
    """

    language: str
    code: str
    line: int
    not_run: str | None
    needs: str | None

    @property
    def why_not(self) -> str | None:
        """Why it can't be run here; None if it can."""
        if self.needs and find_spec(self.needs) is None:
            return f"needs {self.needs}, which is not installed"
        return self.not_run


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        kind, reason = found["kind"], found["reason"]
        yield Block(
            language=found["language"],
            code=found["code"],
            line=text.count("\n", 0, found.start("code")) + 1,
            not_run=reason if kind == "not run" else None,
            needs=reason if kind == "needs" else None,
        )


def run_page(page: Path, commands: dict[str, Callable[[list[str]], int]]) -> None:
    """Run a page's Python blocks in one namespace, and its console blocks by ``commands``.

    Raises
    ------
    AssertionError
        If a block prints something else than the page shows.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.why_not:
            continue
        if block.language == "console":
            _run_console(block, page, commands)
        elif block.language == "python" and block.code.startswith(">>> "):
            namespace |= run_examples(block.code, namespace, str(page), block.line - 1)
        elif block.language == "python":
            # Blank lines before it: tracebacks then show the page's line.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, page, "exec"), namespace)


def run_examples(text: str, namespace: dict[str, Any], name: str, line: int = 0) -> dict[str, Any]:
    """Run ``>>>`` examples, and give the names that they leave behind."""
    test = doctest.DocTestParser().get_doctest(text, namespace, name, name, line)
    check_examples(test)
    return test.globs


def check_examples(test: doctest.DocTest) -> None:
    """Run the examples of one docstring or block, which keep their names."""
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    assert not runner.failures, report.getvalue()


def _run_console(block: Block, page: Path, commands: dict[str, Callable[[list[str]], int]]) -> None:
    """Run each ``$ command``, and compare what it prints with the lines up to the next one."""
    status = 0
    for step in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        line, _, expected = step.partition("\n")
        where = f"{page}:{block.line}: $ {line}"
        words = shlex.split(line, comments=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if words == ["echo", "$?"]:
                print(status)
            else:
                assert words[0] in commands, f"{where}\nis not a command that tests know"
                status = commands[words[0]](words[1:])
        got = printed.getvalue()
        if expected.strip():
            same = doctest.OutputChecker().check_output(
                _SIZE.sub("... iB", expected), _SIZE.sub("... iB", got), FLAGS
            )
            assert same, f"{where}\nprinted\n{got}\nbut the page shows\n{expected}"
