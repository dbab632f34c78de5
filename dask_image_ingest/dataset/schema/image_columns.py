"""Several image columns per sample: the member of each, and how it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.dataset.schema.columns import (
    METADATA_COLUMNS,
    image_field,
    parse_image_extensions,
)
from dask_image_ingest.decode import DecodeSpec, Mode, Resize
from dask_image_ingest.errors import ArgumentError


@dataclass(frozen=True)
class ImageColumn:
    """An image column of a read: the member of each sample, and how it is decoded.

    For the argument ``image=`` of :func:`read_webdataset_images`, :func:`read_images` and
    :func:`read_parquet_images`.

    Parameters
    ----------
    image
        As for the read: member extensions in order of preference, or the column of parquet files.
    size, resize, transform, mode
        As for the read; ``"same"`` as given to the read. For labels, which always take the nearest
        pixel, ``resize="nearest"`` means the same. The read's ``transform`` does not apply to
        labels: masks have their own, or none.

    Examples
    --------
    >>> ImageColumn("seg.png", mode="labels").image
    'seg.png'
    """

    image: str | Sequence[str]
    _: KW_ONLY
    size: int | tuple[int, int] | Literal["same"] | None = "same"
    resize: Resize | Literal["same"] = "same"
    transform: Callable[..., Any] | Literal["same"] | None = "same"
    mode: Mode | Literal["same"] = "same"


#: The argument ``image=`` of a read.
ImageChoice: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str] | ImageColumn]


@dataclass(frozen=True, slots=True)
class ImageMember:
    """An image column other than the first, with its arguments parsed.

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


def image_members(
    image: ImageChoice,
    options: Mapping[str, Any],
    decoding: Callable[..., DecodeSpec],
    parse: Callable[[Any], tuple[str, ...]] = parse_image_extensions,
) -> tuple[tuple[str, ...], DecodeSpec, tuple[ImageMember, ...]]:
    """Parse ``image=``: extensions and decoding of the first image, and the other images.

    Parameters
    ----------
    image
        The argument.
    options
        ``size``, ``resize``, ``mode`` and ``transform`` of the read.
    decoding
        Makes a `DecodeSpec` from such options.
    parse
        Parses the extensions (or the parquet column) of one image.
    """
    if not isinstance(image, Mapping):
        return parse(image), decoding(**options), ()
    if "image" not in image:
        raise ArgumentError(
            f"image={shown(image)}: one of the columns of a mapping is 'image', as in "
            "{'image': 'jpg', 'mask': ImageColumn('seg.png', mode='labels')}"
        )
    members: dict[str, ImageMember] = {}
    for name, value in image.items():
        if not isinstance(name, str) or not name or not is_utf8(name) or name in METADATA_COLUMNS:
            raise ArgumentError(f"image=: {name!r} can't be the name of an image column")
        own = _own_options(name, value, options) if isinstance(value, ImageColumn) else {}
        extensions = value.image if isinstance(value, ImageColumn) else value
        members[name] = ImageMember(name, parse(extensions), decoding(**{**options, **own}))
    first = members.pop("image")
    return first.extensions, first.decoding, tuple(members.values())


def _own_options(name: str, column: ImageColumn, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a column that override those of the read."""
    own: dict[str, Any] = {}
    for option in ("size", "resize", "transform", "mode"):
        if (value := getattr(column, option)) != "same":
            own[option] = value
    if column.mode == "labels" and column.resize == "nearest":
        # Labels take the nearest pixel anyway; the read's resize keeps them aligned with images.
        del own["resize"]
    if own.get("size", options["size"]) is None and "resize" not in own:
        own["resize"] = "stretch"
    if column.mode == "labels" and "transform" not in own and options["transform"] is not None:
        raise ArgumentError(
            f"image=: transform= may mix the labels of {name!r}. Pass its own, which takes the "
            "nearest pixel, ImageColumn(..., mode='labels', transform=...): random numbers are the "
            "same for all images of a sample. Or transform=None to leave it as it is"
        )
    return own
