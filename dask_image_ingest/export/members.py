"""Members of exported samples: copied ones, and ones made of columns."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import check_choice, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.image_origin import FORMATS, ImageOrigin
from dask_image_ingest.export.stored_images import STORED_EXTENSIONS
from dask_image_ingest.frames import is_bytes, is_list, is_number, is_text
from dask_image_ingest.ops import encoded_images
from dask_image_ingest.tar import IMAGE_EXTENSIONS


@dataclass(frozen=True)
class Encode:
    """Encoder settings of a member: ``members={"jpg": Encode("image", quality=90)}``.

    JPEG is baseline, without EXIF or a colour profile. PNG, and WebP of other than three channels,
    are lossless and have no settings.

    Parameters
    ----------
    column
        The image column whose pixels are encoded.
    quality
        Of JPEG and WebP: 1 to 100, as libjpeg and libwebp count.
    subsampling
        Of the colours of a JPEG: ``"420"``, ``"422"`` or ``"444"``.

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
class Made:
    """A member that is made of columns.

    Attributes
    ----------
    columns
        One name for a member that is the column's value; a tuple for a JSON object of several.
    pixels
        How the pixels of the column are encoded; None for a member of other values.
    is_picture
        Whether it takes the place of the sample's own image.
    stored
        For the stored images of a column, by its references: the extension of those that become
        this member, or "" for all.
    """

    extension: str
    columns: str | tuple[str, ...]
    pixels: Encode | None = None
    is_picture: bool = False
    stored: str | None = None

    @property
    def format(self) -> str:
        """The format of encoded pixels."""
        return FORMATS[self.extension.rpartition(".")[2]]

    def encode(self, frame: Any) -> Any:
        """The pixels of the column as a series of files."""
        how = self.pixels or Encode(str(self.columns))
        settings: dict[str, Any] = {"quality": how.quality}
        if self.format == "jpeg":
            settings["subsampling"] = ":".join(how.subsampling)
        return encoded_images(frame, how.column, self.format, **settings)

    def described(self) -> list[Any]:
        """Its columns and settings, in JSON."""
        settings = [asdict(self.pixels)] if self.pixels else []
        return [*self.needs, *settings, *(["as it is stored"] if self.stored is not None else [])]

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that it is made of."""
        return (self.columns,) if isinstance(self.columns, str) else self.columns


@dataclass(frozen=True, slots=True)
class Members:
    """Members of a sample: copied ones (None: all but ``left_out``), and made ones."""

    copied: frozenset[str] | None = None
    left_out: frozenset[str] = frozenset()
    made: tuple[Made, ...] = ()

    def keeps(self, extension: str) -> bool:
        """True if a sample's own member is copied."""
        if self.copied is not None:
            return extension in self.copied
        return extension not in self.left_out

    @property
    def pixels(self) -> tuple[Made, ...]:
        """The members that are made of pixels."""
        return tuple(made for made in self.made if made.pixels is not None)

    @property
    def stored(self) -> dict[str, tuple[Made, ...]]:
        """The members that are stored images, by their column."""
        found: dict[str, tuple[Made, ...]] = {}
        for made in self.made:
            if made.stored is not None:
                found[made.needs[0]] = (*found.get(made.needs[0], ()), made)
        return found

    @property
    def picture(self) -> Made | None:
        """The member of pixels that takes the place of a sample's own image; None if none does."""
        return next((made for made in self.pixels if made.is_picture), None)

    @property
    def copies_images(self) -> bool:
        """True if a sample's own image may be copied, judged by extensions."""
        return self.picture is None and any(map(self.keeps, IMAGE_EXTENSIONS.split(";")))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that members are made of."""
        return tuple(dict.fromkeys(name for made in self.made for name in made.needs))


def make_members(
    members: Any,
    columns: Sequence[str],
    images: Mapping[str, ImageOrigin],
    references: Sequence[str] = (),
) -> Members:
    """Read ``members=``: ``"all"``, extensions, or a mapping of extension to columns.

    Parameters
    ----------
    columns
        The metadata columns of the frame.
    images
        Its columns of pixels, with their origins.
    references
        Its columns of references, whose images are written as they are stored.

    Raises
    ------
    ArgumentError
        For another form, an unknown column, an extension that is none; for pixels that the
        extension's format would change, or that would take the place of another image.
    """
    if isinstance(members, Mapping):
        items: list[Any] = ["all", members]
    elif isinstance(members, str):
        items = members.split(";")
    elif isinstance(members, Sequence):
        items = list(members)
    else:
        raise ArgumentError(_form(members))
    names = [_extension(item) for item in items if isinstance(item, str)]
    if not all(isinstance(item, (str, Mapping)) for item in items) or not items:
        raise ArgumentError(_form(members))
    made: dict[str, Made] = {}
    left_out = set()
    for item in items:
        if isinstance(item, str):
            continue
        for key, value in item.items():
            extension = _extension(key)
            left_out.add(extension)
            if value is not None:
                is_stored = isinstance(value, str) and value in references
                made[extension] = (
                    Made(extension, value, is_picture="." not in extension, stored="")
                    if is_stored
                    else _made(extension, value, columns, images)
                )
    copied = None if "all" in names else frozenset(names) - left_out
    return Members(copied, frozenset(left_out), tuple(made.values()))


def add_stored(members: Members, column: str, is_picture: bool) -> Members:
    """Members with the stored images of a column, whose extension follows from their contents."""
    stem = "" if is_picture else f"{column}."
    made = (
        Made(_extension(f"{stem}{extension}"), column, is_picture=is_picture, stored=extension)
        for extension in STORED_EXTENSIONS
    )
    kept = tuple(each for each in made if members.keeps(each.extension))
    return replace(members, made=(*members.made, *kept))


def member_bytes(table: pa.Table, made: Made) -> pa.Array:
    """The bytes of a member for each row, null where the row has none.

    Strings become UTF-8, bytes stay as they are, numbers and truth values are written as JSON
    writes them, times in ISO 8601, and lists and structs as JSON; lists of numbers as files of
    NumPy, where the extension is ``npy``.

    Raises
    ------
    ArgumentError
        For lists that are no arrays.
    """
    if not isinstance(made.columns, str):
        columns = {name: _widened(table.column(name)) for name in made.columns}
        rows = pa.table(columns).to_pylist()
        return pa.array([_as_json(row).encode() for row in rows], pa.large_binary())
    if made.extension.rpartition(".")[2] == "npy" and _is_array(table.column(made.columns).type):
        return _saved(table.column(made.columns), made)
    column = _widened(table.column(made.columns))
    type_ = column.type
    if is_text(type_) or is_bytes(type_):
        return _one(column.cast(pa.large_binary()))
    if pa.types.is_integer(type_):
        return _one(column.cast(pa.large_string()).cast(pa.large_binary()))
    encoded = [None if value is None else _as_text(value) for value in column.to_pylist()]
    return pa.array(encoded, pa.large_binary())


def _made(
    extension: str, value: Any, columns: Sequence[str], images: Mapping[str, ImageOrigin]
) -> Made:
    if isinstance(value, Encode):
        if value.column not in images:
            raise ArgumentError(
                f"members= makes {extension!r} of {value}: the frame's columns of pixels are "
                f"{', '.join(map(repr, images)) or 'none'}"
            )
        return _made_of_pixels(extension, value, images[value.column])
    wanted = value if isinstance(value, str) else tuple(value) if _is_list(value) else None
    if not wanted:
        raise ArgumentError(
            f"members= makes {extension!r} of {value!r}: give the name of a column, a list of "
            "names for a JSON object of them, Encode(...) for the pixels of one, or None for no "
            "such member"
        )
    if isinstance(wanted, str) and wanted in images:
        return _made_of_pixels(extension, Encode(wanted), images[wanted])
    made = Made(extension, wanted)
    missing = [name for name in made.needs if name not in columns]
    if missing:
        raise ArgumentError(
            f"members= makes {extension!r} of {missing[0]!r}, and the frame has no such metadata "
            f"column; it has {', '.join([*columns, *images])}"
        )
    return made


def _made_of_pixels(extension: str, how: Encode, origin: ImageOrigin) -> Made:
    """A member of encoded pixels. One part of an extension is the sample's image, two another."""
    column = how.column
    format_ = FORMATS.get(extension.rpartition(".")[2])
    if format_ is None:
        raise ArgumentError(
            f"members= makes {extension!r} of the images in {column!r}: choose an extension "
            f"that ends with {', '.join(FORMATS)}, which says how they are encoded"
        )
    instead = f"members={{{origin.extension(column)!r}: {column!r}}}"
    if origin.is_exact and format_ != "png":
        raise ArgumentError(
            f"members= makes {extension!r} of {column!r}, and {format_} would change its "
            f"{'labels' if 'labels' in origin.modes else 'values'}: pass {instead}"
        )
    is_picture = "." not in extension
    if is_picture and origin.member == "other":
        if extension not in origin.extensions:
            raise ArgumentError(
                f"members= makes {extension!r} of {column!r}, which would take the place of the "
                f"sample's own image: pass {instead}"
            )
        is_picture = False
    return Made(extension, column, how, is_picture)


