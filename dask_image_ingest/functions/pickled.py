"""What dask is to tokenize for a function, with pickled bytes that follow from values alone.

Dask hashes the bytes of pickle. In these a string that was met before is a reference, if it is the
same object: an equal one is written anew. Which strings are one object is up to Python: from 3.13
on, the file's name in a function's code and in its module is so after an import, and not after a
reload. So the token of a function that is pickled by its value would change without an edit.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from types import MethodType
from typing import Any

import cloudpickle
from dask.base import normalize_token

__all__ = ["is_known_to_dask", "to_tokenize"]


def to_tokenize(value: Any) -> Any:
    """What stands for a value in dask's token: it is taken apart as dask does."""
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return [to_tokenize(part) for part in parts], list(value.keywords)
    if isinstance(value, MethodType):
        return to_tokenize(value.__self__), value.__name__
    return _Pickled(value) if _is_pickled(value) else value


def _is_pickled(value: Any) -> bool:
    """Whether dask pickles a value, and has nothing to do for it before."""
    if isinstance(value, type) or type(value) is object or dataclasses.is_dataclass(value):
        return False
    return not (is_known_to_dask(type(value)) or hasattr(value, "__dask_tokenize__"))


def is_known_to_dask(kind: type) -> bool:
    """Whether there is a token of what is in objects of this class."""
    return normalize_token.dispatch(kind) is not normalize_token.dispatch(object)


class _Pickled:
    """Is pickled as the bytes of a value, and dask deals with what can't be or what varies."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(self._value)
        return bytes, (file.getvalue(),)


class _Pickler(cloudpickle.Pickler):
    """Writes each string out, wherever it was met before. Its bytes are not for reading."""

    def persistent_id(self, obj: Any) -> bytes | None:
        # Asked for each object before references are looked up. The bytes are a new object.
        return obj.encode("utf-8", "surrogatepass") if type(obj) is str else None
