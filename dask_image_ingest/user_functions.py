"""Tokens of the user's functions: their code and the values that they use.

Dask's token of an importable function is its name. But a module may be edited and reloaded, as is
usual in a notebook, and old results must not be taken for those of the new code.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np

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

# What pickle writes itself, with its items.
_PLAIN = frozenset({type(None), bool, int, float, bytes, tuple, list, dict})

# Attributes of classes that pickle refuses, or that appear with use.
_IGNORED = frozenset({"_abc_impl", "_value2member_map_"})

# Parts of the paths of installed packages, of the standard library, and of this package.
_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "<frozen "),
    *(path.rpartition("/")[0] + "/" for path in (inspect.__file__, __file__)),
)

_PACKAGE = f"{__name__.partition('.')[0]}."

# Bytecode differs between versions.
_PYTHON = f"{sys.version_info[:2]} {sys.flags.optimize}"


def stable_token(value: object, functions: bool = True) -> str:
    """Token that is the same in every process, and changes with the behaviour of a value.

    Parameters
    ----------
    value
        A function, or any object with functions and constants in it.
    functions
        Include the user's functions and objects. If False, an object without a stable token is
        represented by its type.
    """
    return _Tokenizer("stable" if functions else "no functions").token(value)


def token_and_code(function: object) -> tuple[str, str]:
    """Token of a function within this process, and what `refuse_other_code` compares.

    Objects without a stable token count by id.
    """
    return _Tokenizer("process").token(function), _code(function)


def refuse_other_code(argument: str, function: object, code: str) -> None:
    """Refuse to run a function if this process has imported other code than the query's.

    ``code`` is that of `token_and_code` in the process that built the query, ``argument`` the name
    of the function in the error.
    """
    if code.startswith(_PYTHON) and code != _code(function):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise FunctionError(
            f"{argument} uses {_module_of(function)}.{name}, and this process has other code by "
            "that name than the query was made with. A worker imports a module once: after an "
            "edit, let the workers import it anew by client.restart(), or send it by "
            "client.upload_file(). If the module was reloaded after the query was made, make the "
            "query again"
        )


def _code(function: object) -> str:
    """Digest of the code of a function or class, and of the user's own ones that it names."""
    while isinstance(function, functools.partial):
        function = function.func
    is_code = isinstance(function, (FunctionType, MethodType, type))
    return f"{_PYTHON} {_Tokenizer('code').token(function if is_code else type(function))}"


_pickler: Any = pickle._Pickler

# Of Python alone: an import of dill, and so of datasets, adds others to the table of pickle.
_DISPATCH = {
    type(None): _pickler.save_none,
    bool: _pickler.save_bool,
    int: _pickler.save_long,
    float: _pickler.save_float,
    bytes: _pickler.save_bytes,
    bytearray: _pickler.save_bytearray,
    pickle.PickleBuffer: _pickler.save_picklebuffer,
    str: _pickler.save_str,
    tuple: _pickler.save_tuple,
    list: _pickler.save_list,
    dict: _pickler.save_dict,
    set: _pickler.save_set,
    frozenset: _pickler.save_frozenset,
    FunctionType: _pickler.save_global,
    type: _pickler.save_type,
}