def _extension(text: Any) -> str:
    extension = text.strip().lstrip(".").lower() if isinstance(text, str) else ""
    if "," in extension or ";" in extension:
        raise ArgumentError(
            f"members= names {text!r}, which is more than one extension: pass a list, ['jpg', "
            "'txt'], or a text with semicolons, 'jpg;txt'; on the command line --members jpg,txt"
        )
    if not extension or "/" in extension or not extension.isprintable():
        raise ArgumentError(f"members= names {text!r}, which is no extension of a member")
    return extension


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _widened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of the values that are written: small floats with no more digits than they have."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    as_text, as_double = _wider(column.type)
    return column if as_text == column.type else column.cast(as_text).cast(as_double)


def _wider(type_: pa.DataType) -> tuple[pa.DataType, pa.DataType]:
    """A type with text in the place of small floats, and with doubles there; in lists as well."""
    if pa.types.is_float32(type_) or pa.types.is_float16(type_):
        return pa.string(), pa.float64()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        make = pa.list_ if pa.types.is_list(type_) else pa.large_list
    elif pa.types.is_fixed_size_list(type_):
        make = partial(pa.list_, list_size=type_.list_size)
    else:
        return type_, type_
    text, double = _wider(type_.value_type)
    return (type_, type_) if text == type_.value_type else (make(text), make(double))


