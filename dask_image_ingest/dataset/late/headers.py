"""Header columns (format, height, width, channels) of references, read only when needed."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Final

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import (
    decode_partition,
    reference_rows,
    references_of,
    with_headers,
)
from dask_image_ingest.dataset.late.fetch import fetch_headers
from dask_image_ingest.dataset.late.nodes import Decode
from dask_image_ingest.dataset.plan.nodes import AppendsColumns, ImageNode, PreservesRows
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.frames import ImageReference

#: Columns with values from an image's header.
HEADERS: Final = ("format", "height", "width", "channels")

_NO_IMAGE = ImageReference(None)


def _read_headers(
    frame: Any,
    image: Any,
    names: tuple[str, ...],
    decoding: DecodeSpec,
    storage_options: dict[str, Any] | None,
) -> Any:
    references = [each or _NO_IMAGE for each in reference_rows(references_of(frame, image))]
    # ``nbytes`` alone opens no file: references have it.
    headers = fetch_headers(references, decoding, storage_options) if names != ("nbytes",) else []
    return with_headers(frame, names, headers, [each.nbytes for each in references])


class ReadHeaders(AppendsColumns, PreservesRows):
    """Adds header columns by reading the first bytes of each referenced image.

    Filters and projections that need none of them go below it. A decode directly above absorbs it,
    so that no image is opened twice.
    """

    _parameters: ClassVar = ["frame", "image", "headers", "decoding", "storage_options"]
    headers: tuple[str, ...]

    operation = staticmethod(_read_headers)

    @functools.cached_property
    def _meta(self) -> Any:
        return with_headers(self.frame._meta, self.headers, [], [])

    @property
    def added(self) -> frozenset[Any]:
        """The header columns."""
        return frozenset(self.headers)

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        headers = tuple(name for name in self.headers if name in wanted)
        if not headers:
            return type(parent)(self.frame, *parent.operands[1:])
        needed = [name for name in self.frame.columns if name in wanted | {self.image}]
        if needed == list(self.frame.columns) and headers == self.headers:
            return None
        rows = self.frame if needed == list(self.frame.columns) else self.frame[needed]
        narrower = type(self)(rows, self.image, headers, *self.operands[3:])
        return type(parent)(narrower, *parent.operands[1:])

    def _tune_up(self, parent: dx.Expr) -> dx.Expr | None:
        if type(parent) is not Decode:
            return None
        if [each.image for each in parent.images] != [self.image]:
            return None
        return DecodeWithHeaders(self.frame, *parent.operands[1:], self.headers)


class DecodeWithHeaders(ImageNode, dx.Blockwise):
    """A decode that also fills the header columns. Made late: no rule changes it."""

    _parameters: ClassVar = ["frame", "images", "keep", "limit", "headers"]
    _preserves_partitioning_information = True
    operation = staticmethod(decode_partition)

    @functools.cached_property
    def _meta(self) -> Any:
        return with_headers(Decode(self.frame, self.images)._meta, self.headers, [], [])
