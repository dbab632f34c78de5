"""Check every name and call that this project uses of the GPU libraries against what is installed.

Needs the wheels (``pip install 'dask-image-ingest[cuda12]'``, 6 GB) and no GPU: modules are
imported, names looked up and call signatures bound, but nothing is called. Where an object's class
does not show in the code, ``INSTANCES`` and ``RESULTS`` say what it is.

Prints ``file:line name: problem`` for each problem and exits with 1 if there is one. Without the
wheels it says what is absent and exits with 0.
"""

# ruff: noqa: D102, T201 - a command line tool, whose visit_... methods ast.NodeVisitor names

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PLACES = ("dask_image_ingest", "tests/gpu", "tests/gpu_probes.py", "benchmarks/gpu.py")
LIBRARIES = ("cudf", "cupy", "dask_cuda", "dask_cudf", "nvidia.dali", "pylibcudf", "rmm")

_BATCH = "nvidia.dali.backend.TensorListGPU"
_BUFFER = "cudf.core.buffer.Buffer"

#: What variables are, by file, function and name.
INSTANCES = {
    "frames/cudf.py": {
        "append.images": _BATCH,
        "_copy.images": _BATCH,
        "_copy.room": "cupy.ndarray",
        "arrays.images": "cudf.Series",
        "arrays.column": "cudf.core.column.ColumnBase",
        "arrays.data": "pylibcudf.Column",
        "_cupy_view.buffer": _BUFFER,
        "_image_column.child": "pylibcudf.Column",
        "self._flat": "cupy.ndarray",
        "self._room()": "cupy.ndarray",
        "self._stream": "cupy.cuda.Stream",
    },
    "decode/dali.py": {
        "check_output.images": _BATCH,
        "_build.pipeline": "nvidia.dali.Pipeline",
        "_build.pipeline_class": "class nvidia.dali.Pipeline",
        "self._pipeline": "nvidia.dali.Pipeline",
    },
    "gpu_probes.py": {
        "spilled_bytes.manager": "cudf.core.buffer.spill_manager.SpillManager",
        "spilled_bytes.buffer": "cudf.core.buffer.spillable_buffer.SpillableBufferOwner",
    },
}

#: What attributes and results are that have no annotation, or one that says less.
RESULTS = {
    "Series._column": "cudf.core.column.ColumnBase",
    "ColumnBase.plc_column": "pylibcudf.Column",
    "Column.data()": _BUFFER,
    "Column.type()": "pylibcudf.DataType",
    "Buffer.owner": "cudf.core.buffer.BufferOwner",
    "ndarray.data": "cupy.cuda.MemoryPointer",
    "cupy.empty()": "cupy.ndarray",
}

#: Names that this project itself puts into a library.
OURS = {"cudf.DataFrame.images"}


class Instance(NamedTuple):
    """A value of which only the class is known."""

    of: type


class Method(NamedTuple):
    """A member of a class that was reached through an instance."""

    of: type
    name: str


class Checker(ast.NodeVisitor):
    """Resolves one file's expressions as far as they lead into the libraries."""

    def __init__(self, path: Path) -> None:
        found = (names for end, names in INSTANCES.items() if path.as_posix().endswith(end))
        self._instances = next(found, {})
        self.problems: list[tuple[int, str]] = []
        self.checked: set[str] = set()
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
            if _ours(alias.name) and self._import(alias.name, node.lineno) is not None:
                root = alias.name.partition(".")[0]
                target = alias.name if alias.asname else root
                self._names[alias.asname or root] = importlib.import_module(target)

    def _imports_from(self, node: ast.ImportFrom) -> None:
        if not node.module or node.level or not _ours(node.module):
            return
        module = self._import(node.module, node.lineno)
        for alias in node.names if module is not None else ():
            found = getattr(module, alias.name, None)
            if found is None and importlib.util.find_spec(f"{node.module}.{alias.name}"):
                found = importlib.import_module(f"{node.module}.{alias.name}")
            name = f"{node.module}.{alias.name}"
            self._note(name, node.lineno, None if found is not None else "there is no such name")
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
        text = ast.unparse(node)
        if text in self._instances:
            return Instance(_load(self._instances[text]))
        if isinstance(node, ast.Name):
            scoped = f"{self._function}.{node.id}"
            if scoped in self._instances:
                is_class, _, name = self._instances[scoped].rpartition(" ")
                return _load(name) if is_class else Instance(_load(name))
            return self._names.get(scoped, self._names.get(node.id))
        if isinstance(node, ast.Subscript):
            value = self._value(node.value)
            return value if value == Instance(_load("cupy.ndarray")) else None
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
            exists = found is not None or name in OURS
            self._note(name, node.lineno, None if exists else "there is no such name")
            return found
        name = f"{base.of.__name__}.{node.attr}"
        # What a constructor alone sets is in the annotations, or the docstring names it.
        exists = hasattr(base.of, node.attr) or any(
            node.attr in vars(class_).get("__annotations__", {})
            or re.search(rf"\b{node.attr} \(", class_.__doc__ or "")
            for class_ in base.of.__mro__
        )
        self._note(name, node.lineno, None if exists else "there is no such attribute")
        if not exists:
            return None
        for class_ in base.of.__mro__:
            if f"{class_.__name__}.{node.attr}" in RESULTS:
                return Instance(_load(RESULTS[f"{class_.__name__}.{node.attr}"]))
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
        signature = signature_of(target)
        if signature is None:
            self.unchecked.add(f"{name}()")
        else:
            open_ended = any(isinstance(arg, ast.Starred) for arg in node.args) or any(
                keyword.arg is None for keyword in node.keywords
            )
            positional = bound + [a for a in node.args if not isinstance(a, ast.Starred)]
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            problem = None
            try:
                (signature.bind_partial if open_ended else signature.bind)(*positional, **keywords)
            except TypeError as error:
                problem = f"{error}; its signature is {signature}"
            self._note(f"{name}()", node.lineno, problem)
        return self._result(name, target, function)

    def _result(self, name: str, target: Any, function: Any) -> Any:
        if f"{name}()" in RESULTS:
            return Instance(_load(RESULTS[f"{name}()"]))
        if inspect.isclass(target):
            return Instance(target)
        stub = _stub(target)
        annotation = ast.unparse(stub.returns) if stub is not None and stub.returns else ""
        module = sys.modules.get(_module(target) or "")
        class_ = getattr(module, annotation, None)
        return Instance(class_) if inspect.isclass(class_) else None

    def _import(self, name: str, line: int) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self._note(name, line, str(error))
            return None

    def _note(self, name: str, line: int, problem: str | None) -> None:
        self.checked.add(name)
        if problem:
            self.problems.append((line, f"{name}: {problem}"))