def _is_array(type_: pa.DataType) -> bool:
    """True for lists, also of lists, of numbers or truth values."""
    depth, value = _depth(type_)
    return depth > 0 and (is_number(value) or pa.types.is_boolean(value))


def _depth(type_: pa.DataType) -> tuple[int, pa.DataType]:
    depth = 0
    while is_list(type_) or pa.types.is_fixed_size_list(type_):
        depth, type_ = depth + 1, type_.value_type
    return depth, type_


def _saved(column: pa.ChunkedArray, made: Made) -> pa.Array:
    """Lists as files of ``numpy.save``, with as many dimensions as there are lists."""
    depth, value = _depth(column.type)
    dtype = np.dtype(value.to_pandas_dtype())
    files: list[bytes | None] = []
    for row in column.to_pylist():
        if row is None:
            files.append(None)
            continue
        try:
            array = np.array(row)
            if array.dtype == object:
                raise ValueError("a null")
        except ValueError:
            raise ArgumentError(
                f"members= makes {made.extension!r} of {made.columns!r}, which has lists that are "
                "no array: they have nulls, or differ in length. An extension other than npy makes "
                "JSON of them"
            ) from None
        array = array.astype(dtype).reshape(array.shape + (0,) * (depth - array.ndim))
        file = io.BytesIO()
        np.save(file, array)
        files.append(file.getvalue())
    return pa.array(files, pa.large_binary())


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _as_text(value: Any) -> bytes:
    if isinstance(value, (date, time)):
        return value.isoformat().encode()
    if isinstance(value, timedelta):
        return str(_to_json(value)).encode()
    return (str(value) if isinstance(value, (float, Decimal)) else _as_json(value)).encode()


def _as_json(value: Any) -> str:
    return json.dumps(_to_json(value), ensure_ascii=False, allow_nan=False)


def _to_json(value: Any) -> Any:
    """Convert a value to JSON's types: null for NaN, base64 for bytes, ISO 8601 for times."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return pd.Timedelta(value).isoformat()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _form(members: Any) -> str:
    return (
        f"members={members!r}: pass 'all', a list of extensions such as ['jpg', 'txt'], a mapping "
        "of extension to column such as {'txt': 'caption'}, or a list of both"
    )
