"""Columns of image references: Arrow type, pandas dtype and array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.arrow_types import bytes_of, is_byte_list, is_text
from dask_image_ingest.frames.nested_dtype import NamedDtype, NestedArray, arrow_of, is_missing
from dask_image_ingest.typedefs import Dtype
from dask_image_ingest.url_secrets import UrlHolder

#: Arrow type of an `ImageReference`. A null is a row without a sample, for example after an outer
#: merge.
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
        pa.field("error", pa.string()),
        pa.field("page", pa.int32()),
        pa.field("top", pa.float64()),
        pa.field("left", pa.float64()),
        pa.field("height", pa.float64()),
        pa.field("width", pa.float64()),
        pa.field("in_shares", pa.bool_()),
    ]
)

# Fields of references that were stored before there were parts.
_WITHOUT_PARTS = REFERENCE.names[: REFERENCE.names.index("page")]

# Number of bytes of an encoded image to hash.
_HASHED_BYTES = 256


@dataclass(frozen=True, slots=True, repr=False)
class ImageReference(UrlHolder):
    """Reference to an encoded image, or a part of it: a byte range in a shard, or the bytes.

    Attributes
    ----------
    url, shard_size, version
        The shard, its size in bytes, and its modification time or ETag; None if not known.
    number, key
        The sample's number in the shard, from 0 on, and its key.
    offset, nbytes
        Range of the encoded image in the shard. ``offset`` is None if the image is not one range
        (sparse or duplicate members), and must be found by its sample; ``nbytes`` is None if the
        sample has no image.
    bytes
        The encoded image itself, if its shard has no random access; else None.
    error
        Why the image can't be decoded whatever its bytes are: its sample has two; else None.
    page
        Number of the page of a TIFF, or the frame of an animation, from 0 on; None for the first.
    top, left, height, width
        A rectangle of the upright page, which may reach beyond it; None for all of it.
    in_shares
        True if the rectangle is in shares of the page's height and width; else it is in pixels.
    """

    url: str | None
    shard_size: int | None = None
    version: str | None = None
    number: int | None = None
    key: str | None = None
    offset: int | None = None
    nbytes: int | None = None
    bytes: bytes | memoryview | None = None
    error: str | None = None
    page: int | None = None
    top: float | None = None
    left: float | None = None
    height: float | None = None
    width: float | None = None
    in_shares: bool | None = None

    def __hash__(self) -> int:
        # A sample of the bytes is enough; __eq__ compares all.
        sample = None if self.bytes is None else self.bytes[:: 1 + len(self.bytes) // _HASHED_BYTES]
        fields = self.url, self.version, self.number, self.key, self.offset, self.part
        return hash((*fields, None if sample is None else sample.hex()))

    @property
    def has_part(self) -> bool:
        """True if it refers to a page, or a rectangle, of its image."""
        return self.page is not None or self.top is not None

    @property
    def part(self) -> tuple[int, float | None, float | None, float | None, float | None, bool]:
        """The page, from 0, and top, left, height, width and ``in_shares`` of the rectangle."""
        rectangle = self.top, self.left, self.height, self.width
        return self.page or 0, *rectangle, bool(self.in_shares)

    @property
    def picture(self) -> ImageReference:
        """Reference to the bytes: without its rectangle, and to page 0 if it has a part.

        So bytes of which parts alone are wanted need not be read whole.
        """
        if not self.has_part:
            return self
        return replace(self, page=0, top=None, left=None, height=None, width=None, in_shares=None)

    @property
    def place(self) -> tuple[int, int] | None:
        """Offset and size of the encoded image; None if it is not one range of the shard."""
        if self.offset is None or self.nbytes is None:
            return None
        return self.offset, self.nbytes


def reference_array(references: Iterable[ImageReference | None]) -> pa.StructArray:
    """Arrow array of references."""
    values = list(references)
    fields = {
        field.name: pa.array([getattr(value, field.name, None) for value in values], field.type)
        for field in REFERENCE
    }
    nulls = pa.array([value is None for value in values], pa.bool_())
    return references_of_fields(len(values), fields, nulls)


def references_of_fields(
    count: int, fields: Mapping[str, pa.Array], nulls: pa.Array | None = None
) -> pa.StructArray:
    """Arrow array of references from their fields; missing fields are null."""
    arrays = [
        fields[field.name].cast(field.type) if field.name in fields else pa.nulls(count, field.type)
        for field in REFERENCE
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(REFERENCE), mask=nulls)


def fields_of(references: pa.StructArray) -> dict[str, pa.Array]:
    """The fields of references by name; null for null references."""
    return dict(zip(references.type.names, references.flatten(), strict=True))


def with_urls(table: pa.Table, change: Callable[[str], str]) -> pa.Table:
    """A table with other URLs in its column ``__url__`` and in its references."""
    for number, field in enumerate(table.schema):
        if field.name == "__url__" and is_text(field.type):
            urls = table.column(number).combine_chunks()
            table = table.set_column(number, field, _changed(urls, change))
        elif holds_references(field.type):
            column = table.column(number).combine_chunks()
            fields = fields_of(column)
            fields["url"] = _changed(fields["url"], change)
            new = pa.StructArray.from_arrays(
                [*fields.values()], fields=list(field.type), mask=column.is_null()
            )
            table = table.set_column(number, field, new)
    return table


def _changed(urls: pa.Array, change: Callable[[str], str]) -> pa.Array:
    encoded = urls.dictionary_encode()
    changed = [None if url is None else change(url) for url in encoded.dictionary.to_pylist()]
    return pa.array(changed, urls.type).take(encoded.indices)


def holds_references(type_: pa.DataType) -> bool:
    """True for the Arrow type of references, and for cuDF's, with lists of uint8 for bytes."""
    return bool(pa.types.is_struct(type_)) and are_fields_of_references(type_.names)


