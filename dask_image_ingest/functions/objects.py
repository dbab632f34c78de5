"""What objects hold, in values that are simpler than they: attributes, items, wrapped functions.

Objects are read by what Python itself keeps of them, and never by methods of the user's, which may
answer whatever they are asked.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import (
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

from tlz.functoolz import Compose, curry

from dask_image_ingest.functions.whose import is_users

__all__ = ["attributes", "contents", "functions_in", "has_meaning", "holds_data", "wrapped"]

# What Python, pickle and modules of its library note in a class. It decides nothing, follows from
# the rest, or comes with use.
_NOTES = frozenset(
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

# Modules whose objects are data in attributes: of Python's library, and the fields of classes that
# attrs and pydantic make.
_DATA = frozenset({"argparse", "collections", "configparser", "fractions", "types", "uuid"})
_DATA |= {"attr._make", "pydantic.fields"}


def _named(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [getattr(value, name) for name in names]


# What there is in an object of such a type, or of one that is derived from it.
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    # Values.
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: bytes,
    array.array: lambda value: [value.typecode, array.array.tobytes(value)],
    # Containers.
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    OrderedDict: lambda value: list(OrderedDict.__iter__(value)),
    defaultdict: _named("default_factory"),
    deque: lambda value: [value.maxlen, *deque.__iter__(value)],
    MappingProxyType: dict,
    # What stands for a function or for a type.
    functools.partial: _named("func", "args", "keywords"),
    functools.partialmethod: _named("func", "args", "keywords"),
    functools.cached_property: _named("func"),
    functools._lru_cache_wrapper: lambda value: [value.__wrapped__, _unwrapped(value)],
    MethodType: _named("__self__", "__func__"),
    MethodDescriptorType: _named("__objclass__", "__name__"),
    WrapperDescriptorType: _named("__objclass__", "__name__"),
    staticmethod: _named("__func__"),
    classmethod: _named("__func__"),
    property: _named("fget", "fset", "fdel"),
    curry: _named("func", "args", "keywords"),
    Compose: _named("first", "funcs"),
    GenericAlias: _named("__origin__", "__args__"),
    UnionType: _named("__args__"),
    dataclasses.Field: _named("default", "default_factory", "init", "kw_only", "metadata"),
}


def contents(value: Any) -> list[Any]:
    """What an object is made of beside its attributes; nothing for objects of other types."""
    kind = type(value)
    return [get(value) for base, get in _CONTENTS.items() if issubclass(kind, base)]


def has_meaning(name: str) -> bool:
    """Whether an attribute of a class may decide what it does."""
    if name.startswith("__pydantic_"):
        # The others follow, and have addresses in them.
        return name == "__pydantic_fields__"
    return name not in _NOTES


def holds_data(kind: type) -> bool:
    """Whether the attributes of objects are data, and not what a package keeps for its own use."""
    return kind.__module__ in _DATA or is_users(kind)


def attributes(value: Any, of_users: bool = False) -> dict[str, Any]:
    """The attributes of an object by name, those in slots too.

    Parameters
    ----------
    value
        Any object.
    of_users
        Whether to leave out those that may be of a package, from which the object's class is
        derived.
    """
    found: dict[str, Any] = {}
    kinds = type(value).__mro__
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not (of_users and any(map(_is_packages_with_dict, kinds))):
        found.update(own)
    for kind in filter(holds_data, kinds):
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # nothing is in it yet
                    found[f"{kind.__qualname__}.{name}"] = member.__get__(value)
    return found


def _is_packages_with_dict(kind: type) -> bool:
    return "__dict__" in vars(kind) and not is_users(kind)


def functions_in(value: Any) -> Iterator[Any]:
    """What a package's object, as its decorators make them, holds of a user's functions."""
    inner = wrapped(value)
    if inner is not None:
        yield inner
    for each in attributes(value).values():
        if isinstance(each, (FunctionType, type)) and is_users(each):
            yield each


def wrapped(value: Any) -> Any:
    """The function that an object says to wrap; None if it says nothing."""
    inner = inspect.getattr_static(value, "__wrapped__", None)
    return inner if isinstance(inner, (FunctionType, type)) else None


def _unwrapped(value: Any) -> dict[str, Any]:
    return {name: each for name, each in vars(value).items() if name != "__wrapped__"}
