"""Tokens of the user's functions, by the code that this process has loaded and what that code uses.

Dask's token of an importable function is its name. But a module may be edited and reloaded, as is
usual in a notebook, and old results must not be taken for those of the new code. So a token here
covers bytecode, defaults, closure and the globals that the code names, recursively through the
user's functions, classes, objects and modules. An object counts by what pickle would send to a
worker, a library by its version and the names that are used.

It covers loaded code, not source files: a file that was edited and not imported anew is not what
runs. It is a digest of digests, not of the bytes of a pickle, which depend on which equal objects
are one object, on the order of sets, and on random names that cloudpickle gives to classes.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from pickle import PickleBuffer
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from tlz.functoolz import curry

from dask_image_ingest.errors import FunctionError

# What pickle refuses or sends by name.
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    property: attrgetter("fget", "fset", "fdel"),
    staticmethod: attrgetter("__func__"),
    classmethod: attrgetter("__func__"),
    MethodType: attrgetter("__self__", "__func__"),
    functools.cached_property: attrgetter("func"),
    curry: attrgetter("func", "args", "keywords"),
    MappingProxyType: dict,
    MemberDescriptorType: attrgetter("__name__"),  # a slot
}

# Attributes of a class that follow from others, appear with use, or have addresses in them.
_IGNORED = {
    *("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__"),
    *("__dict__", "__doc__", "__firstlineno__", "__module__", "__signature__", "__slotnames__"),
    *("__static_attributes__", "__weakref__", "_abc_impl", "_value2member_map_"),
}

_PACKAGE = f"{__name__.partition('.')[0]}."

# Files of frozen modules, of the standard library, and of this package.
_LIBRARIES = ("<frozen", f"{Path(os.__file__).parent}/", f"{Path(__file__).parent}/")

# Key in the code of a function, among names of modules.
_PYTHON = "Python"
_VERSION = f"{sys.version_info[:2]} {sys.flags.optimize}"

_NAMED = (FunctionType, BuiltinFunctionType, type)


def stable_token(value: Any, functions: bool = True) -> str:
    """Token that is the same in every process, and changes with the behaviour of a value.

    Parameters
    ----------
    value
        A function, or any object with functions and constants in it.
    functions
        Include the user's functions and objects. If False, an object without a stable token is
        represented by its type.

    Raises
    ------
    FunctionError
        If it contains an object without a stable token.
    """
    return _Walk("stable" if functions else "no functions").digest(value)


def token_and_code(function: Any) -> tuple[str, dict[str, str]]:
    """Token of a function within this process, and what `refuse_other_code` compares.

    Objects without a stable token count by id.
    """
    walk = _Walk("process")
    token = walk.digest(function)
    code = {name: digest for name in walk.names if (digest := _imported_code(name))}
    return token, code | {_PYTHON: _VERSION}


def refuse_other_code(argument: str, code: Mapping[str, str]) -> None:
    """Refuse to run a function if this process has imported other code than the query's.

    Parameters
    ----------
    argument
        Name of the function in the error.
    code
        From `token_and_code`, in the process that built the query.

    Raises
    ------
    FunctionError
    """
    if code[_PYTHON] != _VERSION:  # bytecode differs: no comparison is possible
        return
    loaded = [name for name in code if name.partition(":")[0] in sys.modules]
    different = [name for name in sorted(loaded) if _imported_code(name) != code[name]]
    if different:
        raise FunctionError(
            f"{argument} uses {', '.join(different).replace(':', '.')}, and this process has other "
            "code by that name than the query was made with. A worker imports a module once: after "
            "an edit, let the workers import it anew by client.restart(), or send it by "
            "client.upload_file(). Where the module was reloaded after the query was made, make "
            "the query again"
        )


class _Walk:
    """Walk over a value and all that it uses.

    In mode ``"stable"``, an object that pickle refuses is an error; in ``"process"``, it counts by
    its id; in ``"no functions"`` by its type, and what is the user's not at all.
    """

    def __init__(self, mode: str) -> None:
        self.names: set[str] = set()  # of the user's functions and classes, "module:name"
        self._mode = mode
        self._open: dict[int, int] = {}  # depth of the objects that are being digested, by id
        self._done: dict[int, tuple[Any, str]] = {}  # with the object, whose id stays its own

    def digest(self, value: Any) -> str:
        """Digest of a value; of a plain one, its text."""
        kind = type(value)
        if kind in (type(None), bool, float, complex, str):
            return f"{kind.__name__} {value!r}"
        if kind is int:
            return hex(value)  # the number of decimal digits is limited
        if kind is bytes or kind is PickleBuffer:
            return f"bytes {_hash(value if kind is bytes else value.raw())}"
        if self._mode == "no functions" and _is_users(value):
            return "the user's"
        key = id(value)
        if key in self._open:  # a cycle
            return f"{len(self._open) - self._open[key]} above"
        if key not in self._done:
            self._open[key] = len(self._open)
            parts = [self.digest(part) for part in self._parts(value)]
            del self._open[key]
            self._done[key] = value, _hash(repr(parts).encode())
        return self._done[key][1]

    def _parts(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if isinstance(value, (FunctionType, type, ModuleType)):
            module = _module_name(value)
            if isinstance(value, ModuleType):
                return module, self._module(value)
            # Of a function inside a function, pickle sends the code itself.
            if _is_users(value) and "<locals>" not in value.__qualname__:
                self._note(value)
            parts = self._class(value) if isinstance(value, type) else self._function(value)
            return module, value.__qualname__, *parts
        if kind is CodeType:
            return (_code_digest(value),)
        if kind is list or kind is tuple:
            return kind, *value
        if isinstance(value, (set, frozenset)):
            return kind, sorted(map(self.digest, value)), getattr(value, "__dict__", None)
        if kind in _CONTENTS:
            return kind, _CONTENTS[kind](value)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith(_PACKAGE):
            # Other fields follow from those of __init__, or change no result.
            fields = (f for f in dataclasses.fields(kind) if f.init and f.compare)
            return kind, *(getattr(value, f.name) for f in fields)
        if hasattr(kind, "__dask_tokenize__") and _is_users(kind):
            return kind, value.__dask_tokenize__()
        return kind, *self._pickled(value)

    def _note(self, value: Any) -> None:
        """Note what a module has by the name that leads to a function or class."""
        self.names.add(f"{_module_name(value)}:{value.__qualname__.partition('.')[0]}")

    def _function(self, function: FunctionType) -> Iterator[Any]:
        closure = _closure(function)
        if not _is_users(function):  # of a library's decorator, with the user's in the closure
            # Not of Dask, whose functions are what a query consists of.
            version = None if _module_name(function).startswith("dask") else _version(function)
            yield from (closure, version)
            return
        names = _names(function.__code__)
        # Without what the function sets itself when it runs, such as a counter.
        own = {key: value for key, value in vars(function).items() if key not in names.attributes}
        yield from (function.__code__, function.__defaults__, function.__kwdefaults__, own)
        if names.used & {"globals", "eval", "exec"}:
            yield sys.modules.get(_module_name(function))
        more = closure | _imports(function)
        space = {**function.__globals__, **more}
        read = (names.read - names.globals) | more.keys()
        yield from self._used(space, read, names.used, set())

    def _used(
        self, space: Mapping[str, Any], read: set[str], names: set[str], seen: set[int]
    ) -> Iterator[Any]:
        """The values that are read, and those of ``names`` in the user's modules among them."""
        for name in sorted(read & space.keys()):
            value = space[name]
            yield from (name, value, _version(value))
            if isinstance(value, FunctionType) and _is_users(value):  # of a decorator, perhaps
                self._note(value)
            if isinstance(value, ModuleType) and _is_users(value) and id(value) not in seen:
                seen.add(id(value))
                yield from self._used(vars(value), names, names, seen)

    def _class(self, kind: type) -> Iterator[Any]:
        if _is_users(kind):
            yield from (type(kind), kind.__bases__)
            for name, value in vars(kind).items():
                # Pydantic's other attributes follow from the fields.
                pydantic = name.startswith("__pydantic_") and name != "__pydantic_fields__"
                if name not in _IGNORED and not pydantic:
                    yield from (name, value)

    def _module(self, module: ModuleType) -> list[Any]:
        """The code of a user's module, of which a function may use anything by ``getattr``."""
        names = [f"{module.__name__}:{name}" for name in sorted(vars(module)) if _is_users(module)]
        return [(name, digest) for name in names if (digest := _imported_code(name))]

    def _pickled(self, value: Any) -> Iterable[Any]:
        try:
            if type(value) is object:  # all have the same pickle, but a sentinel is compared by id
                raise TypeError
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce else value.__reduce_ex__(5)
        except Exception as error:  # it can't be pickled, for whatever reason
            if self._mode == "stable":
                raise FunctionError(
                    f"an object of {type(value).__module__}.{type(value).__qualname__} has no "
                    "token that is the same in every process"
                ) from error
            return [id(value)] if self._mode == "process" else []
        if isinstance(reduced, str):  # a name; the attributes may have the function that it wraps
            reduced = _module_name(value), reduced, getattr(value, "__dict__", None)
        # A function, its arguments, state, items.
        return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def _is_users(value: Any) -> bool:
    """True for a function, class, module or object that is the user's, not a library's."""
    if isinstance(value, FunctionType):
        return _is_own_file(value.__code__.co_filename)
    name = _module_name(value)
    module = sys.modules.get(name)
    if module is None or name in sys.builtin_module_names:
        return module is None  # made by exec
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    # A notebook has no file, and neither have modules made by compiled code.
    return _is_own_file(str(file)) if file else "__builtins__" in vars(module)


