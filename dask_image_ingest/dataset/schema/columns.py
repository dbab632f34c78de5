"""The schema of a collection: columns and types, inferred from the first shard or as asked for.

Also the image columns: their members, and how each is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from dask_image_ingest.arguments import is_utf8, list_of_names, shown
from dask_image_ingest.dataset.schema.coerce import arrow_type, parse_integer
from dask_image_ingest.decode import Augment, DecodeSpec, Interpolation, Mode, Resize
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import IMAGE
from dask_image_ingest.storage import LazyBytes
from dask_image_ingest.tar import INTEGERS, TEXTS, Sample, ShardIndex, read_member
from dask_image_ingest.typedefs import TypeLike

#: Columns of every collection before those of members: where an image is, and its header.
METADATA_COLUMNS: dict[str, pa.DataType] = {
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

#: Random region of an upright image, in pixels, and whether it is mirrored.
REGION: Final = pa.struct(
    [*((name, pa.int32()) for name in ("top", "left", "height", "width")), ("flipped", pa.bool_())]
)

#: Where a part lies in its picture: number of the page, and corner in pixels of the upright page.
PLACE: Final = ("page", "top", "left")

#: Columns of the size of an image, or a part.
EDGES: Final = ("height", "width")

#: Columns with values from an image's header.
HEADERS: Final = ("format", "height", "width", "channels")


def image_field(image: str, name: str) -> str:
    """The name of a column like ``height`` for an image column: that of ``image`` has no prefix."""
    return name if image == "image" else f"{image}.{name}"


def region_field(image: str) -> str:
    """The name of the column of type `REGION` for an image column."""
    return f"{image}.region"


def part_names(image: str, columns: Collection[Any], is_first: bool = True) -> tuple[str, ...]:
    """The columns that tell which part of its picture an image is: `PLACE`, height and width.

    Height and width of the first image of a read have no prefix, whatever its name.
    """
    edges = [image_field(image, edge) for edge in EDGES]
    if is_first and {*edges}.isdisjoint(columns) and {*EDGES} <= {*columns}:
        edges = [*EDGES]
    return (*(image_field(image, f"part.{name}") for name in PLACE), *edges)


def part_columns(columns: Collection[Any]) -> dict[str, tuple[str, ...]]:
    """Image column → its `part_names`, of the images that have them all among ``columns``."""
    ends = [name for name in columns if isinstance(name, str) and name.endswith("part.top")]
    images = [end.removesuffix("part.top").removesuffix(".") or "image" for end in ends]
    found = {image: part_names(image, columns) for image in images}
    return {image: names for image, names in found.items() if {*names} <= {*columns}}


# The most frequent extensions become columns: if keys contain dots, every member may have its own.
_MOST_INFERRED = 64

# Labels of the first shard that are parsed at most to infer that they are integers.
_SAMPLED_LABELS = 100

# Longest member, in bytes, that may be an integer label.
_LONGEST_LABEL = 4096


@dataclass(frozen=True, slots=True)
class MemberColumn:
    """One column made from a member of each sample.

    ``path`` is None for the member's whole content, or names the field of a JSON member.
    """

    column: str
    extension: str
    type: pa.DataType
    path: str | None = None


@dataclass(frozen=True, slots=True)
class FileColumn:
    """A column of the frame that comes from the column ``name`` of parquet files."""

    column: str
    name: str
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a collection, in order, with their Arrow types.

    ``inferred`` says that the extensions of the first shard became columns. Header columns have
    the name of their image column as a prefix, except those of the first of ``images``. Those in
    ``augmented`` have a column of random regions.
    """

    member_columns: tuple[MemberColumn, ...]
    inferred: bool = True
    sidecar: tuple[FileColumn, ...] = ()
    images: tuple[str, ...] = ("image",)
    augmented: tuple[str, ...] = field(default=(), kw_only=True)
    types: Mapping[str, pa.DataType] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        types = self._types()
        for image in self.augmented:
            types.setdefault(region_field(image), REGION)
        object.__setattr__(self, "types", types)

    def _types(self) -> dict[str, pa.DataType]:
        types = dict(METADATA_COLUMNS)
        types.update((member.column, member.type) for member in self.member_columns)
        types.update((column.column, column.type) for column in self.sidecar)
        for image in self.images[1:]:
            fields = {n: t for n, t in METADATA_COLUMNS.items() if not n.startswith("_")}
            types.update((image_field(image, name), type_) for name, type_ in fields.items())
        return types | dict.fromkeys(self.images, IMAGE)

    def field(self, image: str, name: str) -> str:
        """The name of a column like ``height`` for an image column."""
        return name if image == self.images[0] else image_field(image, name)

    @property
    def made(self) -> frozenset[str]:
        """The columns of errors and regions, made by a decode; without those that a sidecar has."""
        stored = {column.column for column in self.sidecar}
        errors = {self.field(image, "error") for image in self.images}
        return frozenset(errors.union(map(region_field, self.augmented)) - stored)

    @property
    def extensions(self) -> frozenset[str]:
        """The extensions of members that have a column here."""
        return frozenset(member.extension for member in self.member_columns)


