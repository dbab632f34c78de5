"""Resolves the expressions of a source file as far as they lead into the libraries."""

# ruff: noqa: D102 - visit_... methods, which ast.NodeVisitor names

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from typing import Any, NamedTuple

from gpu_api.signatures import module_of, signatures_of, stub_of


class Instance(NamedTuple):
    """A value of which only the class is known."""

    of: type


class Method(NamedTuple):
    """A member of a class that was reached through an instance."""

    of: type
    name: str


class Tables:
    """What is said of the libraries beside their own annotations, and which of them are missing."""

    def __init__(self, libraries: tuple[str, ...], results: dict[str, str], ours: set[str]) -> None:
        self._libraries = libraries
        self._results = results
        self.ours = ours
        reasons = {name: _why_not(name) for name in libraries}
        #: Libraries that can't be imported, and why.
        self.missing = {name: reason for name, reason in reasons.items() if reason}
        self.used: set[str] = set()

    def library(self, module: str) -> str | None:
        """The library that a module is of, None for others."""
        found = (n for n in self._libraries if module == n or module.startswith(f"{n}."))
        return next(found, None)

    def result(self, name: str) -> Any:
        """What an attribute or a call gives that says less itself."""
        if name not in self._results or not self.checks(self._results[name]):
            return None
        self.used.add(name)
        return Instance(load(self._results[name]))

    def checks(self, module: str) -> bool:
        """Whether a module is of a library that is here."""
        library = self.library(module)
        return library is not None and library not in self.missing


