"""Decode large JPEGs at a reduced scale for a small ``size``.

libjpeg-turbo decodes to 1/2, 1/4 or 1/8 straight from the DCT coefficients, at a fraction of the
cost. DALI decodes the rest in full: images that are too small, of other formats, of four channels,
or damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from math import ceil
from typing import Any

import numpy as np

from dask_image_ingest.decode.dali import Item, Refused, decode_pool
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.formats import SWAPPED, BadImage, Header, read_stored_header
from dask_image_ingest.decode.pillow import decode_reduced, upright
from dask_image_ingest.decode.planner import DecoderSet
from dask_image_ingest.decode.region import Region
from dask_image_ingest.decode.resize import Extent, ResizedImage

# Scales of libjpeg-turbo that are faster than a full decode.
_FACTORS = (8, 4, 2)

# Factor by which a reduced image must exceed its result in both directions. With it the worst
# photo has a PSNR of 37 dB against a full decode; without it, 31.
_MARGIN = 1.5

# EXIF orientations in which the last stored row, or column, comes first.
_UPSIDE_DOWN, _MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)


class ScaledDecoder:
    """Decoder with the interface of `DaliDecoder` for encoded images."""

    def __init__(self, decoding: DecodeSpec, dali: DecoderSet) -> None:
        self._decoding = decoding
        self._dali = dali

    def run(self, batches: Iterable[list[Item]]) -> Iterator[Any]:
        """Decode batches; the next one is decoded while the caller uses the last.

        Yields
        ------
        List of `ResizedImage` and DALI tensors, None for an image that DALI could not decode.
        """
        pool = decode_pool()
        batch: list[Item] | None = None
        futures: list[Future[Any]] = []
        for following in chain(batches, [None]):
            submitted = [pool.submit(self._reduced, data) for data in following or ()]
            if batch is not None:
                yield self._with_full_decodes(batch, [future.result() for future in futures])
            batch, futures = following, submitted

    def _with_full_decodes(
        self, batch: list[Item], reduced: list[ResizedImage | None]
    ) -> list[Any]:
        """Decode in full the images that were not reduced."""
        others = [data for data, image in zip(batch, reduced, strict=True) if image is None]
        if not others:
            return reduced
        decoded = self._dali.decode_alone(others)
        in_full = iter([None] * len(others) if isinstance(decoded, Refused) else decoded)
        return [next(in_full) if image is None else image for image in reduced]

    def _reduced(self, item: Item) -> ResizedImage | None:
        """Decode a JPEG at a reduced scale; None if that is impossible or not worthwhile."""
        data, region = item if isinstance(item, tuple) else (item, None)
        encoded = data.data
        format, stored = read_stored_header(encoded)
        if (
            format != "jpeg"
            or stored.channels not in (1, 3)
            or not (stored.height and stored.width)
        ):
            return None
        swapped = stored.orientation in SWAPPED
        full = (stored.width, stored.height) if swapped else (stored.height, stored.width)
        # Height and width of what is resized: of the region, or of the image.
        part = full if region is None else (region.height, region.width)
        factor = reduction(*part, self._decoding)
        if factor == 1:
            return None
        try:
            image = decode_reduced(bytes(encoded), self._decoding.mode, factor)
        except BadImage:
            return None
        if image.shape[:2] != (ceil(stored.height / factor), ceil(stored.width / factor)):
            return None
        image = np.ascontiguousarray(upright(image, stored.orientation))
        extent = _extent(image.shape, full, factor, stored.orientation)
        if region is not None:
            image, extent = _cropped(image, extent, region, factor)
        return ResizedImage(
            image,
            self._decoding.geometry(*part),
            self._decoding.filter,
            extent=extent,
            exact=False,
            mirrored=region is not None and region.mirrored,
        )


def reduction(height: int, width: int, decoding: DecodeSpec) -> int:
    """Factor by which to reduce a JPEG of this upright shape in the decode: 1, 2, 4 or 8."""
    target = decoding.geometry(height, width).whole
    limit = min(height / target[0], width / target[1]) / _MARGIN
    return next((factor for factor in _FACTORS if factor <= limit), 1)


def any_reduced(headers: Iterable[Header], decoding: DecodeSpec) -> bool:
    """True if any image would be decoded at a reduced scale."""
    return any(
        header.format == "jpeg"
        and header.height
        and header.width
        and reduction(header.height, header.width, decoding) > 1
        for header in headers
    )


def _cropped(
    image: np.ndarray, extent: Extent, region: Region, factor: int
) -> tuple[np.ndarray, Extent]:
    """The pixels under a region of the full image, and the region's extent in these."""
    top, left = extent.top + region.top / factor, extent.left + region.left / factor
    height, width = region.height / factor, region.width / factor
    first_row, first_column = int(top), int(left)
    image = image[first_row : ceil(top + height), first_column : ceil(left + width)]
    return image, Extent(top - first_row, left - first_column, height, width)


def _extent(shape: tuple[int, ...], full: tuple[int, int], factor: int, orientation: int) -> Extent:
    """Extent of the image in its reduced array, whose last stored row and column may be partial."""
    height, width = full[0] / factor, full[1] / factor
    top = shape[0] - height if orientation in _UPSIDE_DOWN else 0
    left = shape[1] - width if orientation in _MIRRORED else 0
    return Extent(top, left, height, width)
