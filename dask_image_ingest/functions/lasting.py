"""A token that is the same in every process and on every day, for what is kept on a disk.

`token_of` falls back on pickle, whose bytes for a class of a notebook have a random number in them,
and passes by what it cannot look into. Here everything is told in words, down to constants; what
cannot be is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from dask.base import tokenize
from dask.tokenize import TokenizationError

from dask_image_ingest.errors import FunctionError
from dask_image_ingest.functions.code import Reading
from dask_image_ingest.functions.digest import digest, name_of
from dask_image_ingest.functions.objects import contents, wrapped
from dask_image_ingest.functions.pickled import is_known_to_dask
from dask_image_ingest.functions.whose import is_users


def lasting_token(value: Any, functions: bool = True) -> str:
    """A token of a value, which changes when what it does changes and never else.

    Parameters
    ----------
    value
        A function, or anything that holds functions and constants.
    functions
        Whether the user's own functions and objects count. Where they don't, what cannot be told
        counts by its type alone.

    Raises
    ------
    FunctionError
        If it holds something that cannot be told.
    """
    reading = _Lasting(value) if functions else _WithoutFunctions(value)
    return digest(repr(reading.parts))


class _Lasting(Reading):
    """Reads a value as `token_of` does, and leaves nothing out."""

    _most_items = math.inf

    def _describe_parts(self, value: Any) -> str:
        if dataclasses.is_dataclass(value) and _is_ours(type(value)):
            # What follows from the fields that are given is no part of it.
            given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return f"<{name_of(type(value))}> {self._describe(given)}"
        return super()._describe_parts(value)

    def _describe_object(self, value: Any) -> str:
        if contents(value) or is_known_to_dask(type(value)):
            return super()._describe_object(value)
        if type(value) is object:  # one is as good as another to pickle, and not to who compares
            raise _cannot_tell(value)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # whatever keeps it from being sent
            if is_users(type(value)) or wrapped(value) is None:
                raise _cannot_tell(value) from error
            return super()._describe_object(value)
        if isinstance(reduced, str):
            return f"{super()._describe_object(value)} {reduced}"
        # How pickle makes the object again: a function, its arguments, a state, items, pairs.
        told = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        return f"made by {', '.join(map(self._describe, told))}"

    def _tokenize(self, value: Any) -> str:
        try:
            return tokenize(value, ensure_deterministic=True)
        except TokenizationError as error:
            raise _cannot_tell(value) from error


class _WithoutFunctions(_Lasting):
    """Reads what is left of a value without the user's functions and objects."""

    def _describe(self, value: Any) -> str:
        kind = value if isinstance(value, (FunctionType, type)) else type(value)
        return "<the user's>" if is_users(kind) else super()._describe(value)

    def _describe_object(self, value: Any) -> str:
        try:
            return super()._describe_object(value)
        except FunctionError:
            return f"<{name_of(type(value))}>"


def _cannot_tell(value: Any) -> FunctionError:
    return FunctionError(
        f"an object of {name_of(type(value))} has no token that is the same in every process"
    )


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


__all__ = ["lasting_token"]
