"""Tokens of a user's functions: by their code, and by all of the user's own that they use.

Dask knows a function that can be imported by its name alone, as pickle does. A module may be edited
and reloaded under the same names, as usual in a notebook, and its functions have to become others
by that. So the code of a function counts here, with its defaults, closures and the globals that it
uses: other functions and classes of the user's, and values. Objects count as pickle sends them,
which is what a worker gets. Installed packages count by the names in them.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
from dask.base import normalize_token
from tlz.functoolz import Compose, curry

from dask_image_ingest.errors import FunctionError
from dask_image_ingest.user_functions.user_code import (
    bytecode_fingerprint,
    is_user_code,
    names_in,
    names_set,
)

_CONSTANTS = (type(None), bool, int, float, complex, str, type(...), range, re.Pattern)

_CONTAINERS = (list, tuple, set, frozenset, dict)
_CODE = (FunctionType, type, MethodType, functools.partial)

# A longer table is not searched for functions, since each task asks for their code.
_MOST_ITEMS = 10_000

# Parts of a class that decide nothing, follow from the rest, or come with use.
_IGNORED = frozenset(
    {
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__qualname__",
        "__signature__",
        "__slotnames__",
        "__slots__",
        "__static_attributes__",
        "__type_params__",
        "__weakref__",
        "_abc_impl",
        "_value2member_map_",
    }
)

# Stands among the names of functions for the Python that has compiled them.
_PYTHON = ""


def stable_token(value: Any, functions: bool = True) -> str:
    """Token that is the same in every process, and changes with what a value does.

    Parameters
    ----------
    value
        A function, or anything that holds functions and constants.
    functions
        Whether the user's own functions and objects count. Where they don't, an object without a
        stable token counts by its type alone.

    Raises
    ------
    FunctionError
        If it holds an object that has no stable token.
    """
    return _digest(repr(_Reading(value, "stable" if functions else "no functions").parts))


def token_of(function: Callable[..., Any]) -> str:
    """Token of a function for this process; objects without a stable token count by identity."""
    return _digest(repr(_Reading(function, "process").parts))


def code_digests(function: Callable[..., Any]) -> dict[str, str]:
    """Digests of the user's functions that other processes import where ``function`` is used.

    A worker that imported a module before it was edited has other ones.
    """
    return _Reading(function, "code").imported


def refuse_other_code(argument: str, function: Callable[..., Any], code: Mapping[str, str]) -> None:
    """Refuse to run a function whose code is not that for which the query was made.

    Parameters
    ----------
    argument
        What errors call the function.
    function
        As this process has it.
    code
        Its `code_digests` where the query was made.

    Raises
    ------
    FunctionError
    """
    here = code_digests(function)
    others = sorted(name for name, digest in code.items() if here.get(name, digest) != digest)
    # Other releases of Python compile to other code.
    if others and here[_PYTHON] == code[_PYTHON]:
        raise FunctionError(
            f"{argument} uses {', '.join(others)}, and this process has other code by that name "
            "than the query was made with. A worker imports a module once: after an edit, let the "
            "workers import it anew by client.restart(), or send it by client.upload_file(). Where "
            "the module was reloaded after the query was made, make the query again"
        )


class _Reading:
    """Describes a value, and each function and class of the user's that it leads to.

    Parameters
    ----------
    mode
        ``"stable"``: objects as pickle has them, an error for others. ``"process"``: others by
        identity. ``"no functions"``: nothing of the user's. ``"code"``: functions and classes
        alone, since each task asks, and weights take their time.

    Attributes
    ----------
    parts : list of (str, str)
        Name and digest of each function and class.
    imported : dict of str to str
        Digests of the code alone, for functions that other processes import.
    """

    def __init__(self, value: Any, mode: str) -> None:
        self._mode = mode
        self.imported = {_PYTHON: f"{sys.version_info[:2]} {sys.flags.optimize}"}
        # Keeps what it has seen, so that no other object gets the same id.
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []
        self._described: dict[int, tuple[Any, str]] = {}
        self.parts = [("", self._describe(value))]
        while self._waiting:
            each = self._waiting.pop()
            told = self._class(each) if isinstance(each, type) else self._function(each)
            self.parts.append((_name(each), _digest(told)))
        self.parts.sort()

    def _function(self, function: FunctionType) -> str:
        code = bytecode_fingerprint(function.__code__)
        if _is_imported(function):
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            # What can change while the function is used is no part of its code.
            fixed = [repr(value) for value in defaults if isinstance(value, _CONSTANTS)]
            self.imported[_name(function)] = _digest(f"{code} {fixed}")
        # What a function notes in itself comes with use.
        ignored = names_set(function.__code__) | {"__wrapped__"}
        own = {name: value for name, value in vars(function).items() if name not in ignored}
        parts = (function.__defaults__, function.__kwdefaults__, own)
        closure = _closure(function)
        names = sorted({*names_in(function.__code__), *closure})
        used = self._used({**function.__globals__, **closure}, names, set(), closure)
        return "\n".join([code, *map(self._describe, parts), *used])

    def _used(
        self,
        namespace: Mapping[str, Any],
        names: list[str],
        modules: set[int],
        closure: Container[str] = (),
    ) -> Iterator[str]:
        """Describe what names stand for, those of the user's modules included."""
        for name in names:
            if name in namespace:
                value = namespace[name]
                if self._mode == "process" and name not in closure and _is_of_a_package(value):
                    # What a package keeps in a client or a model changes with use.
                    yield f"{name} = {' '.join(self._code_in(value))}"
                else:
                    yield f"{name} = {self._describe(value)}"
                if (
                    isinstance(value, ModuleType)
                    and is_user_code(value)
                    and id(value) not in modules
                ):
                    modules.add(id(value))
                    yield from self._used(vars(value), names, modules)

    def _class(self, class_: type) -> str:
        members = (
            f"{name} = {self._describe(value)}"
            for name, value in sorted(vars(class_).items())
            # Of pydantic, all else follows from the fields, and has addresses in it.
            if name not in _IGNORED
            and (name == "__pydantic_fields__" or not name.startswith("__pydantic_"))
        )
        return "\n".join([self._describe(type(class_)), self._describe(class_.__bases__), *members])

    def _describe(self, value: Any) -> str:
        """Describe a value in words that are the same in another process."""
        if self._mode == "no functions":
            kind = value if isinstance(value, (FunctionType, type)) else type(value)
            if is_user_code(kind):
                return "<the user's>"
        if isinstance(value, (FunctionType, type)) and is_user_code(value):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._waiting.append(value)
            return f"<{_name(value)}>"
        if isinstance(value, type):
            return f"<{_name(value)}>"
        if isinstance(value, ModuleType):
            return f"<module {value.__name__}>"
        if type(value) in _CONSTANTS or isinstance(value, np.generic):
            return f"{type(value).__name__} {value!r}"
        if type(value) is bytes:
            return f"bytes {blake2b(value).hexdigest()}"
        if id(value) not in self._described:
            self._described[id(value)] = value, "<itself>"
            # Short, and said once: objects may refer to each other in more ways than can be told.
            self._described[id(value)] = value, _digest(self._parts_of(value))
        return self._described[id(value)][1]

    def _parts_of(self, value: Any) -> str:
        kind = type(value).__name__
        if isinstance(value, FunctionType):
            # A package's function may be a user's in disguise, as after a decorator.
            return f"<{_name(value)}> {self._describe(_closure(value))}"
        if isinstance(value, MappingProxyType):
            value = dict(value)
        if type(value) is dict:
            items = (f"{self._describe(k)}: {self._describe(v)}" for k, v in value.items())
            return f"{kind} {{{', '.join(items)}}}"
        if type(value) in _CONTAINERS:
            if self._mode == "code" and len(value) > _MOST_ITEMS:
                return kind
            described = [self._describe(each) for each in value]
            if isinstance(value, (set, frozenset)):
                described.sort()
            return f"{kind} [{', '.join(described)}]"
        return f"<{_name(type(value))}> {' '.join(self._object(value))}"

    def _object(self, value: Any) -> Iterator[str]:
        """Describe an object: what it wraps, and what pickle would send of it."""
        if self._mode == "code":
            yield from self._code_in(value)
            return
        kind = type(value)
        yield self._describe(kind)
        wrapped = _wrapped(value)
        yield from map(self._describe, wrapped)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith(_PACKAGE):
            # What follows from the fields that are given is no part of it.
            given = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if f.init}
            yield self._describe(given)
        elif not wrapped:
            yield from self._pickled(value)

    def _code_in(self, value: Any) -> Iterator[str]:
        """Describe an object by its class, and by the functions that it holds."""
        yield self._describe(type(value))
        yield from map(self._describe, _wrapped(value))
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            users = is_user_code(type(value))
            for each in held.values():
                if isinstance(each, _CODE) or (users and _may_hold_code(each)):
                    yield self._describe(each)

    def _pickled(self, value: Any) -> Iterator[str]:
        if type(value) is object:  # one is as good as another to pickle, and not to who compares
            yield self._unknown(value, None)
            return
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:  # whatever keeps it from being sent
            yield self._unknown(value, error)
            return
        # How pickle makes the object again: its name; or a function, its arguments, a state, items.
        for part in [reduced] if isinstance(reduced, str) else reduced:
            yield self._describe(list(part) if isinstance(part, Iterator) else part)

    def _unknown(self, value: Any, error: Exception | None) -> str:
        if self._mode == "no functions":
            return ""
        if self._mode == "process":
            self._seen[id(value)] = value
            return str(id(value))
        raise FunctionError(
            f"an object of {_name(type(value))} has no token that is the same in every process"
        ) from error


