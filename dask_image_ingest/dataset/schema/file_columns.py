"""Columns of parquet files: those of sidecars beside shards, and encoded images.

Encoded images are bytes, or structs of bytes and path as Hugging Face has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.arguments import check_choice
from dask_image_ingest.dataset.schema.coerce import is_supported
from dask_image_ingest.dataset.schema.columns import METADATA_COLUMNS, FileColumn
from dask_image_ingest.errors import ArgumentError, ShardError, warn_user
from dask_image_ingest.frames import (
    Backend,
    bytes_of,
    is_any_list,
    is_byte_list,
    is_bytes,
    is_text,
    tensor_type,
)
from dask_image_ingest.storage import (
    Listings,
    NotParquetError,
    Shard,
    find_beside,
    open_parquet,
)

SidecarChoice: TypeAlias = Literal["parquet", "auto", False] | None

# Files beside shards that are opened at most to find a parquet file.
_MOST_UNREADABLE = 10

# Names of the key column: that of to_webdataset, that of img2dataset.
_KEYS = ("__key__", "key")


def check_sidecar(sidecar: object) -> None:
    """Raise `ArgumentError` for an unknown ``sidecar=``."""
    if sidecar is not None and sidecar is not False:
        check_choice("sidecar", sidecar, ("parquet", "auto"))


def with_sidecars(
    shards: Sequence[Shard],
    sidecar: SidecarChoice,
    storage_options: dict[str, Any] | None,
    listings: Listings,
) -> list[Shard]:
    """Find the sidecar of each shard. Listings of folders are added to ``listings``.

    ``"auto"`` takes what one listing of each folder shows; files of a few shards are asked for.

    Raises
    ------
    ArgumentError
        If a shard has no sidecar, with ``"parquet"``.
    """
    if not sidecar:
        return list(shards)
    only_listed = sidecar == "auto"
    files = find_beside(shards, ".parquet", storage_options, listings, only_listed)
    pairs = [*zip(shards, files, strict=True)]
    without = [shard.url for shard, file in pairs if file is None]
    if without and sidecar == "parquet":
        raise ArgumentError(
            f"sidecar='parquet': {len(without)} of {len(shards)} shards have no parquet file "
            f"beside them, first {without[0]}. Pass sidecar='auto' to have nulls there"
        )
    return [replace(shard, sidecar=file) for shard, file in pairs]


def sidecar_columns(
    shards: Sequence[Shard],
    sidecar: SidecarChoice,
    taken: Collection[str],
    storage_options: dict[str, Any] | None,
    backend: Backend,
) -> tuple[FileColumn, ...] | None:
    """The columns of the first sidecar that can be read, renamed if their name is ``taken``.

    Columns of a type that the backend does not support are left out, with a warning. So are, with
    ``"auto"``, those of a file of `to_webdataset` whose name is taken: the shard has them. None,
    with a warning, if ``"auto"`` has found a file without keys, or none that is a parquet file.

    Raises
    ------
    ArgumentError
        If the sidecar has no column of keys, with ``"parquet"``.
    ShardError
        If the sidecar can't be read; with ``"auto"``, if its storage fails.
    """
    files = [shard.sidecar for shard in shards if shard.sidecar is not None]
    errors: list[ShardError] = []
    for first in files[:_MOST_UNREADABLE]:
        try:
            with open_parquet(first, storage_options) as file:
                schema = file.schema_arrow
            break
        except ShardError as error:
            if sidecar == "parquet" or not isinstance(error, NotParquetError):
                raise without_it(error) from error
            errors.append(error)
    else:
        if errors:
            warn_user(f"sidecars are left out: {without_it(errors[0])}")
        return None if errors else ()
    key = key_of(schema)
    if key is None:
        told = (
            f"{first.url} has no keys to join its rows to samples by: it needs a column of text "
            f"named {' or '.join(map(repr, _KEYS))}, each name once. It has "
            f"{', '.join(map(str, schema.names))}. Pass sidecar=None to read without it"
        )
        if sidecar == "parquet":
            raise ArgumentError(told)
        warn_user(f"sidecars are left out: {told}")
        return None
    types = {f.name: column_type(f.type, backend) for f in schema if f.name != key}
    if key == "__key__":
        # A sidecar of to_webdataset repeats what the shard says of its images.
        repeated = {*METADATA_COLUMNS, *(taken if sidecar == "auto" else ())}
        types = {name: type_ for name, type_ in types.items() if name not in repeated}
    left_out = [f"{name!r} ({schema.field(name).type})" for name, t in types.items() if t is None]
    if left_out:
        warn_user(f"{first.url} has columns of unsupported types, left out: {', '.join(left_out)}")
    supported = [name for name, type_ in types.items() if type_ is not None]
    names = frame_names(supported, taken, "sidecar.")
    without = [shard.url for shard in shards if shard.sidecar is None]
    if names and without:
        warn_user(
            f"{len(without)} of {len(shards)} shards have no parquet file beside them, first "
            f"{without[0]}: its columns are null there"
        )
    return tuple(FileColumn(names[name], name, types[name]) for name in names)


def without_it(error: Exception) -> Exception:
    """The error of a sidecar, with the argument that reads without it."""
    return type(error)(f"{error}. Pass sidecar=None to read without it")


def column_type(type_: pa.DataType, backend: Backend) -> pa.DataType | None:
    """The type of a file's column in a frame of this backend; None if unsupported."""
    tensors = tensor_type(type_)
    if tensors is not None and is_supported(tensors) and backend.holds(tensors):
        return tensors
    plain = plain_type(type_)
    return plain if plain is not None and backend.holds(plain) else None


