"""Functions in words and digests that are the same in every process."""

from __future__ import annotations

import dis
import hashlib
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any


def described(code: CodeType) -> str:
    """All of a code object that decides what it does; not where it stands."""
    constants = [_constant(value) for value in code.co_consts]
    return repr(
        (
            code.co_code,
            code.co_flags,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_exceptiontable,
            constants,
        )
    )


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return described(value)
    if isinstance(value, tuple):
        return [_constant(each) for each in value]
    if isinstance(value, frozenset):
        return sorted(repr(each) for each in value)
    return repr(value)


def names_in(code: CodeType) -> set[str]:
    """The names by which code refers to globals and attributes, but for globals that it sets."""
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    used = set(code.co_names).union(*map(names_in, inner))
    return used.difference(
        step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"
    )


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
