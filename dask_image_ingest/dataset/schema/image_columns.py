"""Several images of one sample: the members that become image columns, and how they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.dataset.schema.columns import (
    POINTER_COLUMNS,
    image_field,
    parse_image_extensions,
)
from dask_image_ingest.decode import DecodeSpec, Mode, Resize
from dask_image_ingest.errors import ArgumentError


@dataclass(frozen=True)
class ImageColumn:
    """An image column of a read: the member of each sample, and how it is decoded.

    For the argument ``images=`` of :func:`read_webdataset_images`.

    Parameters
    ----------
    extensions
        Member extensions that are the image, in order of preference, ``;`` between them.
    mode
        ``"RGB"``, ``"RGBA"``, ``"L"``, ``"labels"`` or ``"raw"``, as for
        :func:`read_webdataset_images`.
    size, resize, transform
        As for :func:`read_webdataset_images`; ``"same"`` as the read has them, and so does
        ``resize="nearest"`` of labels, which take the nearest pixel anyway. The ``transform`` of
        the read changes no labels: masks have their own, or none.

    Examples
    --------
    >>> ImageColumn("seg.png", mode="labels").extensions
    'seg.png'
    """

    extensions: str | Sequence[str]
    mode: Mode = "RGB"
    size: int | tuple[int, int] | Literal["same"] | None = "same"
    resize: Resize | Literal["same"] = "same"
    transform: Callable[..., Any] | Literal["same"] | None = "same"


@dataclass(frozen=True, slots=True)
class ImageMember:
    """An image column beside ``image``: which member it is, and how it is decoded.

    Attributes
    ----------
    column
        Its name.
    extensions
        Member extensions that are the image, in order of preference.
    decoding
        How it is decoded.
    """

    column: str
    extensions: tuple[str, ...]
    decoding: DecodeSpec

    def fields(self) -> Iterator[str]:
        """The columns of what is known of each image, as ``height`` and the like are of others."""
        return (image_field(self.column, name) for name in POINTER_COLUMNS if name[0] != "_")


def image_members(
    image: str | Sequence[str],
    images: Mapping[str, str | ImageColumn] | None,
    options: Mapping[str, Any],
    decoding: Callable[..., DecodeSpec],
    parse: Callable[[Any], tuple[str, ...]] = parse_image_extensions,
) -> tuple[tuple[str, ...], DecodeSpec, tuple[ImageMember, ...]]:
    """The arguments ``image=`` and ``images=``: extensions and decoding of ``image``, the others.

    Parameters
    ----------
    image, images
        The arguments.
    options
        ``size``, ``resize``, ``mode`` and ``transform`` of the read.
    decoding
        Makes a decoding of such options.
    parse
        Reads what names an image.
    """
    if images is None:
        return parse(image), decoding(**options), ()
    if not isinstance(images, Mapping) or "image" not in images:
        raise ArgumentError(
            f"images={shown(images)}: pass a mapping of column names to extensions or ImageColumn, "
            "of which one is 'image', such as {'image': 'jpg', 'mask': ImageColumn('seg.png', "
            "mode='labels')}"
        )
    found: dict[str, ImageMember] = {}
    for name, value in images.items():
        if not isinstance(name, str) or not name or not is_utf8(name) or name in POINTER_COLUMNS:
            raise ArgumentError(f"images=: {name!r} can't be the name of an image column")
        own = _own(name, value, options) if isinstance(value, ImageColumn) else {}
        extensions = value.extensions if isinstance(value, ImageColumn) else value
        made = decoding(**{**options, **own})
        found[name] = ImageMember(name, parse(extensions), made)
    first = found.pop("image")
    return first.extensions, first.decoding, tuple(found.values())


def _own(name: str, column: ImageColumn, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a column that are not those of the read."""
    own: dict[str, Any] = {"mode": column.mode}
    for option in ("size", "resize", "transform"):
        if (value := getattr(column, option)) != "same":
            own[option] = value
    if column.mode == "labels" and column.resize == "nearest":
        del own["resize"]  # in the shape of the photograph
    if own.get("size", options["size"]) is None and "resize" not in own:
        own["resize"] = "stretch"
    if column.mode == "labels" and "transform" not in own and options["transform"] is not None:
        raise ArgumentError(
            f"images=: transform= may mix the labels of {name!r}. Pass its own, which takes the "
            "nearest pixel, ImageColumn(..., mode='labels', transform=...): random numbers are the "
            "same for all images of a sample. Or transform=None to leave it as it is"
        )
    return own
