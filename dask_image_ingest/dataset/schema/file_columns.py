"""Shards with a parquet file beside them, and the columns that it gives to the collection."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from dask_image_ingest.arguments import check_choice
from dask_image_ingest.dataset.schema.coerce import is_supported
from dask_image_ingest.dataset.schema.columns import POINTER_COLUMNS, FileColumn
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, is_list, is_text
from dask_image_ingest.storage import Listings, Shard, find_beside, open_parquet

SidecarChoice: TypeAlias = Literal["parquet", "auto"] | None

# What the key of a sample is called: by to_webdataset, and by img2dataset.
_KEYS = ("__key__", "key")


def check_sidecar(sidecar: Any) -> None:
    """Refuse what is no choice of sidecars."""
    if sidecar is not None:
        check_choice("sidecar", sidecar, ("parquet", "auto"))


def with_sidecars(
    shards: Sequence[Shard],
    sidecar: SidecarChoice,
    storage_options: dict[str, Any] | None,
    listings: Listings | None = None,
) -> list[Shard]:
    """The shards, those of which have their sidecars that have some.

    Folders that are listed for that are among the ``listings`` afterwards.

    Raises
    ------
    ArgumentError
        If a shard has none, with ``"parquet"``.
    """
    if sidecar is None:
        return list(shards)
    found = find_beside(shards, ".parquet", storage_options, {} if listings is None else listings)
    without = [shard.url for shard, beside in zip(shards, found, strict=True) if beside is None]
    if without and sidecar == "parquet":
        raise ArgumentError(
            f"sidecar='parquet': {len(without)} of {len(shards)} shards have no parquet file "
            f"beside them, first {without[0]}. Pass sidecar='auto' to have nulls there"
        )
    if 0 < len(without) < len(shards):
        warn_user(
            f"{len(without)} of {len(shards)} shards have no parquet file beside them, first "
            f"{without[0]}: its columns are null there"
        )
    pairs = zip(shards, found, strict=True)
    return [replace(shard, sidecar=beside) for shard, beside in pairs]


def sidecar_columns(
    shards: Sequence[Shard],
    taken: Collection[str],
    storage_options: dict[str, Any] | None,
    backend: Backend,
) -> tuple[FileColumn, ...]:
    """The columns of the first sidecar, under names that are not ``taken``.

    Those of a type that the backend has no column for are left out, with a warning.

    Raises
    ------
    ArgumentError
        If it has no keys.
    ShardError
        If it can't be read.
    """
    first = next((shard.sidecar for shard in shards if shard.sidecar is not None), None)
    if first is None:
        return ()
    with open_parquet(first.url, storage_options) as file:
        schema = file.schema_arrow
    key = key_of(schema)
    if key is None:
        raise ArgumentError(
            f"{first.url} tells no keys, by which its rows would belong to samples: it needs a "
            f"column of text named {' or '.join(map(repr, _KEYS))}, each name once. It has "
            f"{', '.join(map(str, schema.names))}. Pass sidecar=None to read without it"
        )
    types = {f.name: column_type(f.type, backend) for f in schema if f.name != key}
    if key == "__key__":
        # What to_webdataset has written tells of images what their shards do.
        types = {name: type_ for name, type_ in types.items() if name not in POINTER_COLUMNS}
    left_out = [f"{name!r} ({schema.field(name).type})" for name, t in types.items() if t is None]
    if left_out:
        warn_user(f"{first.url} has columns of types that no column can have: {left_out}")
    names = _names([name for name, type_ in types.items() if type_ is not None], taken)
    return tuple(FileColumn(names[name], name, types[name]) for name in names)


def column_type(type_: pa.DataType, backend: Backend) -> pa.DataType | None:
    """The type of a column of a backend's frame for one of a file; None where there is none."""
    plain = plain_type(type_)
    return plain if plain is not None and backend.holds(plain) else None


def key_of(schema: pa.Schema) -> str | None:
    """The column of keys in a sidecar; None where there is none, or names come twice."""
    if len(set(schema.names)) < len(schema):
        return None
    key = next((name for name in _KEYS if name in schema.names), None)
    return key if key and is_text(plain_type(schema.field(key).type)) else None


def _names(columns: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    used = {*taken, *columns}
    for column in columns:
        name = column
        if column in taken:
            while name in used:
                name = f"sidecar.{name}"
            used.add(name)
        names[column] = name
    return names


def plain_type(type_: pa.DataType) -> pa.DataType | None:
    """The type of a column of the frame for one of a file; None where there is none.

    Text is text, however it is stored, and what is null throughout may be text in other files.
    """
    if isinstance(type_, pa.BaseExtensionType):
        return plain_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    if pa.types.is_null(type_) or is_text(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_):
        return pa.binary()
    if pa.types.is_float16(type_):
        return pa.float32()
    if pa.types.is_struct(type_):
        fields = [(field.name, plain_type(field.type)) for field in type_]
        if any(t is None for _, t in fields) or not is_supported(made := pa.struct(fields)):
            return None
        return made
    if is_list(type_) or pa.types.is_fixed_size_list(type_):
        value = plain_type(type_.value_type)
        return None if value is None else pa.list_(value)
    return type_ if is_supported(type_) else None
