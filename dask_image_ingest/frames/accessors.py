"""Accessors on the dataframes of every backend that is loaded, or will be."""

from __future__ import annotations

from collections.abc import Callable

from dask_image_ingest.frames.backend import BackendName

# Accessors by name, and how each loaded backend takes one: no backend has to know of any.
_accessors: dict[str, type] = {}
_attaching: dict[BackendName, Callable[[str, type], None]] = {}


def dataframe_accessor(name: str) -> Callable[[type], type]:
    """Class decorator: an accessor on the dataframes of every backend, once it is loaded.

    pandas' own dataframes, which are always there, are for whoever defines the accessor.
    """

    def register(accessor: type) -> type:
        _accessors[name] = accessor
        for attach in _attaching.values():
            attach(name, accessor)
        return accessor

    return register


def attach_accessors(backend: BackendName, attach: Callable[[str, type], None]) -> None:
    """Say how a backend that has just been loaded gives its dataframes an accessor."""
    _attaching[backend] = attach
    for name, accessor in _accessors.items():
        attach(name, accessor)
