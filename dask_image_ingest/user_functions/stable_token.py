"""Tokens of a user's functions, by their code and everything of the user's that they use.

Dask's token of an importable function is its name, as in pickle. But a module may be edited and
reloaded, as is usual in a notebook, and then the token must change. So the token here covers the
function's bytecode, defaults, closure, and the globals that it uses: the user's functions and
classes, recursively, and values. Objects are covered by what pickle would send to a worker,
installed packages only by the names that are used.
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

# Longest container that is searched for functions in mode "code", which runs in each task.
_MAX_ITEMS = 10_000

# Attributes of a class that don't affect behaviour, follow from others, or appear with use.
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

# Key in `code_digests` for the version of Python, among the names of functions.
_PYTHON = ""


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
    return _digest(repr(_Description(value, "stable" if functions else "no functions").parts))


def token_of(function: Callable[..., Any]) -> str:
    """Token of a function within this process: objects without a stable token count by id."""
    return _digest(repr(_Description(function, "process").parts))


def code_digests(function: Callable[..., Any]) -> dict[str, str]:
    """Digests by name of the user's importable functions that ``function`` uses, and itself.

    They differ in a worker that imported the module before it was edited.
    """
    return _Description(function, "code").imported


def refuse_other_code(argument: str, function: Callable[..., Any], code: Mapping[str, str]) -> None:
    """Refuse to run a function whose code differs from that in the process of the query.

    Parameters
    ----------
    argument
        Name of the function in the error.
    function
        The function in this process.
    code
        Its `code_digests` in the process that built the query.

    Raises
    ------
    FunctionError
    """
    here = code_digests(function)
    different = sorted(name for name, digest in code.items() if here.get(name, digest) != digest)
    # Python versions differ in bytecode: no comparison is possible.
    if different and here[_PYTHON] == code[_PYTHON]:
        raise FunctionError(
            f"{argument} uses {', '.join(different)}, and this process has other code by that name "
            "than the query was made with. A worker imports a module once: after an edit, let the "
            "workers import it anew by client.restart(), or send it by client.upload_file(). Where "
            "the module was reloaded after the query was made, make the query again"
        )


class _Description:
    """Description of a value and, recursively, of the user's functions and classes in it.

    Parameters
    ----------
    mode
        ``"stable"``: objects by their pickle; an error if there is none. ``"process"``: those by
        their id. ``"no functions"``: nothing of the user's. ``"code"``: functions and classes only,
        as it runs in each task, and a model's weights would take long.

    Attributes
    ----------
    parts : list of (str, str)
        Name and digest of each function and class, sorted; the value itself has the name "".
    imported : dict of str to str
        Digests of bytecode and constant defaults, for functions that pickle sends by name.
    """

    def __init__(self, value: Any, mode: str) -> None:
        self._mode = mode
        self.imported = {_PYTHON: f"{sys.version_info[:2]} {sys.flags.optimize}"}
        # By id, with a reference, so that no other object gets the same id.
        self._seen: dict[int, Any] = {}
        # Functions and classes that are yet to be described.
        self._queue: list[Any] = []
        # Objects with their descriptions, by id.
        self._described: dict[int, tuple[Any, str]] = {}
        self.parts = [("", self._describe(value))]
        while self._queue:
            code = self._queue.pop()
            text = self._class(code) if isinstance(code, type) else self._function(code)
            self.parts.append((_name(code), _digest(text)))
        self.parts.sort()

    def _function(self, function: FunctionType) -> str:
        code = bytecode_fingerprint(function.__code__)
        if _is_imported(function):
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            # Only immutable defaults: others may change while the function is used.
            constants = [repr(value) for value in defaults if isinstance(value, _CONSTANTS)]
            self.imported[_name(function)] = _digest(f"{code} {constants}")
        # Ignore attributes that the function sets on itself when it runs, such as a counter.
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
        """Describe the values of names, and the names' attributes in the user's modules."""
        for name in names:
            if name in namespace:
                value = namespace[name]
                if self._mode == "process" and name not in closure and _is_of_a_package(value):
                    # The state of a package's client or model may change with use.
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
            # Pydantic's other attributes follow from the fields, and contain addresses.
            if name not in _IGNORED
            and (name == "__pydantic_fields__" or not name.startswith("__pydantic_"))
        )
        return "\n".join([self._describe(type(class_)), self._describe(class_.__bases__), *members])

    def _describe(self, value: Any) -> str:
        """Describe a value by a text that is the same in every process."""
        if self._mode == "no functions":
            kind = value if isinstance(value, (FunctionType, type)) else type(value)
            if is_user_code(kind):
                return "<the user's>"
        if isinstance(value, (FunctionType, type)) and is_user_code(value):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._queue.append(value)
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
            # A placeholder, in case the value contains itself.
            self._described[id(value)] = value, "<itself>"
            # Digested and cached: written out, shared objects could grow exponentially.
            self._described[id(value)] = value, _digest(self._parts_of(value))
        return self._described[id(value)][1]

    def _parts_of(self, value: Any) -> str:
        kind = type(value).__name__
        if isinstance(value, FunctionType):
            # A package's decorator returns a package's function with the user's in its closure.
            return f"<{_name(value)}> {self._describe(_closure(value))}"
        if isinstance(value, MappingProxyType):
            value = dict(value)
        if type(value) is dict:
            items = (f"{self._describe(k)}: {self._describe(v)}" for k, v in value.items())
            return f"{kind} {{{', '.join(items)}}}"
        if type(value) in _CONTAINERS:
            if self._mode == "code" and len(value) > _MAX_ITEMS:
                return kind
            described = [self._describe(item) for item in value]
            if isinstance(value, (set, frozenset)):
                described.sort()
            return f"{kind} [{', '.join(described)}]"
        return f"<{_name(type(value))}> {' '.join(self._object(value))}"

    def _object(self, value: Any) -> Iterator[str]:
        """Describe an object: what it wraps, or else what pickle would send."""
        if self._mode == "code":
            yield from self._code_in(value)
            return
        kind = type(value)
        yield self._describe(kind)
        wrapped = _wrapped(value)
        yield from map(self._describe, wrapped)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith(_PACKAGE):
            # Only fields of __init__; others follow from these.
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if f.init}
            yield self._describe(fields)
        elif not wrapped:
            yield from self._pickled(value)

    def _code_in(self, value: Any) -> Iterator[str]:
        """Describe an object by its class, and by the functions in its attributes."""
        yield self._describe(type(value))
        yield from map(self._describe, _wrapped(value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            is_users = is_user_code(type(value))
            for attribute in attributes.values():
                if isinstance(attribute, _CODE) or (is_users and _may_hold_code(attribute)):
                    yield self._describe(attribute)

    def _pickled(self, value: Any) -> Iterator[str]:
        if type(value) is object:  # all have the same pickle, but a sentinel is compared by id
            yield self._unknown(value, None)
            return
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:  # it can't be pickled, for whatever reason
            yield self._unknown(value, error)
            return
        # A name; or a function, its arguments, state and items.
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
    """Contents of wrappers in the standard library, which pickle refuses or sends by name."""
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
    if isinstance(value, (set, frozenset)):  # a subclass, whose pickle has no fixed order
        return [set(value), vars(value)]
    inner = inspect.getattr_static(value, "__wrapped__", None)
    if not isinstance(inner, (FunctionType, type)):
        return []
    return [inner, {name: item for name, item in vars(value).items() if item is not inner}]


def _is_of_a_package(value: Any) -> bool:
    """True for objects of installed packages, unless Dask has a normalize_token for them."""
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
    """Variables in the closure of a function, by name."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            contents[name] = cell.cell_contents
    return contents


def _is_imported(function: FunctionType) -> bool:
    """True if pickle sends the function by name."""
    named: Any = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        named = getattr(named, name, None)
    return getattr(named, "__func__", named) is function


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
