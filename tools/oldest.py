"""Print the oldest releases that pyproject.toml allows, as constraints for pip.

    python tools/oldest.py > constraints.txt
    pip install -c constraints.txt -e '.[cpu,test]'

`make oldest` runs the tests with these. They are what a user may have: the package's dependencies,
and those of the extras that work on any machine. What only the tests need is installed new, except
for what is tied to one of these.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("cpu", "tiff")


def oldest(requirement: str) -> str:
    """The constraint for one requirement: ``dask[array]>=1.2,<3`` gives ``dask==1.2``.

    What is said behind a semicolon, of the Pythons that it is for, stays.

    Raises
    ------
    ValueError
        If the requirement has no lower bound, or several.
    """
    versions, semicolon, marker = requirement.partition(";")
    name = re.split(r"[\[<>=!~\s]", versions, maxsplit=1)[0]
    lowest = re.findall(r">=\s*([\w.]+)", versions)
    if len(lowest) != 1:
        raise ValueError(f"{requirement!r} in pyproject.toml needs exactly one lower bound, >=")
    return f"{name}=={lowest[0]}{semicolon}{marker}"


def constraints(project: dict) -> list[str]:
    """The constraints for the dependencies of a ``[project]`` table, in the order of names."""
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    return sorted({oldest(requirement) for requirement in requirements})


if __name__ == "__main__":
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    print(*constraints(tomllib.loads(pyproject.read_text())["project"]), sep="\n")
