"""Origins of image columns: which stored images they are, and what changed their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import (
    Decode,
    KeepsResults,
    ReadImageFiles,
    ReadWebDataset,
    field_of,
    is_pointed,
    references_of,
    value_sources,
)
from dask_image_ingest.decode import DecodeSpec, Mode
from dask_image_ingest.export.query import operation_name
from dask_image_ingest.frames import backend_of

#: How pixels are encoded, by the last part of a member's extension.
FORMATS: Final = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "webp": "webp"}


@dataclass(frozen=True)
class ImageOrigin:
    """Origin of an image column.

    Attributes
    ----------
    made_by
        The operation that gave it other pixels than the stored ones, by users' name; None if they
        are those of the stored images.
    member
        Which image of the sample that a row points to it is: ``"image"`` itself or another one;
        None if it is none of them, as images of another read that were merged.
    extensions
        Member extensions of another image of the sample, as far as they are known.
    modes
        The modes that it was decoded in.
    """

    made_by: str | None
    member: Literal["image", "other"] | None
    extensions: tuple[str, ...] = ()
    modes: frozenset[Mode] = frozenset()

    @property
    def is_exact(self) -> bool:
        """True for labels and raw values, which no encoding may change."""
        return not self.modes.isdisjoint(("labels", "raw"))

    def extension(self, column: str) -> str:
        """The extension for a member that is made of the column and replaces no other image."""
        lossless = self.is_exact or "RGBA" in self.modes
        if self.member == "image" or column == "image":
            return "png" if lossless else "jpg"
        first = self.extensions[0] if self.extensions else f"{column}.png".lower()
        stem, _, kind = first.rpartition(".")
        kept = kind == "png" or (not lossless and kind in FORMATS)
        return first if kept else f"{stem or column.lower()}.png"


def image_origin(frame: Any, column: str) -> ImageOrigin:
    """The origin of a column of images or references, as far as the frame tells it."""
    if not isinstance(frame, FrameBase):
        return _computed_origin(frame, column)
    found = list(_origins(frame.expr, column, _pointed(frame.expr)))
    made_by = next((each.made_by for each in found if each.made_by), None)
    members = {each.member for each in found}
    return ImageOrigin(
        made_by,
        found[0].member if len(members) == 1 else None,
        found[0].extensions,
        frozenset().union(*(each.modes for each in found)),
    )


def decoded_modes(frame: Any, column: str) -> frozenset[Mode]:
    """The modes that the images of a column were decoded in, as far as the frame tells them."""
    return image_origin(frame, column).modes


def _computed_origin(frame: Any, column: str) -> ImageOrigin:
    if backend_of(frame).is_images(frame[column].dtype):
        is_image = column == "image"
        return ImageOrigin(
            "a computed frame, which says nothing of them", "image" if is_image else None
        )
    if "__url__" not in frame.columns:
        return ImageOrigin(None, None)
    references = references_of(frame, column)
    pointed = backend_of(frame).to_arrow(frame[["__url__"]]).column(0)
    same = pc.fill_null(pc.equal(field_of(references, "url"), pointed), False)
    own = pc.all(pc.or_(same, references.is_null())).as_py() is not False
    return ImageOrigin(None, ("image" if column == "image" else "other") if own else None)


def _origins(expr: Any, column: Any, pointed: set[str]) -> Iterator[ImageOrigin]:
    """The origins of a column's values; ``pointed`` names the reads of the rows' pointers."""
    for source, (name,) in _sources(expr, (column,)):
        if isinstance(source, Decode):
            decoding = next(each.decoding for each in source.images if each.image == name)
            made_by, modes = _changed_by(source, decoding), {decoding.mode}
            below = _origins(source.frame, name, pointed)
        elif backend_of(source._meta).is_references(source._meta[name].dtype):
            yield _stored(source, name, pointed)
            continue
        else:
            made_by, modes = operation_name(source), set()
            before = getattr(source, "frame", None)
            known = isinstance(before, dx.Expr) and name in before.columns
            unknown = ImageOrigin(None, "image" if name == "image" else None)
            below = _origins(before, name, pointed) if known else iter((unknown,))
        for each in below:
            yield replace(each, made_by=made_by or each.made_by, modes=each.modes | modes)


def _stored(source: Any, name: Any, pointed: set[str]) -> ImageOrigin:
    """The origin of references, which ``source`` makes."""
    reads = {source._name}
    if is_pointed(source):
        reads = _pointed(source.frame)
    if not reads <= pointed:
        return ImageOrigin(None, None)
    others = source.dataset.options.other_images if isinstance(source, ReadWebDataset) else ()
    extensions = next((each.extensions for each in others if each.column == name), ())
    return ImageOrigin(None, "image" if name == "image" else "other", extensions)


def _pointed(expr: Any) -> set[str]:
    """The names of the expressions that rows' pointers come from, or may come from."""
    found = set()
    for source, _ in _sources(expr, ("__url__", "offset")):
        reads = source.find_operations((ReadWebDataset, ReadImageFiles))
        found |= {source._name, *(read._name for read in reads)}
    return found


def _sources(expr: Any, columns: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The expressions that make columns, also of a query whose results are kept."""
    for source, names in value_sources(expr, columns):
        if isinstance(source, KeepsResults):
            yield from _sources(source.made_of, names)
        else:
            yield source, names


def _changed_by(decode: Decode, decoding: DecodeSpec) -> str | None:
    """The name of a decode whose options give other pixels than the stored ones; None if none."""
    options = [
        *["size="] * (decoding.size is not None),
        *["mode="] * (decoding.mode == "L"),
        *["transform="] * (decoding.transform is not None),
    ]
    return f"{operation_name(decode)} with {', '.join(options)}" if options else None
