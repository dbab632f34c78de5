"""Members of exported samples: copied from the source, or written from columns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import check_choice, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.json_fields import json_texts, with_field
from dask_image_ingest.export.stored_images import FORMATS, STORED_EXTENSIONS, ImageOrigin
from dask_image_ingest.frames import (
    is_bytes,
    is_number,
    is_text,
    nesting,
    pandas_type,
    tensor_type,
)
from dask_image_ingest.ops import encoded_images
from dask_image_ingest.tar import IMAGE_EXTENSIONS


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
    """A member written from columns.

    Attributes
    ----------
    columns
        A name, for a member that is the column's value; a tuple, for a JSON object of several.
    pixels
        Encoder settings if the column has pixels, else None.
    is_main
        Whether it replaces the sample's own image.
    stored
        If the stored images of a column are written: the extension of those that become this
        member, "" for all. None for other members.
    """

    extension: str
    columns: str | tuple[str, ...]
    pixels: Encode | None = None
    is_main: bool = False
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

    @property
    def format(self) -> str:
        """The image format, by the extension."""
        return FORMATS[self.extension.rpartition(".")[2]]

    def encode(self, frame: Any) -> Any:
        """Encode the pixels of the column; a series of files."""
        assert self.pixels is not None
        settings: dict[str, Any] = {"quality": self.pixels.quality}
        if self.format == "jpeg":
            settings["subsampling"] = ":".join(self.pixels.subsampling)
        return encoded_images(frame, self.pixels.column, self.format, **settings)

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
    members: Any,
    columns: Sequence[str],
    images: Mapping[str, ImageOrigin],
    references: Sequence[str],
) -> Members:
    """Parse ``members=``: ``"all"``, extensions, or a mapping of extension to columns.

    Parameters
    ----------
    columns
        The metadata columns of the frame.
    images
        Its columns of pixels, with their origins.
    references
        Its columns of references, whose stored images are written unchanged.

    Raises
    ------
    ArgumentError
        For another form, an unknown column, or an invalid extension; for labels or raw values in a
        lossy format; for pixels that would replace an image they don't come from.
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
    from_columns: dict[str, ColumnMember] = {}
    left_out = set()
    for item in items:
        if isinstance(item, str):
            continue
        for key, value in item.items():
            extension = _extension(key)
            left_out.add(extension)
            if value is not None:
                is_stored = isinstance(value, str) and value in references
                from_columns[extension] = (
                    ColumnMember(extension, value, is_main="." not in extension, stored="")
                    if is_stored
                    else _column_member(extension, value, columns, images)
                )
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


def member_bytes(table: pa.Table, member: ColumnMember) -> pa.Array:
    """The bytes of a member for each row of a table; null if the row has none.

    Strings are written as UTF-8, bytes as they are, numbers and booleans as in JSON (NaN and
    infinity as Python's), times in ISO 8601, lists and structs as JSON; lists of numbers in NumPy's
    format if the extension is ``npy``.

    Raises
    ------
    ArgumentError
        For ``npy`` of lists with nulls or of unequal lengths.
    """
    if not isinstance(member.columns, str):
        texts = [json_texts(table.column(name)) for name in member.columns]
        rows = zip(*texts, strict=True)
        return pa.array([_object(row, member.fields) for row in rows], pa.large_binary())
    column = table.column(member.columns)
    if member.extension.rpartition(".")[2] == "npy" and _is_array(column.type):
        return _as_npy(column, member)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    type_ = column.type
    if is_text(type_) or is_bytes(type_):
        return column.cast(pa.large_binary()).combine_chunks()
    if pa.types.is_integer(type_):
        return column.cast(pa.large_string()).cast(pa.large_binary()).combine_chunks()
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
    names = value if isinstance(value, str) else tuple(value) if _is_list(value) else None
    if not names:
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
    format_ = FORMATS.get(extension.rpartition(".")[2])
    if format_ is None:
        raise ArgumentError(
            f"members= makes {extension!r} of the images in {column!r}: choose an extension "
            f"that ends with {', '.join(FORMATS)}, which says how they are encoded"
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


def _is_array(type_: pa.DataType) -> bool:
    """True for (nested) lists of numbers or booleans."""
    depth, value = nesting(type_)
    return depth > 0 and (is_number(value) or pa.types.is_boolean(value))


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


def _object(values: Iterable[str | None], fields: Sequence[tuple[str, ...]]) -> bytes:
    """A JSON object of some fields."""
    text = "{}"
    for value, path in zip(values, fields, strict=True):
        text = with_field(text, path, "null" if value is None else value)
    return text.encode()


def _form(members: Any) -> str:
    return (
        f"members={members!r}: pass 'all', a list of extensions such as ['jpg', 'txt'], a mapping "
        "of extension to column such as {'txt': 'caption'}, or a list of both"
    )
