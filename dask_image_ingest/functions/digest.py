"""Functions in words and digests that are the same in every process."""

from __future__ import annotations

import dis
import functools
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from types import CodeType, FunctionType
from typing import Any

# Each task asks anew whether it has the code of its query. Equal code objects do the same.
_kept = functools.lru_cache(2000)

# Flag of functions that have a docstring, from Python 3.13 on.
_HAS_DOCSTRING = 0x4000000

# What the body of a class notes of itself.
_NOTES = {"__doc__", "__firstlineno__", "__static_attributes__"}


@_kept
def described(code: CodeType) -> str:
    """All of a code object that decides what it does; not where it stands, nor its docstring.

    Constants stand where they are used: that of the docstring is not, unless the function has an
    equal one that is.
    """
    return repr(
        (
            list(_steps(code)),
            code.co_flags & ~_HAS_DOCSTRING,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_exceptiontable,
        )
    )


def _steps(code: CodeType) -> Iterator[tuple[int, Any]]:
    steps = list(dis.get_instructions(code))
    for step, following in zip_longest(steps, steps[1:]):
        if step.opcode not in dis.hasconst:
            yield step.opcode, step.arg
        elif not (following and following.opname == "STORE_NAME" and following.argval in _NOTES):
            yield step.opcode, _constant(step.argval)


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return described(value)
    if isinstance(value, tuple):
        return [_constant(each) for each in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(each) for each in value)
    return repr(value)


@_kept
def names_in(code: CodeType) -> frozenset[str]:
    """The names by which code refers to globals and attributes, but for globals that it sets."""
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    used = frozenset(code.co_names).union(*map(names_in, inner))
    return used.difference(
        step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"
    )


@_kept
def names_set(code: CodeType) -> frozenset[str]:
    """The names of attributes that code sets."""
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    steps = dis.get_instructions(code)
    own = frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
    return own.union(*map(names_set, inner))


def name_of(value: Any) -> str:
    """Where a function or a class is defined, and as what."""
    return f"{value.__module__}.{value.__qualname__}"


def closure(function: FunctionType) -> dict[str, Any]:
    """What a function has of the functions around it, by name."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            contents[name] = cell.cell_contents
    return contents


def digest(text: str) -> str:
    """A short form of a description."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
