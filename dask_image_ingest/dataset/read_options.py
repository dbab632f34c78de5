"""Options of a read that every task gets, and checks of arguments that all reads share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dask_image_ingest.arguments import (
    check_choice,
    check_flag,
    is_utf8,
    number_of_bytes,
    shown,
)
from dask_image_ingest.dataset.schema.annotations import Annotations
from dask_image_ingest.dataset.schema.columns import (
    METADATA_COLUMNS,
    ImageChoice,
    ImageColumn,
    ImageMember,
    parse_image_extensions,
)
from dask_image_ingest.decode import DecodeSpec, Mode, make_decode_spec
from dask_image_ingest.errors import ArgumentError, warn_user
from dask_image_ingest.frames import Backend, BackendName, choose_backend, get_backend, gpus
from dask_image_ingest.tar import LARGEST_VALUE, MAX_MEMBER_BYTES

ErrorPolicy: TypeAlias = Literal["null", "raise", "drop"]
ShardErrorPolicy: TypeAlias = Literal["raise", "drop"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading and decoding shards; small, because each task carries them.

    Attributes
    ----------
    images
        The image columns. Header columns of the first have no prefix.
    errors, shard_errors
        What to do with an image that can't be decoded, and with a shard that can't be read.
    backend
        The name of the dataframe library.
    storage_options
        For the fsspec filesystem of remote shards.
    needs_sidecars
        Whether a sidecar that is missing now, or that no sample can be joined to, is an error.
    max_member_bytes
        Larger members, other than the image, are null.
    is_table
        Whether the shards are parquet files, whose columns are the extensions of ``images``.
    root, classes
        The common root of image files, None for shards; and its folders that are classes.
    annotations
        Columns of boxes and points of the first image column.
    """

    images: tuple[ImageMember, ...]
    errors: ErrorPolicy = "null"
    shard_errors: ShardErrorPolicy = "raise"
    backend: BackendName = "pandas"
    storage_options: dict[str, Any] | None = None
    needs_sidecars: bool = False
    max_member_bytes: int = MAX_MEMBER_BYTES
    is_table: bool = False
    root: str | None = None
    classes: tuple[str, ...] | None = None
    annotations: Annotations | None = None


#: Warning of a process without a GPU that builds a cuDF collection.
NO_GPU_HERE = (
    "this process has no GPU: the collection is made for workers that have one. Columns can be "
    "chosen, and images decoded and mapped in batches; a predicate such as ddf.width > 512 would "
    "ask cuDF here, so pass filters= instead. For all else, to_parquet() and results included, "
    "go on with ddf.to_backend('pandas')"
)


def checked_backend(backend: str | None, errors: object, decode: object) -> Backend:
    """Check arguments that all reads share, and choose the backend.

    Raises
    ------
    ArgumentError
    MissingDependencyError
        If the backend's library is not installed.
    """
    chosen = get_backend(choose_backend(backend))
    if chosen.device == "gpu" and not gpus():
        warn_user(NO_GPU_HERE)
    check_choice("errors", errors, ("null", "raise", "drop"))
    check_flag("decode", decode)
    return chosen


def parse_images(
    image: ImageChoice,
    parse: Callable[[Any], tuple[str, ...]] = parse_image_extensions,
    *,
    errors: ErrorPolicy,
    decode: bool,
    **options: Any,
) -> tuple[ImageMember, ...]:
    """Parse ``image=`` with the options of decodes that a read has.

    Parameters
    ----------
    image
        The argument.
    parse
        Parses the extensions (or the parquet column) of one image.
    errors, decode
        The arguments. Options of a decode together with ``decode=False`` are refused.
    **options
        Those of `make_decode_spec`.
    """
    images = _image_members(image, options, parse)
    if decode:
        _warn_of_masks(image, options["mode"])
    else:
        for member in images:
            _refuse_decoding(member.decoding, errors)
    return images


