"""Members of exported samples: copied from the source, or written from columns, also as JSON.

A field of JSON is a path of names, as in ``json_fields=`` of a read: ``user.name`` is ``name`` in
the object ``user``, or a field that is called so. Where fields of an object are set, all other
values keep their digits.
"""

from __future__ import annotations

import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import check_choice, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.stored_images import (
    FORMAT_OF_EXTENSION,
    STORED_EXTENSIONS,
    ImageOrigin,
)
from dask_image_ingest.frames import (
    is_bytes,
    is_list,
    is_number,
    is_text,
    nesting,
    pandas_type,
    tensor_type,
)
from dask_image_ingest.ops import encoded_images
from dask_image_ingest.tar import IMAGE_EXTENSIONS
from dask_image_ingest.typedefs import DataFrame, Series


@dataclass(frozen=True)
class Encode:
    """Encoder settings of a member: ``members={"jpg": Encode("image", quality=90)}``.

    JPEG is baseline, without EXIF or a colour profile. PNG, and WebP unless of three channels, are
    lossless and have no settings.

    Parameters
    ----------
    column
        The image column whose pixels are encoded.
    quality
        Quality of JPEG and WebP, 1 to 100, as defined by libjpeg and libwebp.
    subsampling
        Chroma subsampling of JPEG: ``"420"``, ``"422"`` or ``"444"``.

    Examples
    --------
    >>> small = read_webdataset_images("train-{000..003}.tar", size=64, resize="shorter")
    >>> members = {"jpg": Encode("image", quality=90)}
    >>> written = to_webdataset(small, "small/{shard:03d}.tar", members=members, errors="drop")
    >>> int(written["samples"].sum()), written.attrs["left_out"]["bad-image"]["first"]
    (51, ['0018'])
    """

    column: str
    quality: int = 92
    subsampling: Literal["420", "422", "444"] = "420"

    def __post_init__(self) -> None:
        advice = "pass a whole number from 1 to 100"
        whole_number("quality", self.quality, 1, advice, most=100)
        check_choice("subsampling", self.subsampling, ("420", "422", "444"))


