"""The pandas dtype of lists: Arrow lists under a name that pandas finds again.

As with images (``image_dtype.py``): pandas names an Arrow list ``list<item: float>[pyarrow]`` and
can't read that name back, so that ``read_parquet`` and dask's shuffle between workers would both
fail on a column of embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.nested_array import NestedArray, arrow_of

_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


@pd.api.extensions.register_extension_dtype
class ListDtype(pd.ArrowDtype):
    """Arrow lists of numbers, ``list<float32>`` for example."""

    def __init__(self, item: Any = "float32") -> None:
        item = pa.type_for_alias(item) if isinstance(item, str) else item
        super().__init__(pa.list_(item))

    @property
    def item(self) -> pa.DataType:
        """The type of what is in the lists."""
        return self.pyarrow_dtype.value_type

    @property
    def name(self) -> str:
        """How pandas finds this dtype again."""
        return f"list<{_NAMES.get(str(self.item), self.item)}>"

    @classmethod
    def construct_from_string(cls, string: str) -> ListDtype:
        """The dtype by its name."""
        match = re.fullmatch(r"list<(\w+)>", string) if isinstance(string, str) else None
        if match is None:
            raise TypeError(f"Cannot construct a ListDtype from {string!r}")
        try:
            return cls(match[1])
        except ValueError as error:
            raise TypeError(f"{match[1]!r} is no type of Arrow") from error

    def construct_array_type(self) -> type[ListArray]:
        """The class of columns of this dtype."""
        return ListArray

    def _get_common_dtype(self, dtypes: list[Any]) -> ListDtype | None:
        return self if all(dtype == self for dtype in dtypes) else None

    def __from_arrow__(self, array: pa.Array | pa.ChunkedArray) -> ListArray:
        return ListArray(array.cast(self.pyarrow_dtype))

    def __reduce__(self) -> tuple[type[ListDtype], tuple[pa.DataType]]:
        return ListDtype, (self.item,)


class ListArray(NestedArray):
    """A column of lists over Arrow memory."""

    _what = "lists"
    _instead = "for their numbers call .images.vectors(column)"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(values)
        self._dtype = ListDtype(values.type.value_type)

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Any) -> pa.Array | pa.ChunkedArray:
        type_ = dtype.pyarrow_dtype if isinstance(dtype, ListDtype) else None
        array = None if type_ is None else arrow_of(values, type_)
        if array is not None:
            return array
        try:
            return pa.chunked_array([pa.array(values, type_, from_pandas=True)])
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
            raise OperandError(f"a column of lists takes lists of numbers: {error}") from None

    def _objects(self) -> Iterator[list[Any] | None]:
        return iter(self._pa_array.to_pylist())

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if value is None else repr(value).encode() for value in self._objects())


def list_dtype(type_: pa.DataType) -> pd.ArrowDtype:
    """The dtype of an Arrow list: ours where its items' type has a plain name, else Arrow's own."""
    try:
        plain = pa.type_for_alias(str(type_.value_type)) == type_.value_type
    except ValueError:
        plain = False
    return ListDtype(type_.value_type) if plain else pd.ArrowDtype(type_)


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
    return chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), *lengths[:1])


@make_array_nonempty.register(ListDtype)
def _two_lists(dtype: ListDtype) -> ListArray:
    return ListArray(pa.chunked_array([pa.array([[], []], dtype.pyarrow_dtype)]))
