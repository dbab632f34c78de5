"""Columns of image references: their Arrow type and their pandas dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.arrow_types import bytes_of, is_byte_list
from dask_image_ingest.frames.nested_dtype import NamedDtype, NestedArray, arrow_of

#: Which sample of which version of a shard an image belongs to, where its encoded bytes lie, or
#: these bytes themselves. A null is a row without a sample, as an outer merge makes them.
REFERENCE = pa.struct(
    [
        pa.field("url", pa.string()),
        pa.field("shard_size", pa.int64()),
        pa.field("version", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("key", pa.string()),
        pa.field("offset", pa.int64()),
        pa.field("nbytes", pa.int64()),
        pa.field("bytes", pa.large_binary()),
    ]
)

# Of an encoded image, the bytes that go into a hash.
_HASHED = 256


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image before it is decoded: where its encoded bytes are.

    Attributes
    ----------
    url, shard_size, version
        The shard, its size in bytes, and its time of change or ETag; None where not known.
    number, key
        The sample's number in the shard, from 0 on, and its key.
    offset, nbytes
        Where the encoded image lies in the shard. ``offset`` is None for an image that is no range
        of bytes (sparse or duplicate members), which is found by its sample; ``nbytes`` is None
        where the sample has no image.
    bytes
        The encoded image itself, where its shard can't be read from the middle; else None.
    """

    url: str | None
    shard_size: int | None = None
    version: str | None = None
    number: int | None = None
    key: str | None = None
    offset: int | None = None
    nbytes: int | None = None
    bytes: bytes | memoryview | None = None

    def __hash__(self) -> int:
        # Some of the bytes tell images apart; who finds an equal hash compares all.
        sample = None if self.bytes is None else self.bytes[:: 1 + len(self.bytes) // _HASHED]
        told = self.url, self.version, self.number, self.key, self.offset
        return hash((*told, None if sample is None else sample.hex()))

    @property
    def place(self) -> tuple[int, int] | None:
        """Offset and size of the encoded image; None where it is no range of the shard."""
        if self.offset is None or self.nbytes is None:
            return None
        return self.offset, self.nbytes


def reference_array(references: Iterable[ImageReference | None]) -> pa.StructArray:
    """References as an Arrow array."""
    values = list(references)
    fields = {
        field.name: pa.array([getattr(each, field.name, None) for each in values], field.type)
        for field in REFERENCE
    }
    absent = pa.array([each is None for each in values], pa.bool_())
    return references_of_fields(len(values), fields, absent)


def references_of_fields(
    count: int, fields: Mapping[str, pa.Array], absent: pa.Array | None = None
) -> pa.StructArray:
    """References as an Arrow array; fields that are not given are null."""
    arrays = [
        fields[field.name].cast(field.type) if field.name in fields else pa.nulls(count, field.type)
        for field in REFERENCE
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(REFERENCE), mask=absent)


def holds_references(type_: pa.DataType) -> bool:
    """True for the Arrow type of references, and for types like it.

    cuDF has lists of uint8 in the place of bytes.
    """
    return bool(pa.types.is_struct(type_)) and type_.names == REFERENCE.names


def as_references(array: Any) -> Any:
    """An Arrow array, or a chunked one, in our type.

    Raises
    ------
    pyarrow.ArrowException
        If it holds no references.
    """
    if array.type.equals(REFERENCE):
        return array
    if not holds_references(array.type):
        raise pa.ArrowInvalid(f"no image references: {array.type}")
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([as_references(chunk) for chunk in array.chunks], REFERENCE)
    fields = dict(zip(REFERENCE.names, array.flatten(), strict=True))
    if is_byte_list(fields["bytes"].type):
        fields["bytes"] = bytes_of(fields["bytes"])
    return references_of_fields(len(array), fields, array.is_null())


# Inside ReferenceDtype, "type" is something else.
_Class: TypeAlias = type


@pd.api.extensions.register_extension_dtype
class ReferenceDtype(NamedDtype):
    """References to encoded images, from which ``decode_images`` makes pixels."""

    arrow_type = REFERENCE
    label = "image_reference"

    # What a row is outside of the column.
    type = ImageReference

    def construct_array_type(self) -> _Class:
        """The class of columns of this dtype."""
        return ReferenceArray

    def is_like(self, dtype: Any) -> bool:
        """True for a dtype whose columns can be columns of this one."""
        return is_reference_dtype(dtype)


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
    """True for the pandas dtype of image references."""
    return isinstance(dtype, pd.ArrowDtype) and holds_references(dtype.pyarrow_dtype)


@make_array_nonempty.register(ReferenceDtype)
def _two_references(dtype: ReferenceDtype) -> ReferenceArray:
    return ReferenceArray(reference_array([ImageReference("shard.tar", key="key")] * 2))
