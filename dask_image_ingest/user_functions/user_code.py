"""The user's own code: told from that of installed packages, and a fingerprint of its bytecode."""

from __future__ import annotations

import dis
import functools
import site
import sys
import sysconfig
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

# Each task asks anew whether it has the code of its query. Equal code objects do the same.
_cached = functools.lru_cache(2000)

# Flag of functions that have a docstring, from Python 3.13 on.
_HAS_DOCSTRING = 0x4000000

# What the body of a class notes of itself.
_NOTES = {"__doc__", "__firstlineno__", "__static_attributes__"}


def is_user_code(value: Any) -> bool:
    """True if a function, class or module is the user's own, not an installed package's."""
    if isinstance(value, FunctionType):
        return not _is_installed(value.__code__.co_filename)
    name = str(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    module = sys.modules.get(name)
    if module is None:
        return name not in sys.builtin_module_names
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", ()))
    if not places:
        # The main module of a notebook has no file, nor have modules that compiled code makes up.
        return "__builtins__" in vars(module) and name not in sys.builtin_module_names
    return not any(_is_installed(str(place)) for place in places)


def _is_installed(path: str) -> bool:
    # By their names, too: those of another environment may be on the path.
    return path.startswith(_installed()) or any(
        f"/{name}/" in path for name in ("site-packages", "dist-packages")
    )


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of Python's library, of packages, and of this one."""
    folders = [
        sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return ("<frozen", *{f"{folder}/" for folder in folders})


@_cached
def bytecode_fingerprint(code: CodeType) -> str:
    """Describe all of a code object that decides what it does: no line numbers, no docstring.

    Constants stand where they are used: that of the docstring is not, unless the function has an
    equal one that is.
    """
    flags = code.co_flags & ~_HAS_DOCSTRING
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return repr((list(_steps(code)), flags, counts, names, code.co_exceptiontable))


def _steps(code: CodeType) -> Iterator[tuple[int, Any]]:
    steps = list(dis.get_instructions(code))
    for step, following in zip_longest(steps, steps[1:]):
        if step.opcode not in dis.hasconst:
            yield step.opcode, step.arg
        elif not (following and following.opname == "STORE_NAME" and following.argval in _NOTES):
            yield step.opcode, _constant(step.argval)


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return bytecode_fingerprint(value)
    if isinstance(value, tuple):
        return [_constant(each) for each in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(each) for each in value)
    return repr(value)


@_cached
def names_in(code: CodeType) -> frozenset[str]:
    """The names by which code refers to globals and attributes, but for globals that it sets."""
    names = frozenset(code.co_names).union(*map(names_in, _inner(code)))
    return names - _stored(code, "STORE_GLOBAL")


@_cached
def names_set(code: CodeType) -> frozenset[str]:
    """The names of attributes that code sets."""
    return _stored(code, "STORE_ATTR").union(*map(names_set, _inner(code)))


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (value for value in code.co_consts if isinstance(value, CodeType))


def _stored(code: CodeType, opname: str) -> frozenset[str]:
    return frozenset(s.argval for s in dis.get_instructions(code) if s.opname == opname)