@dataclass(frozen=True, slots=True)
class TableSchema(Schema):
    """The columns of a collection of parquet files, which count as ``sidecar``.

    ``order`` are the columns of the files, image columns included, by their names in the frame;
    ``metadata`` is the schema metadata of the first file.
    """

    order: tuple[str, ...] = ()
    metadata: Mapping[bytes, bytes] | None = None

    def _types(self) -> dict[str, pa.DataType]:
        types: dict[str, pa.DataType] = {"__key__": pa.string(), "__url__": pa.string()}
        types |= dict.fromkeys(self.order, IMAGE)
        types |= {column.column: column.type for column in self.sidecar}
        for image in self.images:
            for name in ("error", "nbytes", *HEADERS):
                types.setdefault(self.field(image, name), METADATA_COLUMNS[name])
        return types


def make_schema(
    index: ShardIndex,
    content: LazyBytes,
    *,
    images: Mapping[str, Sequence[str]],
    members: str | Mapping[str, TypeLike] = "infer",
    json_fields: Mapping[str, TypeLike] | None = None,
) -> Schema:
    """Decide the columns of a collection from its first shard.

    Parameters
    ----------
    index, content
        The first shard's samples and its bytes.
    images
        Image columns, and their member extensions in order of preference. Header columns of the
        first have no prefix.
    members
        ``"infer"``, or a mapping of member extension to column type.
    json_fields
        Fields of the ``json`` member that become columns ``json.<field>``, with their types.

    Raises
    ------
    ArgumentError
        For an unknown type, or two members of the same extension.
    """
    infer = isinstance(members, str) and members == "infer"
    types = _inferred(index, content, [*images.values()]) if infer else _parse_members(members)
    _, *others = images
    fields = _json_fields(json_fields)
    taken = {image_field(image, name) for image in others for name in ("", *METADATA_COLUMNS)}
    if clash := next((f for f in fields if f.column in {*taken, *others}), None):
        raise ArgumentError(
            f"json_fields= and image= both make a column {clash.column!r}: call the image column "
            "something else"
        )
    columns = _columns(types, {*taken, *others, *(member.column for member in fields)})
    whole = [MemberColumn(columns[e], e.lower(), type_) for e, type_ in types.items()]
    return Schema((*whole, *fields), infer, images=tuple(images))


def image_member(sample: Sample, extensions: Sequence[str]) -> str | None:
    """The extension of the member that is the sample's image; None without an image."""
    members = sample.members
    for extension in extensions:
        if extension in members:
            return extension
    return None


def parse_image_extensions(image: str | Iterable[Any]) -> tuple[str, ...]:
    """The argument ``image=``: extensions in order of preference, listed or joined by ``;``."""
    names = (
        image.split(";") if isinstance(image, str) else list_of_names("image", image, "extensions")
    )
    normalized = (name.strip().lstrip(".").lower() for name in names)
    extensions = tuple(dict.fromkeys(filter(None, normalized)))
    if not extensions:
        raise ArgumentError(
            f"image={shown(image)} names no member extension; pass for example image='jpg;png'"
        )
    return extensions


def _parse_members(members: object) -> dict[str, pa.DataType]:
    """The argument ``members=``: extension → type."""
    if not isinstance(members, Mapping) or not all(map(_is_name, members)):
        raise ArgumentError(
            f"members={shown(members)}: pass 'infer', or a mapping of member extensions to "
            "types such as {'txt': 'string'}"
        )
    types: dict[str, pa.DataType] = {}
    for name, type_ in members.items():
        extension = name.strip().lstrip(".")
        if not extension or extension in types:
            problem = "twice" if extension else "is no member extension"
            raise ArgumentError(f"members={shown(members)}: {name!r} {problem}")
        types[extension] = arrow_type(f"members[{name!r}]", type_)
    return types


