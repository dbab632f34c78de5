"""Decoding of large JPEGs at a reduced scale, for small results.

libjpeg-turbo makes a half, a quarter or an eighth of a picture straight from its frequencies, at a
fraction of the work. All other images are decoded in full by DALI: those that are not large enough,
of other formats or of four channels, and those that are damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from math import ceil
from typing import Any

import numpy as np

from dask_image_ingest.decode.dali import Refused
from dask_image_ingest.decode.decoders import DecoderSet
from dask_image_ingest.decode.formats import SWAPPED, BadImage, Header, measure
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.pillow import decode_reduced, upright
from dask_image_ingest.decode.resize import Extent, ResizedImage, resize_geometry
from dask_image_ingest.decode.resources import decode_pool

# Of the scales that libjpeg-turbo has, those that cost less than a whole picture does.
_FACTORS = (8, 4, 2)

# What a reduced picture must be larger by than its result, in both directions. So the worst
# photograph is 37 dB from that of a full decode; 31 without.
_MARGIN = 1.5

# EXIF orientations in which the last row or column of a stored picture comes first.
_UPSIDE_DOWN, _MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)


class ScaledDecoder:
    """Decoder with the interface of a `DaliDecoder` of encoded images."""

    def __init__(self, decoding: DecodeSpec, dali: DecoderSet) -> None:
        self._decoding = decoding
        self._dali = dali

    def run(self, batches: Iterable[list[np.ndarray]]) -> Iterator[Any]:
        """Decode batches one after the other, each while the caller uses the one before.

        Yields
        ------
        List of `ResizedImage` and DALI tensors, None for an image that DALI could not decode.
        """
        pool = decode_pool()
        begun: list[Future[Any]] | None = None
        batch: list[np.ndarray] = []
        for following in chain(batches, [None]):
            submitted = [pool.submit(self._reduced, data) for data in following or ()]
            if begun is not None:
                yield self._finish(batch, [future.result() for future in begun])
            batch, begun = following or [], submitted

    def _finish(self, batch: list[np.ndarray], reduced: list[ResizedImage | None]) -> list[Any]:
        """Decode in full what could not be reduced."""
        others = [data for data, picture in zip(batch, reduced, strict=True) if picture is None]
        if not others:
            return reduced
        decoded = self._dali.decode_alone(others)
        in_full = iter([None] * len(others) if isinstance(decoded, Refused) else decoded)
        return [next(in_full) if picture is None else picture for picture in reduced]

    def _reduced(self, data: np.ndarray) -> ResizedImage | None:
        """A JPEG at a reduced scale; None where that can not be done, or is not worth it."""
        encoded = data.data
        format, stored = measure(encoded)
        if (
            format != "jpeg"
            or stored.channels not in (1, 3)
            or not (stored.height and stored.width)
        ):
            return None
        turned = stored.orientation in SWAPPED
        full = (stored.width, stored.height) if turned else (stored.height, stored.width)
        factor = reduction(*full, self._decoding)
        if factor == 1:
            return None
        try:
            picture = decode_reduced(bytes(encoded), self._decoding.mode, factor)
        except BadImage:
            return None
        if picture.shape[:2] != (ceil(stored.height / factor), ceil(stored.width / factor)):
            return None
        picture = np.ascontiguousarray(upright(picture, stored.orientation))
        extent = _extent(picture.shape, full, factor, stored.orientation)
        assert self._decoding.size is not None
        return ResizedImage(picture, self._decoding.size, self._decoding.resize, extent, full)


def reduction(height: int, width: int, decoding: DecodeSpec) -> int:
    """Factor by which a JPEG of this shape, upright, may be reduced as it is decoded."""
    assert decoding.size is not None
    wanted = resize_geometry(height, width, decoding.size, decoding.resize).whole
    least = min(height / wanted[0], width / wanted[1]) / _MARGIN
    return next((factor for factor in _FACTORS if factor <= least), 1)


def any_reduced(headers: Iterable[Header], decoding: DecodeSpec) -> bool:
    """True if any image is to be decoded at a reduced scale."""
    return any(
        header.format == "jpeg"
        and header.height
        and header.width
        and reduction(header.height, header.width, decoding) > 1
        for header in headers
    )


def _extent(shape: tuple[int, ...], full: tuple[int, int], factor: int, orientation: int) -> Extent:
    """Place of the image in a reduced one, whose last pixel stands for fewer than the others."""
    height, width = full[0] / factor, full[1] / factor
    top = shape[0] - height if orientation in _UPSIDE_DOWN else 0
    left = shape[1] - width if orientation in _MIRRORED else 0
    return Extent(top, left, height, width)
