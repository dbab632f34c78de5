"""The rooms of the package: imports point one way, and a room shows what others may use."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

PACKAGE = "dask_image_ingest"
ROOT = Path(__file__).parent.parent / PACKAGE

# From the ground up: a room may use those before it. Modules of the package itself have their place
# among the rooms.
ROOMS = (
    "typedefs", "url_secrets", "errors", "arguments", "dask_internals",
    "client", "computing", "image_frame",
    "user_functions", "storage", "tar", "decode", "index", "frames", "dataset", "cluster", "ops",
    "loader", "image_counts", "view", "export", "checkpoint", "report", "accessor", "curate", "cli",
    "__init__",
)  # fmt: skip

# The same inside a room, where the files beside the folders have no place of their own.
FLOORS = {
    "storage": ("output",),
    "dataset": ("schema", "scan", "plan", "references"),
}

# Modules for those who have another package, which rooms can't show to all.
ON_DEMAND = ("frames.cudf.backend", "loader.dataloader")

# What type checkers alone see there is of the highest room, and not imported when the package runs.
ANNOTATIONS = "image_frame"


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name below it; that of a room is the room's own name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        inside = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        found[".".join(inside)] = path
    return found


@functools.cache
def imports(module: str) -> frozenset[tuple[str, str]]:
    """Module and name of each import from this package, those inside functions included."""
    found = set()
    for node in ast.walk(running(module)):
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative imports are not resolved here"
            named = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for source, name in named:
            if source.split(".")[0] != PACKAGE:
                continue
            inside = source.removeprefix(PACKAGE).lstrip(".")
            below = f"{inside}.{name}".strip(".")
            is_module = below in modules() and name not in shown_by(inside)
            found.add((below, "") if is_module else (inside or "__init__", name))
    return frozenset(found)


def running(module: str) -> ast.Module:
    """The code of a module; of annotations, what runs."""
    tree = ast.parse(modules()[module].read_text())
    if module == ANNOTATIONS:
        for block in ast.walk(tree):
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                block.body = []
    return tree


def shown_by(module: str) -> list[str]:
    """The names that a room shows; one of them may be that of the module which has it."""
    if modules().get(module, Path()).name != "__init__.py" or not module:
        return []
    return importlib.import_module(f"{PACKAGE}.{module}").__all__


def room(module: str) -> str:
    return module.split(".")[0]


def edges() -> Iterator[tuple[str, str]]:
    for module in modules():
        for imported, _ in imports(module):
            if imported != module:
                yield module, imported


def test_no_import_leads_back_to_where_it_started():
    after: dict[str, set[str]] = {module: set() for module in modules()}
    for module, imported in edges():
        after[module].add(imported)
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, "a circle: " + " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for imported in sorted(after[module]):
                visit(imported, (*way, module))
            done.add(module)

    for module in sorted(modules()):
        visit(module, ())


def test_every_module_has_a_room():
    assert {room(module) for module in modules()} == set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_uses_only_those_below_it(name):
    upwards = [
        f"{module} imports {imported}"
        for module, imported in edges()
        if room(module) == name and ROOMS.index(room(imported)) > ROOMS.index(name)
    ]
    assert not upwards


@pytest.mark.parametrize("name", FLOORS)
def test_a_folder_of_a_room_uses_only_those_below_it(name):
    folders = [
        path.parent.name
        for module, path in modules().items()
        if room(module) == name and module.count(".") == 1 and path.name == "__init__.py"
    ]
    assert sorted(folders) == sorted(FLOORS[name])
    upwards = [
        f"{module} imports {imported}"
        for module, imported in edges()
        if (floor := floor_of(module, name)) is not None
        and (other := floor_of(imported, name)) is not None
        and other > floor
    ]
    assert not upwards


def floor_of(module: str, name: str) -> int | None:
    """The number of the folder of a room that a module is in."""
    place, *inside = module.split(".")
    folder = inside[0] if place == name and inside else None
    return FLOORS[name].index(folder) if folder in FLOORS[name] else None


def test_other_rooms_are_entered_by_their_door():
    doors = {*rooms_with_a_door(), *FOLDERS}
    around = [
        f"{module} imports {imported}"
        for module, imported in edges()
        if room(module) != room(imported)
        and "." in imported
        and imported not in doors
        and imported not in ON_DEMAND
    ]
    assert not around


def rooms_with_a_door() -> list[str]:
    return [name for name in ROOMS if name != "__init__" and modules()[name].name == "__init__.py"]


FOLDERS = tuple(f"{name}.{folder}" for name, folders in FLOORS.items() for folder in folders)


@pytest.mark.parametrize("door", [*rooms_with_a_door(), *FOLDERS])
def test_a_door_shows_what_others_use_and_no_more(door):
    shown = set(getattr(importlib.import_module(f"{PACKAGE}.{door}"), "__all__", ()))
    used = {
        what
        for module in modules()
        if module != door and not module.startswith(f"{door}.")
        for imported, what in imports(module)
        if imported == door and what
    }
    assert shown == used | started(door) | named(door)


def named(name: str) -> set[str]:
    """What a room shows to users, who write its name: ``curate.embed``, ``loader.Position``."""
    pages = (ROOT.parent / "docs" / "reference").glob("*.rst")
    listed = (re.findall(rf"^   {name}\.(\w+)$", page.read_text(), re.MULTILINE) for page in pages)
    return set(itertools.chain.from_iterable(listed))


def started(name: str) -> set[str]:
    """What the commands that pip installs call in a room."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    calls = [command.partition(":") for command in project["scripts"].values()]
    return {function for module, _, function in calls if module == f"{PACKAGE}.{name}"}


@pytest.mark.parametrize("name", rooms_with_a_door())
def test_a_room_says_what_it_is_for(name):
    told = importlib.import_module(f"{PACKAGE}.{name}").__doc__ or ""
    assert 3 <= len(told.strip().splitlines()) <= 8


def test_contributing_has_a_row_for_each_room_in_their_order():
    contributing = (ROOT.parent / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", contributing, re.MULTILINE) == rooms_with_a_door()


def foreign_imports(module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_private(module: str) -> bool:
    parts = module.split(".")
    return parts[0] in ("dask", "distributed") and (
        any(part.startswith("_") for part in parts) or "dask_expr" in parts
    )


def test_private_modules_of_dask_are_named_in_one_file():
    elsewhere = {
        (module, source)
        for module in modules()
        if module != "dask_internals"
        for source, _ in foreign_imports(module)
        if is_private(source)
    }
    assert not elsewhere


def test_few_parameters_are_typed_any():
    typed = [ast.unparse(kind) for module in modules() for kind in parameter_types(module)]
    assert typed.count("Any") <= 0.03 * len(typed)


def parameter_types(module: str) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.arguments):
            several = filter(None, (node.vararg, node.kwarg))
            for parameter in (*node.posonlyargs, *node.args, *node.kwonlyargs, *several):
                if parameter.annotation is not None:
                    yield parameter.annotation