_PACKAGE = f"{__name__.partition('.')[0]}."


def _wrapped(value: Any) -> list[Any]:
    """Functions inside an object of Python's, which pickle does not send or knows by its name."""
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return [getattr(value, "__self__", None), value.__func__]
    if isinstance(value, (functools.partial, functools.partialmethod, curry)):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Compose):
        return [value.first, value.funcs]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, MemberDescriptorType):  # of a slot
        return [value.__name__]
    if isinstance(value, (set, frozenset)):  # of a class of its own: pickle has no order for it
        return [set(value), vars(value)]
    inner = inspect.getattr_static(value, "__wrapped__", None)
    if not isinstance(inner, (FunctionType, type)):
        return []
    return [inner, {name: each for name, each in vars(value).items() if each is not inner}]


def _is_of_a_package(value: Any) -> bool:
    """True for objects of installed packages, unless Dask knows what is in them."""
    kind = type(value)
    return not (
        isinstance(value, (FunctionType, type, ModuleType))
        or kind.__module__.partition(".")[0] in sys.stdlib_module_names
        or is_user_code(kind)
        or normalize_token.dispatch(kind) is not normalize_token.dispatch(object)
        or _wrapped(value)
    )


def _may_hold_code(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or is_user_code(type(value))


def _closure(function: FunctionType) -> dict[str, Any]:
    """The variables of the functions around a function, by name."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            contents[name] = cell.cell_contents
    return contents


def _is_imported(function: FunctionType) -> bool:
    """True if pickle sends the function by its name."""
    found: Any = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return getattr(found, "__func__", found) is function


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
