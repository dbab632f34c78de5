"""Accessors on what every backend has, for those that are loaded and those that will be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from dask_image_ingest.frames.backend import BackendName

Kind = Literal["dataframe", "series"]

# How a backend takes an accessor of a kind and a name.
Attach: TypeAlias = Callable[[Kind, str, type], None]

# All accessors, and how each loaded backend takes one: no backend has to know of any.
_accessors: dict[tuple[Kind, str], type] = {}
_attaching: dict[BackendName, Attach] = {}


def register_accessor(kind: Kind, name: str) -> Callable[[type], type]:
    """Class decorator: an accessor on what every backend has of this kind, once it is loaded.

    pandas' own, which are always there, are for whoever defines the accessor.
    """

    def register(accessor: type) -> type:
        _accessors[kind, name] = accessor
        for attach in _attaching.values():
            attach(kind, name, accessor)
        return accessor

    return register


def attach_accessors(backend: BackendName, attach: Attach) -> None:
    """Say how a backend that has just been loaded takes an accessor."""
    _attaching[backend] = attach
    for (kind, name), accessor in _accessors.items():
        attach(kind, name, accessor)