def key_of(schema: pa.Schema) -> str | None:
    """The column of keys of a sidecar; None if it has none, or two columns of one name."""
    if len(set(schema.names)) < len(schema):
        return None
    key = next((name for name in _KEYS if name in schema.names), None)
    return key if key and is_text(plain_type(schema.field(key).type)) else None


def frame_names(columns: Sequence[str], taken: Collection[str], prefix: str) -> dict[str, str]:
    """File column → frame column: its own name, with the prefix if that is taken."""
    names: dict[str, str] = {}
    used = {*taken, *columns}
    for column in columns:
        name = column
        if column in taken:
            while name in used:
                name = prefix + name
            used.add(name)
        names[column] = name
    return names


def plain_type(type_: pa.DataType) -> pa.DataType | None:
    """The type of a file's column in a frame; None if unsupported.

    Every string type becomes ``string``, and so does ``null``: other files may have text there.
    """
    if isinstance(type_, pa.BaseExtensionType):
        return plain_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    if pa.types.is_null(type_) or is_text(type_) or pa.types.is_string_view(type_):
        return pa.string()
    kinds = (pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    if any(kind(type_) for kind in kinds):
        return pa.binary()
    if pa.types.is_float16(type_):
        return pa.float32()
    if pa.types.is_struct(type_):
        fields = [(field.name, plain_type(field.type)) for field in type_]
        if any(t is None for _, t in fields) or not is_supported(made := pa.struct(fields)):
            return None
        return made
    if is_any_list(type_):
        value = plain_type(type_.value_type)
        return None if value is None else pa.list_(value)
    return type_ if is_supported(type_) else None


# --- encoded images -------------------------------------------------------------------------------


def check_encoded_type(type_: pa.DataType) -> None:
    """Raise `TypeError` for a type that can't hold encoded images."""
    if pa.types.is_struct(type_):
        if "bytes" not in type_.names:
            raise TypeError(f"{type_} has no field 'bytes'")
        type_ = type_.field("bytes").type
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    kinds = (is_bytes, pa.types.is_binary_view, pa.types.is_null, is_byte_list)
    if not any(kind(type_) for kind in kinds):
        raise TypeError(f"it is of type {type_}")


def encoded_bytes(array: pa.Array) -> pa.LargeBinaryArray:
    """The bytes of encoded images, without a copy unless they are a dictionary."""
    if pa.types.is_struct(array.type):
        array = pc.struct_field(array, "bytes")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_byte_list(array.type):
        array = bytes_of(_without_gaps(array))
    return array.cast(pa.large_binary())


def _without_gaps(lists: pa.Array) -> pa.Array:
    """Lists of bytes, null where nulls are among the bytes: such a row has no image."""
    gaps = np.flatnonzero(lists.values.is_null().to_numpy(zero_copy_only=False))
    if not len(gaps):
        return lists
    rows = np.searchsorted(lists.offsets.to_numpy(), gaps, "right") - 1
    is_whole = np.ones(len(lists), bool)
    is_whole[rows[(rows >= 0) & (rows < len(lists))]] = False
    return pc.if_else(pa.array(is_whole), lists, pa.scalar(None, lists.type))


def encoded_views(array: pa.Array) -> list[memoryview | None]:
    """Views of encoded images; those that a dictionary repeats share its one value."""
    if pa.types.is_struct(array.type):
        array = pc.struct_field(array, "bytes")
    if pa.types.is_dictionary(array.type):
        values = encoded_views(array.dictionary)
        return [None if index is None else values[index] for index in array.indices.to_pylist()]
    return [
        memoryview(value.as_buffer()).cast("B") if value.is_valid else None
        for value in encoded_bytes(array)
    ]