class _Tokenizer(pickle._Pickler):
    """Pickler into a digest, whose bytes depend on values alone.

    Those of other picklers depend on which equal objects are one object, on the order of sets, and
    on random names that cloudpickle gives to classes. The user's functions count by their bytecode,
    defaults, closure and globals, and modules by name and version. What pickle refuses is an error,
    or counts by its id ("process"), or by its type ("no functions", where the user's functions and
    objects don't count at all). With "code" the functions' values don't count.
    """

    dispatch: ClassVar = _DISPATCH
    write: Callable[[bytes], object]  # set by the pickler

    def __init__(self, mode: Literal["stable", "process", "no functions", "code"]) -> None:
        self._hash = blake2b(digest_size=16)
        super().__init__(SimpleNamespace(write=self._hash.update), protocol=5)
        self.fast = True  # without references to objects that were written before
        self._mode = mode
        self._open: dict[int, int] = {}  # depth of the objects that are being written, by id
        self._written: set[FunctionType | type] = set()  # with their content

    def token(self, value: object) -> str:
        """Token of a value."""
        self.dump(value)
        return self._hash.hexdigest()

    def save(self, value: object, save_persistent_id: bool = True) -> None:
        """Write a value; called by pickle for each part of a value."""
        if type(value) is str:  # most parts are
            self.write(repr(value).encode())
            return
        key = id(value)
        if key in self._open:  # a cycle
            _pickler.save(self, f"{len(self._open) - self._open[key]} above")
            return
        self._open[key] = len(self._open)
        try:
            parts = None if type(value) in _PLAIN else self._parts(value)
            if parts is not None:
                self.write(b"parts")
            _pickler.save(self, value if parts is None else parts)
        except FunctionError:
            raise
        except Exception as error:  # it can't be pickled, for whatever reason
            if self._mode == "stable":
                raise FunctionError(
                    f"an object of {type(value).__module__}.{type(value).__qualname__} has no "
                    "token that is the same in every process"
                ) from error
            _pickler.save(self, key if self._mode == "process" else type(value).__qualname__)
        finally:
            del self._open[key]

    def _parts(self, value: Any) -> tuple[Any, ...] | None:
        """Parts of a value to write in its place."""
        kind = type(value)
        if self._mode == "no functions" and _is_users(value):
            return ("the user's",)
        if isinstance(value, ModuleType):
            return value.__name__, _version(value)
        if self._mode == "code" and kind is FunctionType:
            value = inspect.unwrap(value)  # a library's decorator is the user's code to a worker
        if isinstance(value, (FunctionType, type)):
            # In another process a class inside a function has lost the function's name.
            own_name = value.__name__ if self._mode == "code" else value.__qualname__
            name = (value.__module__, own_name)
            if value in self._written:
                return name
            self._written.add(value)
            if isinstance(value, type):
                return *name, *self._of_class(value)
            return *name, *self._of_function(value)
        if kind is np.ndarray and value.dtype.kind in "biuf":
            return kind, value.dtype.str, value.shape, value.tobytes()
        if kind is CodeType:
            return (_code_digest(value),)
        if isinstance(value, (set, frozenset)):
            members = sorted(_Tokenizer(self._mode).token(member) for member in value)
            return kind, members, getattr(value, "__dict__", None)
        if kind in _CONTENTS:
            return kind, *(getattr(value, name) for name in _CONTENTS[kind])
        if kind is object:  # all have the same pickle, but a sentinel is compared by id
            raise TypeError
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith(_PACKAGE):
            # Other fields follow from those of __init__, or change no result.
            fields = (f for f in dataclasses.fields(kind) if f.init and f.compare)
            return kind, *(getattr(value, f.name) for f in fields)
        if hasattr(kind, "__dask_tokenize__") and _is_users(kind):
            return kind, value.__dask_tokenize__()
        return None

    def _of_function(self, function: FunctionType) -> tuple[Any, ...]:
        used: dict[Any, Any] = {}
        for number, cell in enumerate(function.__closure__ or ()):
            with suppress(ValueError):  # an empty cell
                used[number] = cell.cell_contents
        if self._mode == "code":  # values may differ between processes
            used = {n: v for n, v in used.items() if isinstance(v, (FunctionType, type))}
        if not _is_users(function, by_file=self._mode != "code"):
            # Not of Dask, whose functions are what a query consists of.
            is_dasks = _module_of(function).startswith("dask")
            return used, None if is_dasks else _version(function)
        for name in sorted(_globals(function.__code__) & function.__globals__.keys()):
            value = function.__globals__[name]
            if self._mode != "code" or isinstance(value, (FunctionType, type)):
                used[name] = value
        if self._mode == "code":
            return function.__code__, used
        versions = list(map(_version, used.values()))
        return function.__code__, used, versions, function.__defaults__, function.__kwdefaults__

    def _of_class(self, kind: type) -> tuple[Any, ...]:
        if not _is_users(kind):
            return ()
        content = {}
        for name, value in sorted(vars(kind).items()):
            is_code = isinstance(value, (FunctionType, *_CONTENTS))
            is_value = not (name.startswith("__") or name in _IGNORED) and self._mode != "code"
            if is_code or is_value:
                content[name] = value
        return type(kind), kind.__bases__, content


def _is_users(value: object, by_file: bool = True) -> bool:
    """True for a function, class or object that is the user's, not a library's.

    A function that has come from another process has lost its file.
    """
    if by_file and isinstance(value, FunctionType):
        file = value.__code__.co_filename
    elif _module_of(value) in ("__main__", "__mp_main__"):
        return True  # in a worker this is Dask's own program
    else:
        module = sys.modules.get(_module_of(value))
        file = getattr(module, "__file__", None) or ""
        # A notebook has no file, nor what exec makes, nor modules made by compiled code.
        if not file and module is not None and "__builtins__" not in vars(module):
            return False
    return not any(folder in file for folder in _LIBRARIES)


def _module_of(value: object) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _version(value: object) -> str | None:
    """Version of the library of a value, from the nearest module that has one."""
    name = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
    while name and not hasattr(sys.modules.get(name), "__version__"):
        name = name.rpartition(".")[0]
    return str(sys.modules[name].__version__) if name else None


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
    return _Tokenizer("stable").token(parts)