def _is_own_file(path: str) -> bool:
    # By folder names too, as packages of another environment may be on sys.path.
    in_packages = "/site-packages/" in path or "/dist-packages/" in path
    return not in_packages and not path.startswith(_LIBRARIES)


def _module_name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return str(getattr(value if isinstance(value, _NAMED) else type(value), "__module__", None))


def _version(value: Any) -> str | None:
    """Version of the library of a value, from the nearest module that has one."""
    name = _module_name(value)
    while name and not hasattr(sys.modules.get(name), "__version__"):
        name = name.rpartition(".")[0]
    return str(sys.modules[name].__version__) if name else None


def _imported_code(name: str) -> str | None:
    """Digest of the code that this process has imported by a name, with decorators and methods.

    None if it is of another module, or of ``__main__``, which pickle sends by value. No constants:
    they may differ where machines do, and change with use.
    """
    module, _, name = name.partition(":")
    first = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if module == "__main__" or getattr(first, "__module__", None) != module:
        return None
    values, codes, seen = [first], [], {}
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FunctionType):
            values += _closure(value).values()
            if _is_users(value):
                codes.append(_code_digest(value.__code__))
        elif isinstance(value, type) and value.__module__ == module:
            values += vars(value).values()
        elif type(value) in _CONTENTS:
            contents = _CONTENTS[type(value)](value)
            values += contents if isinstance(contents, tuple) else [contents]
        values.append(getattr(value, "__dict__", {}).get("__wrapped__"))
    return _hash(repr(sorted(codes)).encode()) if codes else None


