"""What a user's function does: its token, and whether another process has the same.

Dask knows a function that can be imported by its name alone, as pickle does. A module may be edited
and reloaded under the same names, as usual in a notebook, and its functions have to become others
by that. So the code of a function counts here, with its defaults and what it refers to: other
functions and classes of the user's, and constants. Installed packages count by the names in them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from dask.base import tokenize

from dask_image_ingest.errors import FunctionError
from dask_image_ingest.functions.digest import (
    closure,
    described,
    digest,
    name_of,
    names_in,
    names_set,
)
from dask_image_ingest.functions.objects import (
    attributes,
    contents,
    functions_in,
    has_meaning,
    holds_data,
)
from dask_image_ingest.functions.pickled import is_known_to_dask, to_tokenize
from dask_image_ingest.functions.whose import is_users

_CONSTANTS = (type(None), bool, int, float, complex, str, type(...), range, re.Pattern)

_CONTAINERS = (list, tuple, set, frozenset, dict)

# Bytes that are longer stand as a digest: the weights of a model need not be spelt out.
_LONG = 1000


def token_of(function: Callable[..., Any]) -> str:
    """A token that changes when what the function does changes."""
    return tokenize(to_tokenize(function), Reading(function).parts)


def code_of(function: Callable[..., Any]) -> dict[str, str]:
    """A digest of each function of the user's that is imported by name where ``function`` is used.

    A worker that imported a module before it was edited has other ones.
    """
    return Reading(function).imported


def refuse_other_code(argument: str, function: Callable[..., Any], code: Mapping[str, str]) -> None:
    """Refuse to run a function whose code is not that for which the query was made.

    Parameters
    ----------
    argument
        What errors call the function.
    function
        As this process has it.
    code
        Its `code_of` where the query was made.

    Raises
    ------
    FunctionError
    """
    here = code_of(function)
    others = sorted(name for name, digest in code.items() if here.get(name, digest) != digest)
    # Other releases of Python compile to other code.
    if others and here[_PYTHON] == code[_PYTHON]:
        raise FunctionError(
            f"{argument} uses {', '.join(others)}, and this process has other code by that name "
            "than the query was made with. A worker imports a module once: after an edit, let the "
            "workers import it anew by client.restart(), or send it by client.upload_file(). Where "
            "the module was reloaded after the query was made, make the query again"
        )


# Stands among the names of functions for the Python that has compiled them.
_PYTHON = ""


class Reading:
    """Reads a function, and what it refers to.

    Attributes
    ----------
    parts : list of (str, str)
        Name and digest of each function and class.
    imported : dict of str to str
        Digests of the code alone, for functions that other processes import.
    """

    # Of a module with a table of constants, more than this is not looked at.
    _most_items: float = 10_000

    def __init__(self, function: Any) -> None:
        self.imported = {_PYTHON: f"{sys.version_info[:2]} {sys.flags.optimize}"}
        parts: list[tuple[str, str]] = []
        # Keeps what it has seen, so that no other object gets the same id.
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []
        self._inside: set[int] = set()
        parts.append(("", self._describe(function)))
        while self._waiting:
            each = self._waiting.pop()
            described = self._class(each) if isinstance(each, type) else self._function(each)
            parts.append((name_of(each), digest(described)))
        self.parts = sorted(parts)

    def _function(self, function: FunctionType) -> str:
        code = described(function.__code__)
        if _is_imported(function):
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            # What can change while the function is used is no part of its code.
            fixed = [repr(value) for value in defaults if isinstance(value, _CONSTANTS)]
            self.imported[name_of(function)] = digest(f"{code} {fixed}")
        around = closure(function)
        namespace = {**function.__globals__, **around}
        names = sorted({*names_in(function.__code__), *around})
        # What a function notes in itself comes with use.
        set_here = names_set(function.__code__) | {"__wrapped__"}
        own = {name: value for name, value in vars(function).items() if name not in set_here}
        return "\n".join(
            (
                code,
                self._describe(function.__defaults__),
                self._describe(function.__kwdefaults__),
                self._describe(own),
                *self._used(namespace, names, set()),
            )
        )

    def _used(
        self, namespace: Mapping[str, Any], names: list[str], modules: set[int]
    ) -> Iterator[str]:
        """What the names stand for, those of modules of the user's included."""
        for name in names:
            if name in namespace:
                value = namespace[name]
                yield f"{name} = {self._describe(value)}"
                if isinstance(value, ModuleType) and is_users(value) and id(value) not in modules:
                    modules.add(id(value))
                    yield from self._used(vars(value), names, modules)

    def _class(self, class_: type) -> str:
        parts = [self._describe(type(class_)), self._describe(class_.__bases__)]
        parts += (
            f"{name} = {self._describe(value)}"
            for name, value in sorted(vars(class_).items())
            if has_meaning(name)
        )
        return "\n".join(parts)

    def _describe(self, value: Any) -> str:
        """A value in words that are the same in another process."""
        if isinstance(value, (FunctionType, type)) and is_users(value):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._waiting.append(value)
            return f"<{name_of(value)}>"
        if isinstance(value, type):
            return f"<{name_of(value)}>"
        if isinstance(value, ModuleType):
            return f"<module {value.__name__}>"
        if type(value) in _CONSTANTS or isinstance(value, np.generic):
            return f"{type(value).__name__} {value!r}"
        if type(value) is bytes:
            long = len(value) > _LONG
            return f"bytes {blake2b(value).hexdigest() if long else repr(value)}"
        if id(value) in self._inside:
            return "<itself>"
        self._inside.add(id(value))
        try:
            return self._describe_parts(value)
        finally:
            self._inside.discard(id(value))

    def _describe_parts(self, value: Any) -> str:
        kind = type(value).__name__
        if isinstance(value, FunctionType):
            # A package's function may be a user's in disguise, as after a decorator.
            return f"<{name_of(value)}> {self._describe(closure(value))}"
        if type(value) not in _CONTAINERS:
            return self._describe_object(value)
        if len(value) > self._most_items:
            return f"{kind} of {len(value)}"
        if isinstance(value, dict):
            items = (f"{self._describe(k)}: {self._describe(v)}" for k, v in value.items())
            return f"{kind} {{{', '.join(items)}}}"
        described = map(self._describe, value)
        if isinstance(value, (list, tuple)):
            return f"{kind} [{', '.join(described)}]"
        return f"{kind} {{{', '.join(sorted(described))}}}"

    def _describe_object(self, value: Any) -> str:
        kind, inner = type(value), contents(value)
        known = not inner and is_known_to_dask(kind)
        told = [self._describe(kind), *map(self._describe, inner)]
        if known:
            told.append(self._tokenize(value))
        if holds_data(kind):
            # What a package's frame keeps in its attributes is in the token.
            told.append(self._describe(attributes(value, of_users=known)))
        elif not (known or inner):
            told += map(self._describe, functions_in(value))
        return " ".join(told)

    def _tokenize(self, value: Any) -> str:
        return tokenize(value)


def _is_imported(function: FunctionType) -> bool:
    """Whether pickle knows the function by its name alone."""
    found: Any = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return getattr(found, "__func__", found) is function