def signature_of(target: Any) -> inspect.Signature | None:
    """A signature from Python, else from the stub beside the module, else from the docstring."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        pass
    stub = _stub(target)
    if stub is not None:
        arguments = ast.unparse(stub.args)
        arguments = arguments.removeprefix("self, ") if inspect.isclass(target) else arguments
        return _parsed(arguments)
    first = (target.__doc__ or "").strip().split("\n")[0]
    written = re.match(r"[\w.]+\((.*)\)", first)
    return _parsed(written[1]) if written else None


def _parsed(arguments: str) -> inspect.Signature | None:
    """The signature of a list of arguments in Python's, Cython's or pybind11's way of writing."""
    parameters = []
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


def _stub(target: Any) -> ast.FunctionDef | None:
    """A function's definition in the ``.pyi`` of its module; for a class that of ``__init__``."""
    module = sys.modules.get(_module(target) or "")
    path = getattr(module, "__file__", None) or ""
    tree: Any = _stub_of_file(re.sub(r"(\.[\w-]+)?\.(so|py)$", ".pyi", path))
    names = getattr(target, "__qualname__", "").split(".")
    for name in [*names, "__init__"] if inspect.isclass(target) else names:
        body = getattr(tree, "body", ())
        tree = next((part for part in body if getattr(part, "name", None) == name), None)
    return tree if isinstance(tree, ast.FunctionDef) else None


def _module(target: Any) -> str | None:
    class_ = getattr(target, "__objclass__", None)
    return getattr(target, "__module__", None) or getattr(class_, "__module__", None)


@functools.cache
def _stub_of_file(path: str) -> ast.Module | None:
    return (
        ast.parse(Path(path).read_text()) if path.endswith(".pyi") and Path(path).exists() else None
    )


@functools.cache
def _load(name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise ImportError(name)


def _ours(module: str) -> bool:
    return any(module == library or module.startswith(f"{library}.") for library in LIBRARIES)


def _missing() -> list[str]:
    def absent(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            return True

    return [name for name in LIBRARIES if absent(name)]


def _files(places: Iterable[str]) -> list[Path]:
    paths = [Path(place) if Path(place).is_absolute() else ROOT / place for place in places]
    return [file for p in paths for file in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]


def main() -> int:
    """Check the files, say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("places", nargs="*", default=PLACES, help="files and folders to check")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what was checked")
    arguments = parser.parse_args()
    os.environ["RAPIDS_NO_INITIALIZE"] = "1"  # cuDF then imports without a GPU
    missing = _missing()
    if missing:
        print(f"check_gpu_api: not checked, {', '.join(missing)} not installed")
        return 0
    checked: set[str] = set()
    unchecked: set[str] = set()
    problems = 0
    for path in _files(arguments.places):
        if not path.exists():
            continue
        checker = Checker(path)
        checker.check(ast.parse(path.read_text()))
        checked |= checker.checked
        unchecked |= checker.unchecked
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for line, problem in dict.fromkeys(checker.problems):
            problems += 1
            print(f"{shown}:{line} {problem}")
    if arguments.verbose:
        print("checked:", ", ".join(sorted(checked)))
    if unchecked:
        print("names without a signature to check:", ", ".join(sorted(unchecked)))
    print(f"check_gpu_api: {len(checked)} names and calls, {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