def _closure(function: FunctionType) -> dict[str, Any]:
    contents = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # an empty cell
            contents[name] = cell.cell_contents
    return contents


def _imports(function: FunctionType) -> dict[str, Any]:
    """The user's modules that a function imports when it runs, imported now."""
    modules = {}
    for level, name, names in _names(function.__code__).imports:
        with suppress(Exception):  # an import may fail for whatever reason, here as in the function
            spec = None if level else importlib.util.find_spec(name.partition(".")[0])
            places = spec and ([spec.origin] if spec.origin else spec.submodule_search_locations)
            if all(map(_is_own_file, places or ())):
                module = __import__(name, function.__globals__, None, names, level)
                modules[f"import {'.' * level}{name}"] = module
    return modules


class _Names(NamedTuple):
    """Names in code, and in the functions inside."""

    used: set[str]  # globals and attributes
    read: set[str]  # globals: not those with the name of an attribute, as `self.client`
    globals: set[str]  # that it sets
    attributes: set[str]  # that it sets
    imports: set[tuple[int, str, tuple[str, ...] | None]]  # dots, module, names


# The last one is of Python 3.12 and later, in class bodies.
_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@functools.lru_cache(2000)
def _names(code: CodeType) -> _Names:
    found = _Names(set(code.co_names), set(), set(), set(), set())
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for place, step in enumerate(steps):
        if step.opname in _READS_GLOBAL:
            found.read.add(step.argval)
        elif step.opname == "STORE_GLOBAL":
            found.globals.add(step.argval)
        elif step.opname == "STORE_ATTR":
            found.attributes.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, names = (before.argval for before in steps[place - 2 : place])
            found.imports.add((level, step.argval, names))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            pairs: Iterable[tuple[set[Any], set[Any]]] = zip(found, _names(inner), strict=True)
            for own, more in pairs:
                own |= more
    return found


@functools.lru_cache(2000)  # each task compares the code of its functions
def _code_digest(code: CodeType) -> str:
    """Digest of a code object, without its file and its line numbers."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = (counts, names, code.co_consts, code.co_code, code.co_exceptiontable)
    return _Walk("stable").digest(parts)


def _hash(data: Any) -> str:
    return blake2b(data, digest_size=16).hexdigest()