def are_fields_of_references(names: list[str]) -> bool:
    """True for the names of the fields of references, also of those stored without parts."""
    return names in (REFERENCE.names, _WITHOUT_PARTS)


def as_references(array: pa.Array | pa.ChunkedArray) -> Any:
    """Convert an Arrow array or chunked array to ``REFERENCE``."""
    if array.type.equals(REFERENCE):
        return array
    # Some of the fields: readers of parquet return them for a column such as ``mask.height``, too.
    if not (pa.types.is_struct(array.type) and {*array.type.names} <= {*REFERENCE.names}):
        raise pa.ArrowInvalid(f"no image references: {array.type}")
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([as_references(chunk) for chunk in array.chunks], REFERENCE)
    fields = fields_of(array)
    if "bytes" in fields and is_byte_list(fields["bytes"].type):
        fields["bytes"] = bytes_of(fields["bytes"])
    return references_of_fields(len(array), fields, array.is_null())


@pd.api.extensions.register_extension_dtype
class ReferenceDtype(NamedDtype):
    """References to encoded images, for ``decode_images``."""

    # Class of one value.
    type = ImageReference

    def __init__(self, type_: pa.DataType = REFERENCE) -> None:
        super().__init__(REFERENCE)

    @property
    def name(self) -> str:
        """Name that pandas can parse."""
        return "image_reference"

    @classmethod
    def _type_of(cls, name: str) -> pa.DataType | None:
        return REFERENCE if name == "image_reference" else None

    def holds(self, type_: pa.DataType) -> bool:
        """True for columns that can be converted to this dtype."""
        return holds_references(type_)


class ReferenceArray(NestedArray):
    """Extension array of image references."""

    _noun = "image references"
    _hint = "for their pixels call decode_images()"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(as_references(values))
        self._dtype = ReferenceDtype()

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Dtype | None) -> pa.Array | pa.ChunkedArray:
        array = arrow_of(values, REFERENCE, as_references)
        if array is not None:
            return array
        references = [None if is_missing(value) else value for value in values]
        if not all(value is None or isinstance(value, ImageReference) for value in references):
            raise OperandError("a column of image references takes image references")
        return reference_array(references)

    def _objects(self) -> Iterator[ImageReference | None]:
        for value in self._pa_array.to_pylist():
            yield None if value is None else ImageReference(**value)


ReferenceDtype.array_class = ReferenceArray


def is_reference_dtype(dtype: object) -> bool:
    """True for the pandas dtype of image references."""
    return isinstance(dtype, pd.ArrowDtype) and holds_references(dtype.pyarrow_dtype)


@make_array_nonempty.register(ReferenceDtype)
def _two_references(dtype: ReferenceDtype) -> ReferenceArray:
    return ReferenceArray(reference_array([ImageReference("shard.tar", key="key")] * 2))
