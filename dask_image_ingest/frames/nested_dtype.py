"""The pandas dtype of lists and structs: Arrow's, under a name that pandas finds again.

As with images (``image_dtype.py``): pandas names an Arrow list ``list<item: float>[pyarrow]`` and
can't read that name back, so that ``read_parquet`` and dask's shuffle between workers would both
fail on a column of embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.nested_array import NestedArray, arrow_of
from dask_image_ingest.frames.type_names import named_type, type_name

__all__ = ["NestedDtype", "list_values", "nested_dtype"]


@pd.api.extensions.register_extension_dtype
class NestedDtype(pd.ArrowDtype):
    """Arrow lists or structs, ``list<float32>`` or ``struct<x: list<string>>`` for example."""

    @property
    def name(self) -> str:
        """How pandas finds this dtype again."""
        return type_name(self.pyarrow_dtype)

    @classmethod
    def construct_from_string(cls, string: str) -> NestedDtype:
        """The dtype by its name."""
        # pandas asks every dtype for every name; only a TypeError has it ask the next one.
        if isinstance(string, str) and string.startswith(("list<", "large_list<", "struct<")):
            try:
                return cls(named_type(string))
            except (ValueError, RecursionError):
                pass
        raise TypeError(f"Cannot construct a NestedDtype from {string!r}")

    def construct_array_type(self) -> type[NestedColumn]:
        """The class of columns of this dtype."""
        return NestedColumn

    def _get_common_dtype(self, dtypes: list[Any]) -> NestedDtype | None:
        return self if all(self._has(dtype) for dtype in dtypes) else None

    def _has(self, dtype: Any) -> bool:
        """Whether this dtype can have a column of another one: of the same Arrow type, or nulls."""
        if not isinstance(dtype, pd.ArrowDtype):
            return False
        type_ = dtype.pyarrow_dtype
        return type_ == self.pyarrow_dtype or pa.types.is_null(type_)

    def __from_arrow__(self, array: pa.Array | pa.ChunkedArray) -> NestedColumn:
        return NestedColumn(array.cast(self.pyarrow_dtype))

    def __reduce__(self) -> tuple[type[NestedDtype], tuple[pa.DataType]]:
        return NestedDtype, (self.pyarrow_dtype,)


class NestedColumn(NestedArray):
    """A column of lists or structs over Arrow memory."""

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(values)
        self._dtype = NestedDtype(values.type)
        self._what, self._instead = _words(values.type)

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Any) -> pa.Array | pa.ChunkedArray:
        type_ = dtype.pyarrow_dtype if isinstance(dtype, NestedDtype) else None
        array = None if type_ is None else arrow_of(values, type_)
        if array is not None:
            return array
        try:
            return pa.chunked_array([pa.array(values, type_, from_pandas=True)])
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
            what = "lists" if type_ is None else _words(type_)[0]
            raise OperandError(f"a column of {what} takes {what}: {error}") from None

    def _objects(self) -> Iterator[Any]:
        return iter(self._pa_array.to_pylist())

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if value is None else repr(value).encode() for value in self._objects())

    def _explode(self) -> Any:
        lists = self._pa_array
        if pa.types.is_struct(lists.type):
            return self.copy(), np.ones(len(self), np.uint64)
        if pa.types.is_large_list(lists.type):  # which pandas leaves as they are
            lists = lists.cast(pa.list_(lists.type.value_type))
        items, counts = pd.arrays.ArrowExtensionArray(lists)._explode()
        nested = pa.types.is_nested(lists.type.value_type)
        return NestedColumn(items.__arrow_array__()) if nested else items, counts


def _words(type_: pa.DataType) -> tuple[str, str]:
    """What a column of this type has, and where to go for what it does not."""
    if pa.types.is_struct(type_):
        return "structs", "for one of their fields call .struct.field(name)"
    return "lists", "for their numbers call .images.vectors(column)"


def nested_dtype(type_: pa.DataType) -> pd.ArrowDtype:
    """The dtype of a nested Arrow type: ours where all parts have names, else Arrow's own."""
    try:
        return NestedDtype(named_type(type_name(type_)))
    except (ValueError, RecursionError):
        return pd.ArrowDtype(type_)


def list_values(array: pa.ChunkedArray) -> np.ndarray | None:
    """Lists of numbers of one length as (n, length), without a copy where they lie side by side.

    None where the lengths differ or a list is null.
    """
    chunk = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(chunk, pa.ChunkedArray):
        chunk = pa.concat_arrays(chunk.chunks) if chunk.num_chunks else pa.array([], array.type)
    lengths = np.diff(chunk.offsets.to_numpy())
    if chunk.null_count or (lengths != lengths[:1]).any():
        return None
    length = lengths[0] if len(lengths) else 0
    return chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), length)


@make_array_nonempty.register(NestedDtype)
def _two_rows(dtype: NestedDtype) -> NestedColumn:
    row: Any = {} if pa.types.is_struct(dtype.pyarrow_dtype) else []
    return NestedColumn(pa.chunked_array([pa.array([row, row], dtype.pyarrow_dtype)]))
