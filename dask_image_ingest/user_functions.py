"""Tokens of the user's functions: their code and the values that they use.

Dask's token of an importable function is its name. But a module may be edited and reloaded, as is
usual in a notebook, and old results must not be taken for those of the new code. So a token here
covers bytecode, defaults, closure and the globals that the code names, also of the user's functions
and classes among them. Modules count by name and version, other objects by what pickle sends.

It is a digest of digests, not of the bytes of a pickle, which depend on which equal objects are one
object, on the order of sets, and on random names that cloudpickle gives to classes.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from operator import attrgetter
from pickle import PickleBuffer
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from dask_image_ingest.errors import FunctionError

# What pickle refuses or sends by name: attributes that have the contents.
_CONTENTS = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    MethodType: ("__self__", "__func__"),
    functools.cached_property: ("func",),
    functools.lru_cache(len).__class__: ("__wrapped__",),
}

# Attributes of classes that pickle refuses, or that appear with use.
_IGNORED = frozenset({"_abc_impl", "_value2member_map_"})

# Parts of the paths of installed packages, of the standard library, and of this package.
_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "<frozen "),
    *(path.rpartition("/")[0] + "/" for path in (inspect.__file__, __file__)),
)

_PACKAGE = f"{__name__.partition('.')[0]}."

# Key in the code of a function, among names; bytecode differs between versions.
_PYTHON = "Python"
_VERSION = f"{sys.version_info[:2]} {sys.flags.optimize}"


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
    return walk.digest(function), walk.code | {_PYTHON: _VERSION}


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
    if code[_PYTHON] != _VERSION:
        return
    loaded = [name for name in code if name.partition(":")[0] in sys.modules]
    different = [name for name in sorted(loaded) if _loaded_code(name) != code[name]]
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

    An object that pickle refuses is an error, or counts by its id ``"process"``, or by its type.
    With ``"no functions"`` the user's functions and objects do not count at all.
    """

    def __init__(self, mode: Literal["stable", "process", "no functions"]) -> None:
        self.code: dict[str, str] = {}  # digest by "module:name", of importable functions
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
        if isinstance(value, ModuleType):
            return value.__name__, _version(value)
        if isinstance(value, (FunctionType, type)):
            parts = self._class(value) if isinstance(value, type) else self._function(value)
            return _module_name(value), value.__qualname__, *parts
        if kind is CodeType:
            return (_code_digest(value),)
        if kind is list or kind is tuple:
            return kind, *value
        if isinstance(value, (set, frozenset)):
            return kind, sorted(map(self.digest, value)), getattr(value, "__dict__", None)
        if kind in _CONTENTS:
            return kind, *(getattr(value, name) for name in _CONTENTS[kind])
        if dataclasses.is_dataclass(kind) and _module_name(kind).startswith(_PACKAGE):
            # Other fields follow from those of __init__, or change no result.
            fields = (f for f in dataclasses.fields(kind) if f.init and f.compare)
            return kind, *(getattr(value, f.name) for f in fields)
        if hasattr(kind, "__dask_tokenize__") and _is_users(kind):
            return kind, value.__dask_tokenize__()
        return kind, *self._pickled(value)

    def _function(self, function: FunctionType) -> Iterator[Any]:
        yield from _closure(function)
        if not _is_users(function):
            # Not of Dask, whose functions are what a query consists of.
            yield None if _module_name(function).startswith("dask") else _version(function)
            return
        name = f"{function.__module__}:{function.__qualname__}"
        digest = _code_digest(inspect.unwrap(function).__code__)
        # Pickle sends the code itself of a function of __main__, or inside another one.
        if function.__module__ != "__main__" and _loaded_code(name) == digest:
            self.code[name] = digest
        yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
        for name in sorted(_globals(function.__code__) & function.__globals__.keys()):
            value = function.__globals__[name]
            yield from (name, value, _version(value))

    def _class(self, kind: type) -> Iterator[Any]:
        if _is_users(kind):
            yield from (type(kind), kind.__bases__)
            for name, value in vars(kind).items():
                is_code = isinstance(value, (FunctionType, *_CONTENTS))
                if is_code or not (name.startswith("__") or name in _IGNORED):
                    yield from (name, value)

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
        if isinstance(reduced, str):
            return _module_name(value), reduced
        # A function, its arguments, state, items.
        return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def _is_users(value: Any) -> bool:
    """True for a function, class or object that is the user's, not a library's."""
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
    else:
        module = sys.modules.get(_module_name(value))
        file = getattr(module, "__file__", None) or ""
        # A notebook has no file, nor what exec makes, nor modules made by compiled code.
        if not file and module is not None and "__builtins__" not in vars(module):
            return False
    return not any(folder in file for folder in _LIBRARIES)


def _module_name(value: Any) -> str:
    named = value if isinstance(value, (FunctionType, BuiltinFunctionType, type)) else type(value)
    return str(named.__module__)


def _version(value: Any) -> str | None:
    """Version of the library of a value, from the nearest module that has one."""
    name = value.__name__ if isinstance(value, ModuleType) else _module_name(value)
    while name and not hasattr(sys.modules.get(name), "__version__"):
        name = name.rpartition(".")[0]
    return str(sys.modules[name].__version__) if name else None


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


@functools.lru_cache(2000)
def _globals(code: CodeType) -> frozenset[str]:
    """Names of globals that code reads and does not set, with those of functions inside."""
    steps = [*dis.get_instructions(code)]
    read = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            read |= _globals(inner)
    return frozenset(read - {step.argval for step in steps if step.opname == "STORE_GLOBAL"})


@functools.lru_cache(2000)  # each task compares the code of its functions
def _code_digest(code: CodeType) -> str:
    """Digest of a code object, without its file and its line numbers."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = (counts, names, code.co_consts, code.co_code, code.co_exceptiontable)
    return _Walk("stable").digest(parts)


def _loaded_code(name: str) -> str | None:
    """Digest of the code of a function that this process has loaded; None if there is none."""
    module, _, qualname = name.partition(":")
    try:
        function = inspect.unwrap(attrgetter(qualname)(sys.modules[module]))
        return _code_digest(getattr(function, "__func__", function).__code__)
    except (AttributeError, KeyError):
        return None


def _hash(data: Any) -> str:
    return blake2b(data, digest_size=16).hexdigest()
