"""Header columns of references: format and shape, read only where they are asked for."""

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

#: What a header tells of an image.
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
    # The size is told by the reference.
    headers = fetch_headers(references, decoding, storage_options) if names != ("nbytes",) else []
    return with_headers(frame, names, headers, [each.nbytes for each in references])


class ReadHeaders(AppendsColumns, PreservesRows):
    """Reads the first bytes of the images that rows refer to, for some of the header columns.

    What needs none of these goes below it. Directly below a decode it is a part of that, so that no
    image is opened twice.
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
    """A decode that tells what the headers of its images told; the optimiser's last word."""

    _parameters: ClassVar = ["frame", "images", "keep", "limit", "headers"]
    _preserves_partitioning_information = True
    operation = staticmethod(decode_partition)

    @functools.cached_property
    def _meta(self) -> Any:
        return with_headers(Decode(self.frame, self.images)._meta, self.headers, [], [])