def _json_fields(json_fields: object) -> list[MemberColumn]:
    fields = {} if json_fields is None else json_fields
    if not isinstance(fields, Mapping) or not all(map(_is_name, fields)):
        raise ArgumentError(
            f"json_fields={shown(json_fields)}: pass a mapping of field names to types, such as "
            "{'similarity': 'float32'}"
        )
    return [
        MemberColumn(f"json.{name}", "json", arrow_type(f"json_fields[{name!r}]", type_), path=name)
        for name, type_ in fields.items()
    ]


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and is_utf8(name)


def _inferred(
    index: ShardIndex, content: LazyBytes, images: Sequence[Sequence[str]]
) -> dict[str, pa.DataType]:
    """Extension → type of the members that are not images."""
    others = list(filter(None, index.not_preferred(*images)))
    counts = {extension: len(index.places(extension).rows) for extension in others}
    frequent = set(sorted(others, key=lambda extension: -counts[extension])[:_MOST_INFERRED])
    others = [extension for extension in others if extension in frequent]
    return {extension: _member_type(extension, index, content) for extension in others}


def _member_type(extension: str, index: ShardIndex, content: LazyBytes) -> pa.DataType:
    if extension in TEXTS:
        return pa.string()
    if extension not in INTEGERS:
        return pa.binary()
    for span in index.first_spans(extension, _SAMPLED_LABELS):
        if span[1] > _LONGEST_LABEL:
            return pa.string()
        try:
            label = parse_integer(bytes(read_member(content, index, span)))
        except ValueError:
            return pa.string()
        if not -(2**63) <= label < 2**63:
            return pa.string()
    return pa.int64()


def _columns(extensions: Iterable[str], taken: Set[str]) -> dict[str, str]:
    """Extension → column: its own name, prefixed by ``member.`` if that name is taken."""
    taken = {*METADATA_COLUMNS, "image", *taken}
    columns = {extension: extension for extension in extensions}
    for extension in [e for e in columns if e in taken]:
        while columns[extension] in taken or columns[extension] in columns:
            columns[extension] = f"member.{columns[extension]}"
        taken.add(columns[extension])
    return columns


@dataclass(frozen=True)
class ImageColumn:
    """An image column of a read: the member of each sample, and how it is decoded.

    For the argument ``image=`` of :func:`read_webdataset_images`, :func:`read_images` and
    :func:`read_parquet_images`.

    Parameters
    ----------
    image
        As for the read: member extensions in order of preference, or the column of parquet files.
    size, resize, interpolation, crop_from, augment, transform, mode
        As for the read; ``"same"`` as given to the read. Labels always take the nearest pixel. The
        read's ``transform`` does not apply to them: masks have their own, or none. Its ``augment``
        does.

    Examples
    --------
    >>> ImageColumn("seg.png", mode="labels").image
    'seg.png'
    """

    image: str | Sequence[str]
    _: KW_ONLY
    size: int | tuple[int, int] | Literal["same"] | None = "same"
    resize: Resize | Literal["same"] = "same"
    interpolation: Interpolation | Literal["same"] = "same"
    crop_from: int | Literal["same"] | None = "same"
    augment: Augment | Literal["same"] | None = "same"
    transform: Callable[..., Any] | Literal["same"] | None = "same"
    mode: Mode | Literal["same"] = "same"


#: The argument ``image=`` of a read.
ImageChoice: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str] | ImageColumn]


@dataclass(frozen=True, slots=True)
class ImageMember:
    """An image column of a read, with its arguments parsed.

    Attributes
    ----------
    column
        Name of the column.
    extensions
        Member extensions that are the image, in order of preference.
    decoding
        How it is decoded.
    """

    column: str
    extensions: tuple[str, ...]
    decoding: DecodeSpec

    def fields(self) -> Iterator[str]:
        """The header columns of this image column: ``mask.height`` and the like."""
        return (image_field(self.column, name) for name in METADATA_COLUMNS if name[0] != "_")


def augmented(images: Iterable[ImageMember]) -> tuple[str, ...]:
    """The image columns that show a random region, or are mirrored at random."""
    return tuple(member.column for member in images if member.decoding.is_placed_at_random)