def _image_members(
    image: ImageChoice,
    options: Mapping[str, Any],
    parse: Callable[[Any], tuple[str, ...]],
) -> tuple[ImageMember, ...]:
    if not isinstance(image, Mapping):
        return (ImageMember("image", parse(image), make_decode_spec(**options)),)
    if "image" not in image:
        raise ArgumentError(
            f"image={shown(image)}: one of the columns of a mapping is 'image', as in "
            "{'image': 'jpg', 'mask': ImageColumn('seg.png', mode='labels')}"
        )
    members: list[ImageMember] = []
    for name, value in {"image": image["image"], **image}.items():
        if not isinstance(name, str) or not name or not is_utf8(name) or name in METADATA_COLUMNS:
            raise ArgumentError(f"image=: {name!r} can't be the name of an image column")
        own = _own_options(name, value, options) if isinstance(value, ImageColumn) else {}
        extensions = parse(value.image if isinstance(value, ImageColumn) else value)
        # Columns of one member are views of it, each of which draws for itself.
        view = sum(not {*extensions}.isdisjoint(member.extensions) for member in members)
        decoding = make_decode_spec(**{**options, **own, "view": view})
        members.append(ImageMember(name, extensions, decoding))
    return tuple(members)


# Options of a read that a column may have of its own.
_OWN = ("size", "resize", "interpolation", "crop_from", "augment", "transform", "mode")


def _own_options(name: str, column: ImageColumn, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a column that override those of the read."""
    own: dict[str, Any] = {}
    for option in _OWN:
        if (value := getattr(column, option)) != "same":
            own[option] = value
    if own.get("size", options["size"]) is None:
        own = {"resize": "stretch", **own}
    if own.get("resize", "crop") != "crop":
        own = {"crop_from": None, **own}
    if column.mode == "labels" and "transform" not in own and options["transform"] is not None:
        raise ArgumentError(
            f"image=: transform= may mix the labels of {name!r}. Pass its own, which takes the "
            "nearest pixel, ImageColumn(..., mode='labels', transform=...): random numbers are the "
            "same for all images of a sample. Or transform=None to leave it as it is"
        )
    return own


def _refuse_decoding(decoding: DecodeSpec, errors: ErrorPolicy) -> None:
    """Raise `ArgumentError` for options of a decode together with ``decode=False``."""
    given = {
        "size": decoding.size is not None,
        "interpolation": decoding.interpolation != "bilinear",
        "mode": decoding.mode != "RGB",
        "augment": decoding.is_augmented,
        "transform": decoding.transform is not None,
        "errors": errors != "null",
        "scaled_decode": decoding.scaled,
    }
    for name in filter(given.__getitem__, given):
        raise ArgumentError(
            f"decode=False makes no pixels, and {name}= says how: pass it to decode_images()"
        )


# Words in the names of columns and members that hold masks.
_MASKS = {"mask", "masks", "seg", "segmentation", "labels"}


def _warn_of_masks(image: ImageChoice, mode: Mode) -> None:
    """Warn of columns that by their names are masks, and would be decoded as photographs.

    Not if a mode was chosen, for all images or for the column.
    """
    if not isinstance(image, Mapping) or mode != "RGB":
        return
    for name, value in image.items():
        chosen = value.mode if isinstance(value, ImageColumn) else "same"
        members = value.image if isinstance(value, ImageColumn) else value
        texts = [name, *([members] if isinstance(members, str) else members)]
        words = {word for text in texts for word in re.split("[^a-z]+", text.lower())}
        if name != "image" and chosen == "same" and words & _MASKS:
            warn_user(
                f"the image column {name!r} is decoded as RGB, so that labels become colours, and "
                f"a resize mixes them: if it is a mask, pass ImageColumn({members!r}, "
                "mode='labels'); if not, mode='RGB'"
            )


def parse_max_member_bytes(value: object) -> int:
    """The argument ``max_member_bytes=``."""
    if value is None:
        return LARGEST_VALUE
    nbytes = number_of_bytes(value)
    if nbytes is None:
        raise ArgumentError(
            f"max_member_bytes={shown(value)}: pass bytes, such as '1 GiB', or None for as many as "
            "a column can hold"
        )
    return min(nbytes, LARGEST_VALUE)
