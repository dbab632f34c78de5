"""Columns of encoded images: bytes, or structs of bytes and path as Hugging Face has them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.frames import bytes_of, is_byte_list, is_bytes


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
