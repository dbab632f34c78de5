"""Tell the user's own code from that of installed packages."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


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
