"""The Arrow type of decoded images, and columns of them that came with another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Decoded pixels of one row: row-major ``height x width x channels``, with its own shape, so that a
#: row keeps its meaning through any filter, merge, shuffle or file. Arrow moves bytes in one piece,
#: and lists of bytes one by one.
IMAGE = pa.struct(
    [
        pa.field("data", pa.large_binary()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("channels", pa.int32()),
    ]
)


def holds_images(type_: pa.DataType) -> bool:
    """Whether a column of this Arrow type holds images, in our type or in one like it.

    cuDF has lists of bytes, and so have older frames and files.
    """
    if not pa.types.is_struct(type_) or type_.names != IMAGE.names:
        return False
    data, *edges = (field.type for field in type_)
    return all(edge == pa.int32() for edge in edges) and (_is_bytes(data) or _is_bytes_list(data))


def as_images(array: Any) -> Any:
    """An Arrow array, or a chunked one, in our type; the pixels are not copied.

    Raises
    ------
    pyarrow.ArrowException
        If it holds no images.
    """
    if array.type.equals(IMAGE):
        return array
    if not holds_images(array.type):
        return array.cast(IMAGE)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([as_images(chunk) for chunk in array.chunks], IMAGE)
    data, *edges = (array.field(name) for name in IMAGE.names)
    absent = pc.or_(array.is_null(), data.is_null())
    data = _bytes_of(data) if _is_bytes_list(data.type) else data.cast(pa.large_binary())
    return pa.StructArray.from_arrays([data, *edges], fields=list(IMAGE), mask=absent)


def _is_bytes(type_: pa.DataType) -> bool:
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_)


def _is_bytes_list(type_: pa.DataType) -> bool:
    lists = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    return lists and type_.value_type == pa.uint8()


def _bytes_of(lists: pa.ListArray | pa.LargeListArray) -> pa.LargeBinaryArray:
    """Lists of bytes as the bytes that they are; nulls become empty."""
    if lists.values.null_count:
        raise pa.ArrowInvalid("an image has nulls among its bytes")
    offsets = np.asarray(lists.offsets).astype(np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.asarray(lists.values))]
    return pa.Array.from_buffers(pa.large_binary(), len(lists), buffers)


__all__ = ["IMAGE", "as_images", "holds_images"]
