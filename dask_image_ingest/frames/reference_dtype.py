"""The pandas dtype of image references: Arrow structs under a name that pandas finds again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.nested_array import NestedArray, arrow_of
from dask_image_ingest.frames.reference_type import (
    REFERENCE,
    ImageReference,
    as_references,
    holds_references,
    reference_array,
)

__all__ = ["ReferenceArray", "ReferenceDtype", "is_reference_dtype"]

# Inside ReferenceDtype, "type" is something else.
_Class: TypeAlias = type


@pd.api.extensions.register_extension_dtype
class ReferenceDtype(pd.ArrowDtype):
    """References to encoded images, from which ``decode_images`` makes pixels."""

    def __init__(self) -> None:
        super().__init__(REFERENCE)

    @property
    def name(self) -> str:
        """How pandas finds this dtype again."""
        return "image_reference"

    # What a row is outside of the column.
    type = ImageReference

    @classmethod
    def construct_from_string(cls, string: str) -> ReferenceDtype:
        """The dtype by its name."""
        if string != "image_reference":
            raise TypeError(f"Cannot construct a ReferenceDtype from {string!r}")
        return cls()

    def construct_array_type(self) -> _Class:
        """The class of columns of this dtype."""
        return ReferenceArray

    def _get_common_dtype(self, dtypes: list[Any]) -> ReferenceDtype | None:
        return self if all(is_reference_dtype(dtype) for dtype in dtypes) else None

    def __from_arrow__(self, array: pa.Array | pa.ChunkedArray) -> ReferenceArray:
        return ReferenceArray(array)

    def __reduce__(self) -> tuple[_Class, tuple[()]]:
        return ReferenceDtype, ()


class ReferenceArray(NestedArray):
    """A column of image references over Arrow memory."""

    _what = "image references"
    _instead = "for their pixels call decode_images()"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(as_references(values))
        self._dtype = ReferenceDtype()

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Any) -> pa.Array | pa.ChunkedArray:
        array = arrow_of(values, REFERENCE, as_references)
        if array is not None:
            return array
        found = [None if _is_null(value) else value for value in values]
        if not all(value is None or isinstance(value, ImageReference) for value in found):
            raise OperandError("a column of image references takes image references")
        return reference_array(found)

    def _objects(self) -> Iterator[ImageReference | None]:
        for value in self._pa_array.to_pylist():
            yield None if value is None else ImageReference(**value)

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if value is None else repr(value).encode() for value in self._objects())

    def _explode(self) -> Any:
        return self.copy(), [1] * len(self)


def _is_null(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def is_reference_dtype(dtype: Any) -> bool:
    """Whether a column of this pandas dtype holds image references."""
    return isinstance(dtype, pd.ArrowDtype) and holds_references(dtype.pyarrow_dtype)


@make_array_nonempty.register(ReferenceDtype)
def _two_references(dtype: ReferenceDtype) -> ReferenceArray:
    return ReferenceArray(reference_array([ImageReference("shard.tar", key="key")] * 2))