class Checker(ast.NodeVisitor):
    """Resolves one file's expressions as far as they lead into the libraries."""

    def __init__(self, tables: Tables, instances: dict[str, str]) -> None:
        self._tables = tables
        self._instances = instances
        self.matched: set[str] = set()
        self.problems: list[tuple[int, str]] = []
        self.checked: set[tuple[str, str]] = set()
        self.unchecked: set[str] = set()
        self._names: dict[str, Any] = {}
        self._function = ""
        self._seen: dict[int, Any] = {}

    def check(self, tree: ast.Module) -> None:
        """Check a file; its imports first, since functions may have them below their users."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._imports(node)
            elif isinstance(node, ast.ImportFrom):
                self._imports_from(node)
        self.visit(tree)

    def _imports(self, node: ast.Import) -> None:
        for alias in node.names:
            if (
                self._tables.checks(alias.name)
                and self._import(alias.name, node.lineno) is not None
            ):
                root = alias.name.partition(".")[0]
                target = alias.name if alias.asname else root
                self._names[alias.asname or root] = importlib.import_module(target)

    def _imports_from(self, node: ast.ImportFrom) -> None:
        if not node.module or node.level or not self._tables.checks(node.module):
            return
        module = self._import(node.module, node.lineno)
        for alias in node.names if module is not None else ():
            found = getattr(module, alias.name, None)
            if found is None and importlib.util.find_spec(f"{node.module}.{alias.name}"):
                found = importlib.import_module(f"{node.module}.{alias.name}")
            name = f"{node.module}.{alias.name}"
            problem = None if found is not None else "there is no such name"
            self._note(name, node.lineno, problem, node.module)
            self._names[alias.asname or alias.name] = found

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, node.name
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None:
                class_ = self._value(argument.annotation)
                if inspect.isclass(class_):
                    self._names[f"{node.name}.{argument.arg}"] = Instance(class_)
        self.generic_visit(node)
        self._function = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        value = self._value(node.value)
        if isinstance(value, Instance) and isinstance(node.targets[0], ast.Name):
            self._names.setdefault(f"{self._function}.{node.targets[0].id}", value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._value(node)
        self.generic_visit(node)

    def _value(self, node: ast.AST) -> Any:
        if id(node) not in self._seen:
            self._seen[id(node)] = self._resolve(node)
        return self._seen[id(node)]

    def _resolve(self, node: ast.AST) -> Any:
        text = f"{ast.unparse(node.func)}()" if isinstance(node, ast.Call) else ast.unparse(node)
        if text in self._instances:
            return self._told(text)
        if isinstance(node, ast.Name):
            scoped = f"{self._function}.{node.id}"
            if scoped in self._instances:
                return self._told(scoped)
            return self._names.get(scoped, self._names.get(node.id))
        if isinstance(node, ast.Subscript):
            value = self._value(node.value)
            return value if isinstance(value, Instance) and _is_array(value.of) else None
        if isinstance(node, ast.Attribute):
            return self._attribute(node, self._value(node.value))
        if isinstance(node, ast.Call):
            return self._call(node, self._value(node.func))
        return None

    def _attribute(self, node: ast.Attribute, base: Any) -> Any:
        if base is None or isinstance(base, Method):
            return None
        if not isinstance(base, Instance):
            found = getattr(base, node.attr, None)
            name = ast.unparse(node)
            exists = found is not None or name in self._tables.ours
            problem = None if exists else "there is no such name"
            self._note(name, node.lineno, problem, module_of(base) or name)
            return found
        name = f"{base.of.__name__}.{node.attr}"
        # What a constructor alone sets is in the annotations, or the docstring names it.
        exists = name in self._tables.ours or hasattr(base.of, node.attr)
        exists = exists or any(
            node.attr in vars(class_).get("__annotations__", {})
            or re.search(rf"\b{node.attr} \(", class_.__doc__ or "")
            for class_ in base.of.__mro__
        )
        problem = None if exists else "there is no such attribute"
        self._note(name, node.lineno, problem, base.of.__module__)
        if not exists:
            return None
        for class_ in base.of.__mro__:
            result = self._tables.result(f"{class_.__name__}.{node.attr}")
            if result is not None:
                return result
        return Method(base.of, node.attr)

    def _call(self, node: ast.Call, function: Any) -> Any:
        if ast.unparse(node.func) == "functools.partial":
            rest = ast.Call(node.args[0], [*node.args[1:], ast.Starred(node)], node.keywords)
            return self._call(ast.copy_location(rest, node), self._value(node.args[0]))
        if function is None or isinstance(function, Instance):
            return None
        name = ast.unparse(node.func)
        bound: list[Any] = []
        if isinstance(function, Method):
            name = f"{function.of.__name__}.{function.name}"
            static = inspect.getattr_static(function.of, function.name)
            if not isinstance(static, (staticmethod, classmethod)):
                bound = [None]
            target = getattr(function.of, function.name)
        else:
            target = function
        if not callable(target):
            return None
        signatures = signatures_of(target)
        if not signatures:
            self.unchecked.add(f"{name}()")
        else:
            problem = _mismatch(signatures, node, bound)
            self._note(f"{name}()", node.lineno, problem, module_of(target) or name)
        return self._result(name, target, function)

    def _result(self, name: str, target: Any, function: Any) -> Any:
        result = self._tables.result(f"{name}()")
        if result is not None:
            return result
        if inspect.isclass(target):
            return Instance(target)
        stub = stub_of(target)
        annotation = ast.unparse(stub.returns) if stub is not None and stub.returns else ""
        module = sys.modules.get(module_of(target) or "")
        class_ = getattr(module, annotation, None)
        return Instance(class_) if inspect.isclass(class_) else None

    def _import(self, name: str, line: int) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self._note(name, line, str(error), name)
            return None

    def _told(self, key: str) -> Any:
        """What ``INSTANCES`` says of a variable; None where its library is not installed."""
        self.matched.add(key)
        is_class, _, name = self._instances[key].rpartition(" ")
        if not self._tables.checks(name):
            return None
        return load(name) if is_class else Instance(load(name))

    def _note(self, name: str, line: int, problem: str | None, module: str) -> None:
        self.checked.add((self._tables.library(module) or "others", name))
        if problem:
            self.problems.append((line, f"{name}: {problem}"))


def _mismatch(signatures: list[inspect.Signature], node: ast.Call, bound: list[Any]) -> str | None:
    """Why a call fits none of the signatures; None where it fits one."""
    open_ended = any(isinstance(arg, ast.Starred) for arg in node.args) or any(
        keyword.arg is None for keyword in node.keywords
    )
    positional = bound + [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
    problem = None
    for signature in signatures:
        try:
            (signature.bind_partial if open_ended else signature.bind)(*positional, **keywords)
        except TypeError as error:
            problem = f"{error}; its signature is {signature}"
        else:
            return None
    return problem


def _is_array(class_: type) -> bool:
    # What a part of an array is, is an array.
    return class_.__name__ == "ndarray"


@functools.cache
def load(name: str) -> Any:
    """An object of a library by its full name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise ImportError(name)


def _why_not(library: str) -> str | None:
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        return "not installed" if library.startswith(error.name or "?") else str(error)
    except Exception as error:
        # A shared library that one of the wheels loads and does not bring is no ImportError.
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None
