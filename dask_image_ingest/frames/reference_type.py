"""The Arrow type of image references: an image before it is decoded, as a value of a column."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dask_image_ingest.frames.cudf_types import bytes_of

__all__ = ["REFERENCE", "ImageReference", "as_references", "holds_references", "reference_array"]

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
        return hash((*told, sample and sample.hex()))

    @property
    def place(self) -> tuple[int, int] | None:
        """Offset and size of the encoded image; None where it is no range of the shard."""
        if self.offset is None or self.nbytes is None:
            return None
        return self.offset, self.nbytes


def reference_array(references: Iterable[ImageReference | None]) -> pa.StructArray:
    """References as an Arrow array."""
    values = list(references)
    fields = [
        pa.array(
            [None if each is None else getattr(each, field.name) for each in values], field.type
        )
        for field in REFERENCE
    ]
    absent = pa.array([each is None for each in values], pa.bool_())
    return pa.StructArray.from_arrays(fields, fields=list(REFERENCE), mask=absent)


def holds_references(type_: pa.DataType) -> bool:
    """Whether a column of this Arrow type holds references, in our type or in one like it.

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
    fields = [_cast(child, field) for child, field in zip(array.flatten(), REFERENCE, strict=True)]
    return pa.StructArray.from_arrays(fields, fields=list(REFERENCE), mask=array.is_null())


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    if field.name == "bytes" and pa.types.is_list(array.type):
        array = bytes_of(array)
    return array.cast(field.type)
