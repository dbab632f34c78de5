"""The signatures of functions that are written in Python, Cython or C++."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import warnings
from pathlib import Path
from typing import Any


def signatures_of(target: Any) -> list[inspect.Signature]:
    """What a function may be called with: one signature, more where it is overloaded, or none.

    From Python, else from the stub beside the module, else from the docstring.
    """
    try:
        return [inspect.signature(target)]
    except (TypeError, ValueError):
        pass
    stub = stub_of(target)
    if stub is not None:
        arguments = ast.unparse(stub.args)
        written = [arguments.removeprefix("self, ") if inspect.isclass(target) else arguments]
    else:
        written = _documented(target.__doc__ or "")
        if inspect.isclass(target):
            # A method's first argument is its object.
            made = _documented(target.__init__.__doc__ or "")
            written = written or [re.sub(r"\Aself(: [\w.]+)?(, )?", "", each) for each in made]
    return [signature for arguments in written if (signature := _parsed(arguments)) is not None]


def _documented(text: str) -> list[str]:
    # pybind11 numbers overloads.
    numbered = re.findall(r"^\s*\d+\. \w+\((.*)\) -> ", text, re.MULTILINE)
    return numbered or re.findall(r"\A\s*[\w.]+\((.*)\)", text)


def stub_of(target: Any) -> ast.FunctionDef | None:
    """A function's definition in the ``.pyi`` of its module; for a class that of ``__init__``."""
    module = sys.modules.get(module_of(target) or "")
    path = getattr(module, "__file__", None) or ""
    tree: Any = _stub_of_file(re.sub(r"(\.[\w-]+)?\.(so|py)$", ".pyi", path))
    names = getattr(target, "__qualname__", "").split(".")
    for name in [*names, "__init__"] if inspect.isclass(target) else names:
        body = getattr(tree, "body", ())
        tree = next((part for part in body if getattr(part, "name", None) == name), None)
    return tree if isinstance(tree, ast.FunctionDef) else None


def module_of(target: Any) -> str | None:
    """The name of the module that a class, a function or a method is of."""
    class_ = getattr(target, "__objclass__", None)
    return getattr(target, "__module__", None) or getattr(class_, "__module__", None)


def _parsed(arguments: str) -> inspect.Signature | None:
    """The signature of a list of arguments in Python's, Cython's or pybind11's way of writing."""
    parameters = []
    arguments = arguments.replace("\\*", "*")  # as CuPy's docstrings have it, for Sphinx
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in re.split(r",\s*(?![^\[(]*[\])])", arguments):
        left, equals, _ = part.partition("=")
        name = left.partition(":")[0].strip().split(" ")[-1]
        if name.lstrip("*") == "" or name == "/":
            kind = inspect.Parameter.KEYWORD_ONLY if name == "*" else kind
            continue
        this: Any = kind
        if name.startswith("*"):
            this = (
                inspect.Parameter.VAR_KEYWORD
                if name[1] == "*"
                else inspect.Parameter.VAR_POSITIONAL
            )
        default = None if equals else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.lstrip("*"), this, default=default))
    try:
        return inspect.Signature(parameters)
    except ValueError:
        return None


@functools.cache
def _stub_of_file(path: str) -> ast.Module | None:
    if not path.endswith(".pyi") or not Path(path).exists():
        return None
    with warnings.catch_warnings():
        # What is wrong with a library's own docstrings.
        warnings.simplefilter("ignore")
        return ast.parse(Path(path).read_text())
