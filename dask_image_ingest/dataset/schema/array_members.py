"""Convert NumPy files (``.npy``: embeddings, latents) to columns of lists."""

from __future__ import annotations

import io
import math
import operator
import tokenize
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

from dask_image_ingest.frames import is_list, is_number

# NumPy parses a header as a literal of Python. Those of plain arrays are shorter, and it takes a
# second for some of 10,000 characters.
_LONGEST_HEADER = 1024

# What NumPy and Python's parser raise for invalid headers; the last one if they nest too deeply.
_INVALID = (
    ValueError,
    LookupError,
    TypeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
    tokenize.TokenError,
    MemoryError,
)

_MAGIC, _ZIP = b"\x93NUMPY", b"PK\x03\x04"


def is_array_type(type_: pa.DataType) -> bool:
    """True for lists, also nested ones, of numbers or booleans."""
    _, value = _depth(type_)
    return (is_number(value) or pa.types.is_boolean(value)) and value is not type_


def arrays_to_lists(
    contents: Sequence[bytes | None], type_: pa.DataType
) -> tuple[pa.Array, list[int]] | None:
    """Convert ``.npy`` files to lists; returns the column and the rows that don't fit its type.

    An array fits if it has as many dimensions as the type has nested lists, and its dtype casts to
    the type's safely (NumPy's casting rule ``safe``). It has at most as many empty lists as bytes.

    Parameters
    ----------
    contents
        The member of each sample; None if it has none.
    type_
        Lists, also nested ones, of numbers or booleans.

    Returns
    -------
    tuple or None
        None if no member is an ``.npy`` file.
    """
    if not any(content is not None and content.startswith(_MAGIC) for content in contents):
        return None
    depth, value = _depth(type_)
    dtype = np.dtype(value.to_pandas_dtype())
    arrays = [_array(content, depth, dtype) for content in contents]
    misfits = [
        row
        for row, (array, content) in enumerate(zip(arrays, contents, strict=True))
        if array is None and content is not None
    ]
    return _lists(arrays, type_, dtype), misfits


def type_advice(content: bytes, type_: pa.DataType) -> str | None:
    """Advice which type to ask for instead of ``type_``; None if no other would help."""
    if content.startswith(_ZIP):
        return "an .npz file may hold several arrays: ask for 'binary', and np.load each value"
    header = _header(io.BytesIO(content)) if content.startswith(_MAGIC) else None
    if header is None:
        return None
    shape, _, stored = header
    depth, value = _depth(type_)
    fits = len(shape) == depth and np.can_cast(stored, value.to_pandas_dtype(), "safe")
    if fits or not shape or stored.kind not in "biuf" or stored.itemsize > 8:
        return None
    name = "float32" if stored.name == "float16" else stored.name  # not every backend has float16
    asked = f"{'list<' * len(shape)}{name}{'>' * len(shape)}"
    return f"it is {stored.name} of shape {shape}: ask for {asked!r}"


def _depth(type_: pa.DataType) -> tuple[int, pa.DataType]:
    """Number of nested lists, and the type of their values."""
    depth = 0
    while is_list(type_):
        depth, type_ = depth + 1, type_.value_type
    return depth, type_


def _array(content: bytes | None, depth: int, dtype: np.dtype) -> np.ndarray | None:
    """The array of a file; None if it is invalid, truncated, holds objects, or doesn't fit."""
    if content is None or not content.startswith(_MAGIC):
        return None
    file = io.BytesIO(content)
    header = _header(file)
    if header is None:
        return None
    shape, fortran, stored = header
    if stored.hasobject or len(shape) != depth or not np.can_cast(stored, dtype, "safe"):
        return None
    data = memoryview(content)[file.tell() :]
    # Checked before anything is allocated: the shape in a header may be any.
    if min(shape, default=1) < 0 or math.prod(shape) * stored.itemsize != len(data):
        return None
    # Empty lists take no bytes in the file, but some in the column.
    if max(accumulate(shape[:-1], operator.mul), default=0) > len(content):
        return None
    with suppress(*_INVALID):  # of a dimension that NumPy does not take, beside one of 0
        return np.frombuffer(data, stored).reshape(shape, order="F" if fortran else "C")
    return None


def _header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype] | None:
    try:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        read = readers[npy.read_magic(file)]
        header: tuple[tuple[int, ...], bool, np.dtype] = read(file, max_header_size=_LONGEST_HEADER)
    except _INVALID:
        return None
    return header


def _lists(arrays: Sequence[np.ndarray | None], type_: pa.DataType, dtype: np.dtype) -> pa.Array:
    """A column of nested lists, null for None: flat values first, then lists from inside out."""
    present = [array for array in arrays if array is not None]
    values = pa.array(
        np.concatenate([np.empty(0, dtype), *(a.ravel() for a in present)], dtype=dtype)
    )
    types = [type_]
    while is_list(types[-1].value_type):
        types.append(types[-1].value_type)
    for level in reversed(range(1, len(types))):
        lengths = [np.full(math.prod(a.shape[:level]), a.shape[level]) for a in present]
        values = _list(types[level], np.concatenate([np.empty(0, np.int64), *lengths]), values)
    rows = np.array([0 if array is None else array.shape[0] for array in arrays], np.int64)
    return _list(type_, rows, values, pa.array([array is None for array in arrays], pa.bool_()))


def _list(
    type_: pa.DataType, lengths: np.ndarray, values: pa.Array, mask: pa.Array | None = None
) -> pa.Array:
    large = pa.types.is_large_list(type_)
    offsets = pa.array(
        np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32()
    )
    kind = pa.LargeListArray if large else pa.ListArray
    return kind.from_arrays(offsets, values, type=type_, mask=mask)
