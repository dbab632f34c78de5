"""Distinguish the user's code from installed packages, and fingerprint its bytecode."""

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

# Each task compares the code of its functions. Equal code objects are interchangeable.
_cached = functools.lru_cache(2000)

# Flag of functions that have a docstring, from Python 3.13 on.
_HAS_DOCSTRING = 0x4000000

# Attributes that the compiler sets in the body of a class.
_NOTES = {"__doc__", "__firstlineno__", "__static_attributes__"}


def is_user_code(value: Any) -> bool:
    """True if a function, class or module is the user's, not an installed package's."""
    if isinstance(value, FunctionType):
        return not _is_installed(value.__code__.co_filename)
    name = str(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    module = sys.modules.get(name)
    if module is None:
        return name not in sys.builtin_module_names
    file = getattr(module, "__file__", None)
    paths = [file] if file else list(getattr(module, "__path__", ()))
    if not paths:
        # A notebook's main module has no file, and neither have modules made by compiled code.
        return "__builtins__" in vars(module) and name not in sys.builtin_module_names
    return not any(_is_installed(str(path)) for path in paths)


def _is_installed(path: str) -> bool:
    # By folder names too, as packages of another environment may be on sys.path.
    return path.startswith(_installed_prefixes()) or any(
        f"/{name}/" in path for name in ("site-packages", "dist-packages")
    )


@functools.cache
def _installed_prefixes() -> tuple[str, ...]:
    """Path prefixes of the standard library, of packages, and of this one."""
    folders = [
        sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return ("<frozen", *{f"{folder}/" for folder in folders})


@_cached
def bytecode_fingerprint(code: CodeType) -> str:
    """Describe everything in a code object that affects behaviour: no line numbers, no docstring.

    Constants are listed by the instructions that use them, so an unused one, such as the docstring,
    has no effect.
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
        return [_constant(item) for item in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(item) for item in value)
    return repr(value)


@_cached
def names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that code uses, without globals that it sets."""
    names = frozenset(code.co_names).union(*map(names_in, _inner(code)))
    return names - _stored(code, "STORE_GLOBAL")


@_cached
def names_set(code: CodeType) -> frozenset[str]:
    """Names of attributes that code sets."""
    return _stored(code, "STORE_ATTR").union(*map(names_set, _inner(code)))


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Code objects of functions that are defined inside."""
    return (value for value in code.co_consts if isinstance(value, CodeType))


def _stored(code: CodeType, opname: str) -> frozenset[str]:
    return frozenset(s.argval for s in dis.get_instructions(code) if s.opname == opname)