@dataclass(frozen=True, slots=True)
class ColumnMember:
    """A member written from columns."""

    extension: str
    columns: str | tuple[str, ...]  # several are a JSON object
    pixels: Encode | None = None  # settings of the encoder, if the column has pixels
    is_main: bool = False  # True if it replaces the sample's own image
    # If it is the stored images of a column: the extension of those that it takes, "" for all.
    stored: str | None = None

    @property
    def merges(self) -> bool:
        """True if its fields are set in the sample's own member, where there is one."""
        return not isinstance(self.columns, str) and self.extension.rpartition(".")[2] == "json"

    @property
    def fields(self) -> tuple[tuple[str, ...], ...]:
        """The path of each field in a JSON object, for ``json.<field>`` as it was read."""
        is_own = self.extension == "json"
        return tuple(
            tuple(name[5:].split(".")) if is_own and name[:5] == "json." and name[5:] else (name,)
            for name in self.needs
        )

    def encode(self, frame: DataFrame) -> Series:
        """Encode the pixels of the column; a series of files."""
        assert self.pixels is not None
        settings: dict[str, Any] = {"quality": self.pixels.quality}
        if self.format == "jpeg":
            settings["subsampling"] = ":".join(self.pixels.subsampling)
        return encoded_images(frame, self.pixels.column, self.format, **settings)

    @property
    def format(self) -> str:
        """The image format, by the extension."""
        return FORMAT_OF_EXTENSION[self.extension.rpartition(".")[2]]

    def as_json(self) -> list[Any]:
        """Its columns and settings as JSON types."""
        settings = [asdict(self.pixels)] if self.pixels else []
        return [*self.needs, *settings, *(["as it is stored"] if self.stored is not None else [])]

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that it is written from."""
        return (self.columns,) if isinstance(self.columns, str) else self.columns


@dataclass(frozen=True, slots=True)
class Members:
    """Members of exported samples: copied ones (None: all but ``left_out``), and from columns."""

    copied: frozenset[str] | None = None
    left_out: frozenset[str] = frozenset()
    from_columns: tuple[ColumnMember, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """These as JSON types."""
        return {
            "copied": "all" if self.copied is None else sorted(self.copied),
            "left_out": sorted(self.left_out),
            "made": {member.extension: member.as_json() for member in self.from_columns},
        }

    def keeps(self, extension: str) -> bool:
        """True if a sample's own member of this extension is copied."""
        if self.copied is not None:
            return extension in self.copied
        return extension not in self.left_out

    @property
    def merged(self) -> dict[str, ColumnMember]:
        """Extension → the member whose fields are set in the sample's own."""
        return {member.extension: member for member in self.from_columns if member.merges}

    @property
    def pixels(self) -> tuple[ColumnMember, ...]:
        """The members of encoded pixels."""
        return tuple(member for member in self.from_columns if member.pixels is not None)

    @property
    def stored(self) -> dict[str, tuple[ColumnMember, ...]]:
        """Column → the members that are its stored images."""
        by_column: dict[str, tuple[ColumnMember, ...]] = {}
        for member in self.from_columns:
            if member.stored is not None:
                column = member.needs[0]
                by_column[column] = (*by_column.get(column, ()), member)
        return by_column

    @property
    def main_pixels(self) -> ColumnMember | None:
        """The member of encoded pixels that replaces the sample's own image, if any."""
        return next((member for member in self.pixels if member.is_main), None)

    @property
    def copies_images(self) -> bool:
        """True if a sample's own image may be copied, judged by extensions."""
        return self.main_pixels is None and any(map(self.keeps, IMAGE_EXTENSIONS.split(";")))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that members are written from."""
        return tuple(dict.fromkeys(name for member in self.from_columns for name in member.needs))


def parse_members(
    members: str | Sequence[Any] | Mapping[str, Any],
    columns: Sequence[str],
    images: Mapping[str, ImageOrigin],
    references: Sequence[str],
) -> Members:
    """Parse ``members=``: ``"all"``, extensions, or a mapping of extension to columns.

    ``columns`` are the metadata columns of the frame, ``images`` those of pixels with their
    origins, ``references`` those whose stored images are written unchanged.
    """
    items: list[Any]
    if isinstance(members, Mapping):
        items = ["all", members]
    else:
        items = members.split(";") if isinstance(members, str) else list(members)
    if not items or not all(isinstance(item, (str, Mapping)) for item in items):
        raise ArgumentError(
            f"members={members!r}: pass 'all', a list of extensions such as ['jpg', 'txt'], a "
            "mapping of extension to column such as {'txt': 'caption'}, or a list of both"
        )
    names = [_extension(item) for item in items if isinstance(item, str)]
    from_columns: dict[str, ColumnMember] = {}
    left_out = set()
    for item in items:
        for key, value in item.items() if isinstance(item, Mapping) else ():
            extension = _extension(key)
            left_out.add(extension)
            if isinstance(value, str) and value in references:
                is_main = "." not in extension
                from_columns[extension] = ColumnMember(extension, value, is_main=is_main, stored="")
            elif value is not None:
                from_columns[extension] = _column_member(extension, value, columns, images)
    copied = None if "all" in names else frozenset(names) - left_out
    return Members(copied, frozenset(left_out), tuple(from_columns.values()))


def add_stored(members: Members, column: str, is_main: bool) -> Members:
    """Add the stored images of a column; one member per extension, which follows from the bytes."""
    stem = "" if is_main else f"{column}."
    candidates = (
        ColumnMember(_extension(f"{stem}{extension}"), column, is_main=is_main, stored=extension)
        for extension in STORED_EXTENSIONS
    )
    kept = tuple(member for member in candidates if members.keeps(member.extension))
    return replace(members, from_columns=(*members.from_columns, *kept))


#: The field of JSON, as a column, that tells which part of which picture an image is.
PART_FIELD = "json.part"


def with_part(members: Members) -> Members:
    """Add the field `PART_FIELD` to the JSON of each sample, unless it is left out or a column."""
    others = {member.extension: member for member in members.from_columns}
    own = others.pop("json", None)
    if not own.merges if own else "json" in members.left_out:
        return members
    made = ColumnMember("json", (*(own.needs if own else ()), PART_FIELD))
    return replace(members, from_columns=(*others.values(), made))


def member_bytes(table: pa.Table, member: ColumnMember) -> pa.Array:
    """The bytes of a member for each row of a table; null if the row has none.

    Strings are written as UTF-8, bytes as they are, numbers and booleans as in JSON (NaN and
    infinity as Python's), times in ISO 8601, lists and structs as JSON; lists of numbers in NumPy's
    format if the extension is ``npy``.
    """
    if not isinstance(member.columns, str):
        texts = [json_texts(table.column(name)) for name in member.columns]
        rows = zip(*texts, strict=True)
        return pa.array([object_of(row, member.fields) for row in rows], pa.large_binary())
    column = table.column(member.columns)
    if member.extension.rpartition(".")[2] == "npy":
        depth, value = nesting(column.type)
        if depth and (is_number(value) or pa.types.is_boolean(value)):
            return _as_npy(column, member)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    if is_text(column.type) or is_bytes(column.type):
        return column.cast(pa.large_binary()).combine_chunks()
    texts_of_rows = json_texts(column, is_json=False)
    encoded = [None if text is None else text.encode() for text in texts_of_rows]
    return pa.array(encoded, pa.large_binary())


def _column_member(
    extension: str, value: Any, columns: Sequence[str], images: Mapping[str, ImageOrigin]
) -> ColumnMember:
    if isinstance(value, Encode):
        if value.column not in images:
            raise ArgumentError(
                f"members= makes {extension!r} of {value}: the frame's columns of pixels are "
                f"{', '.join(map(repr, images)) or 'none'}"
            )
        return _pixel_member(extension, value, images[value.column])
    is_list = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    names = tuple(value) if is_list else value
    if not names or not isinstance(names, (str, tuple)):
        raise ArgumentError(
            f"members= makes {extension!r} of {value!r}: give the name of a column, a list of "
            "names for a JSON object of them, Encode(...) for the pixels of one, or None for no "
            "such member"
        )
    if isinstance(names, str) and names in images:
        return _pixel_member(extension, Encode(names), images[names])
    member = ColumnMember(extension, names)
    if len(set(member.fields)) < len(member.fields):
        raise ArgumentError(
            f"members= makes {extension!r} of {', '.join(member.needs)}, of which two are the same "
            "field: name each once"
        )
    missing = [name for name in member.needs if name not in columns]
    if missing:
        raise ArgumentError(
            f"members= makes {extension!r} of {missing[0]!r}, and the frame has no such metadata "
            f"column; it has {', '.join([*columns, *images])}"
        )
    return member


def _pixel_member(extension: str, encode: Encode, origin: ImageOrigin) -> ColumnMember:
    """A member of encoded pixels; the sample's own image if the extension has a single part."""
    column = encode.column
    format_ = FORMAT_OF_EXTENSION.get(extension.rpartition(".")[2])
    if format_ is None:
        raise ArgumentError(
            f"members= makes {extension!r} of the images in {column!r}: choose an extension "
            f"that ends with {', '.join(FORMAT_OF_EXTENSION)}, which says how they are encoded"
        )
    advice = f"members={{{origin.extension(column)!r}: {column!r}}}"
    if origin.is_exact and format_ != "png":
        raise ArgumentError(
            f"members= makes {extension!r} of {column!r}, and {format_} would change its "
            f"{'labels' if 'labels' in origin.modes else 'values'}: pass {advice}"
        )
    is_main = "." not in extension
    if is_main and origin.member == "other":
        if extension not in origin.extensions:
            raise ArgumentError(
                f"members= makes {extension!r} of {column!r}, which would take the place of the "
                f"sample's own image: pass {advice}"
            )
        is_main = False
    return ColumnMember(extension, column, encode, is_main)


def _extension(text: object) -> str:
    extension = text.strip().lstrip(".").lower() if isinstance(text, str) else ""
    if not extension or any(sign in extension for sign in ",;/") or not extension.isprintable():
        raise ArgumentError(
            f"members= names {text!r}, which is no extension of a member; of several, pass a "
            "list, ['jpg', 'txt'], or a text with semicolons, 'jpg;txt'"
        )
    return extension


def _as_npy(column: pa.ChunkedArray, member: ColumnMember) -> pa.Array:
    """Lists as files of ``numpy.save``, with one dimension per nesting level."""
    depth, value = nesting(column.type)
    dtype = np.dtype(value.to_pandas_dtype())
    files: list[bytes | None] = []
    for row in _rows(column):
        if row is None:
            files.append(None)
            continue
        try:
            array = np.array(row)
            if array.dtype == object:
                raise ValueError("a null")
        except ValueError:
            raise ArgumentError(
                f"members= makes {member.extension!r} of {member.columns!r}, which has lists that "
                "are no array: they have nulls, or differ in length. An extension other than npy "
                "makes JSON of them"
            ) from None
        array = array.astype(dtype).reshape(array.shape + (0,) * (depth - array.ndim))
        file = io.BytesIO()
        np.save(file, array)
        files.append(file.getvalue())
    return pa.array(files, pa.large_binary())


def _rows(column: pa.ChunkedArray) -> Iterable[Any]:
    """Rows of lists as Python lists, of arrays of one shape as arrays; None for null."""
    if tensor_type(column.type) is None:
        return column.to_pylist()
    rows = pandas_type(column.type).__from_arrow__(column)
    return (None if missing else row for row, missing in zip(rows, rows.isna(), strict=True))


class _Number(str):
    """The digits of a number: it is not parsed, since it may have any number of them."""


_DECODER = json.JSONDecoder(
    parse_int=_Number, parse_float=_Number, parse_constant=_Number, strict=False
)


def with_fields(own: bytes, made: bytes, fields: Sequence[tuple[str, ...]]) -> bytes:
    """A JSON object with some fields of another one, which are replaced or added."""
    try:
        value, other = (_DECODER.decode(content.decode("utf-8-sig")) for content in (own, made))
        if not isinstance(value, dict):
            raise ValueError("it is no object")
        for path in fields:
            set_field(value, path, _field(other, path))
        return _encoded(_json(value))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def object_of(values: Sequence[str | None], fields: Sequence[tuple[str, ...]]) -> bytes:
    """A JSON object of some fields, given the texts of their values; None for null."""
    made: dict[str, Any] = {}
    for text, path in zip(values, fields, strict=True):
        set_field(made, path, None if text is None else _DECODER.decode(text))
    return _encoded(_json(made))


def set_field(value: dict[str, Any], path: tuple[str, ...], new: Any) -> None:
    """Set a field of an object, in place."""
    whole = ".".join(path)
    below = value.get(path[0], {})
    if len(path) == 1 or whole in value or not isinstance(below, dict):
        value[whole] = new
    else:
        value[path[0]] = below
        set_field(below, path[1:], new)


def _field(value: dict[str, Any], path: tuple[str, ...]) -> Any:
    whole = ".".join(path)
    return value[whole] if whole in value else _field(value[path[0]], path[1:])


def _encoded(text: str) -> bytes:
    """UTF-8, with halves of surrogate pairs as escapes, which it has not."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text).encode()


def json_texts(column: pa.ChunkedArray, is_json: bool = True) -> list[str | None]:
    """The values of a column as JSON, each of which reads back as the same value; None for null.

    Decimals are numbers with all their digits, floats have the fewest that tell them apart,
    float16 all of them; NaN and infinity are null. Bytes are base64, times ISO 8601, maps lists
    of pairs.

    Parameters
    ----------
    column
        Of any type; null is None.
    is_json
        False for text outside of JSON: times without quotes, NaN and infinity as Python's.
    """
    # Through text, so that float32 0.1 becomes 0.1 and not 0.10000000149011612.
    with_text, plain = (_replaced(column.type, by) for by in (pa.string(), pa.float64()))
    if with_text != column.type:
        column = column.cast(with_text).cast(plain)
    encode = _json if is_json else _text
    return [None if value is None else encode(value) for value in column.to_pylist()]


def _replaced(type_: pa.DataType, float_: pa.DataType) -> pa.DataType:
    """A type with another one for float32, and with those of values for dictionaries."""
    if pa.types.is_float32(type_):
        return float_
    if type_ == pa.time64("ns"):  # Python's times have microseconds
        return pa.string()
    if pa.types.is_dictionary(type_):
        return _replaced(type_.value_type, float_)
    if isinstance(type_, pa.BaseExtensionType):
        return _replaced(type_.storage_type, float_)
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_replaced(field.type, float_)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_replaced(type_.key_type, float_), _replaced(type_.item_type, float_))
    if is_list(type_) or pa.types.is_fixed_size_list(type_):
        item = type_.value_field.with_type(_replaced(type_.value_type, float_))
        if pa.types.is_fixed_size_list(type_):
            return pa.list_(item, type_.list_size)
        return pa.list_(item) if pa.types.is_list(type_) else pa.large_list(item)
    return type_


_string = json.JSONEncoder(ensure_ascii=False).encode


def _json(value: object) -> str:
    """A value, as Arrow gives it, as JSON."""
    if value is None:
        return "null"
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, (bool, int, str)):
        return _string(value)
    if isinstance(value, (float, np.floating)):
        return str(value) if math.isfinite(value) else "null"
    if isinstance(value, dict):
        fields = (f"{_string(name)}: {_json(field)}" for name, field in value.items())
        return f"{{{', '.join(fields)}}}"
    if isinstance(value, (list, tuple)):  # pairs of maps are tuples
        return f"[{', '.join(map(_json, value))}]"
    if isinstance(value, bytes):
        return f'"{b64encode(value).decode()}"'
    if isinstance(value, Decimal):
        return f"{value:f}"
    return f'"{_text(value)}"'


def _text(value: object) -> str:
    """A value as text outside of JSON."""
    if isinstance(value, (date, time, timedelta)):
        return _iso(value)
    return str(value) if isinstance(value, (float, np.floating, str)) else _json(value)


def _iso(value: date | time | timedelta) -> str:
    """A time in ISO 8601."""
    if isinstance(value, timedelta):
        return str(pd.Timedelta(value).isoformat())
    # Few readers take offsets with seconds, which zones had until about 1900.
    if isinstance(value, datetime) and (value.utcoffset() or timedelta()) % timedelta(minutes=1):
        value = value.astimezone(UTC)
    return value.isoformat()
