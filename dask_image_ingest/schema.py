"""Columns and their types: what a sample's members become, as the first shard tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.tar import Sample, Scan, read_member

#: Decoded pixels of one row: row-major ``height x width x channels``, with its own shape, so that a
#: row keeps its meaning through any filter, merge, shuffle or file.
IMAGE = pa.struct(
    [
        pa.field("data", pa.large_list(pa.field("item", pa.uint8(), nullable=False))),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("channels", pa.int32()),
    ]
)

#: The columns that every collection has before its components, in order.
POINTER_COLUMNS: dict[str, pa.DataType] = {
    "__key__": pa.string(),
    "__url__": pa.string(),
    "offset": pa.int64(),
    "nbytes": pa.int64(),
    "format": pa.string(),
    "height": pa.int32(),
    "width": pa.int32(),
    "channels": pa.int32(),
    "error": pa.string(),
}

#: Member extensions taken for the image, in order of preference.
IMAGE_EXTENSIONS = (
    "jpg;jpeg;png;webp;jfif;gif;bmp;tif;tiff;avif;heic;heif;jp2;j2k;ppm;pgm;pbm;pnm;ico;img"
)

# The extensions that webdataset itself decodes to text and to integers (autodecode.py, 1.0.2).
_TEXT = frozenset({"txt", "text", "transcript", "json", "jsn", "caption"})
_INTEGER = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})

# How many samples of the first shard have their labels looked at, to see that they are integers.
_LABELS_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Component:
    """One column made from a member of each sample.

    ``path`` is None for the member's whole content, or names the field of a JSON member.
    """

    column: str
    extension: str
    type: pa.DataType
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a collection, in order, with their Arrow types."""

    components: tuple[Component, ...]
    image_extensions: tuple[str, ...]
    types: Mapping[str, pa.DataType] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        types = dict(POINTER_COLUMNS)
        types.update((component.column, component.type) for component in self.components)
        types["image"] = IMAGE
        object.__setattr__(self, "types", types)

    def select(self, columns: Iterable[str]) -> tuple[Component, ...]:
        """The components behind ``columns``: what a task has to know, and no more."""
        wanted = set(columns)
        return tuple(component for component in self.components if component.column in wanted)

    @property
    def extensions(self) -> frozenset[str]:
        """Every member extension that this collection has a use for."""
        return frozenset(self.image_extensions) | {c.extension for c in self.components}


def make_schema(
    scanned: Scan,
    buffer,
    *,
    image: str | Sequence[str] = IMAGE_EXTENSIONS,
    components: str | Mapping[str, str | pa.DataType] = "infer",
    json_fields: Mapping[str, str | pa.DataType] | None = None,
) -> Schema:
    """Decide the columns of a collection from its first shard.

    Parameters
    ----------
    scanned, buffer
        The first shard's samples and its bytes.
    image
        Member extensions that are the image, in order of preference, ``;`` between them.
    components
        ``"infer"``, or a mapping of member extension to column type.
    json_fields
        Fields of the ``json`` member that become columns ``json.<field>``, with their types.

    Raises
    ------
    ArgumentError
        For an unknown type, an empty ``image``, or two components that want the same column.
    """
    extensions = image.split(";") if isinstance(image, str) else list(image)
    extensions = list(dict.fromkeys(e.strip().lstrip(".").lower() for e in extensions if e.strip()))
    if not extensions:
        raise ArgumentError("image= names no member extension; pass for example image='jpg;png'")
    if components == "infer":
        wanted = _infer(scanned, buffer, extensions)
    elif isinstance(components, Mapping):
        wanted = [Component(_column(e), e.lower(), arrow_type(t)) for e, t in components.items()]
    else:
        raise ArgumentError(
            f"components={components!r}: pass 'infer' or a mapping such as {{'txt': 'string'}}"
        )
    for name, type_ in (json_fields or {}).items():
        wanted.append(Component(f"json.{name}", "json", arrow_type(type_), path=name))
    columns = [component.column for component in wanted]
    for column in columns:
        if columns.count(column) > 1:
            raise ArgumentError(f"two components would both be the column {column!r}")
    return Schema(tuple(wanted), tuple(extensions))


def image_member(sample: Sample, extensions: Sequence[str]) -> str | None:
    """The extension of the member that is the sample's image, None where it has no image."""
    members = sample.members
    for extension in extensions:
        if extension in members:
            return extension
    return None


def arrow_type(type_: str | pa.DataType) -> pa.DataType:
    """An Arrow type from its name (``"float32"``, ``"list<float32>"``) or itself."""
    if isinstance(type_, pa.DataType):
        return type_
    try:
        if type_.startswith("list<") and type_.endswith(">"):
            return pa.list_(arrow_type(type_[5:-1]))
        return pa.type_for_alias(type_)
    except (ValueError, AttributeError):
        raise ArgumentError(
            f"{type_!r} is no column type; pass for example 'string', 'int64', 'float32', 'bool', "
            "'binary', 'list<float32>' or a pyarrow type"
        ) from None


def _infer(scanned: Scan, buffer, extensions: list[str]) -> list[Component]:
    seen: dict[str, None] = {}
    for sample in scanned.samples:
        used = image_member(sample, extensions)
        for extension in sample.members:
            if extension != used:
                seen[extension] = None
    found = [extension for extension in seen if extension]
    return [Component(_column(e), e, _member_type(e, scanned, buffer)) for e in found]


def _member_type(extension: str, scanned: Scan, buffer) -> pa.DataType:
    if extension in _TEXT:
        return pa.string()
    if extension not in _INTEGER:
        return pa.binary()
    labelled = (s for s in scanned.samples if extension in s.members)
    for _, sample in zip(range(_LABELS_LOOKED_AT), labelled, strict=False):
        try:
            int(bytes(read_member(buffer, scanned, sample.members[extension])))
        except ValueError:
            return pa.string()
    return pa.int64()


def _column(extension: str) -> str:
    # A member such as ``a.width`` must not take the place of what the header says.
    reserved = extension in POINTER_COLUMNS or extension == "image"
    return f"member.{extension}" if reserved else extension
