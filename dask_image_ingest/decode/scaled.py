"""Small pictures from big JPEGs: decoded at a reduced scale, and only then resized.

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
from dask_image_ingest.decode.decoders import Decoders
from dask_image_ingest.decode.formats import SWAPPED, measure
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.orientation import upright
from dask_image_ingest.decode.threads import decode_pool
from dask_image_ingest.errors import MissingDependencyError

# What a picture must be larger than its result by, in both directions.
_LEAST_FACTOR = 2


class ScaledDecoder:
    """Stands in for a `Decoder` of encoded images."""

    def __init__(self, decoding: Decoding, dali: Decoders) -> None:
        self._decoding = decoding
        self._dali = dali
        self._decode_jpeg = require_simplejpeg().decode_jpeg

    def run(self, batches: Iterable[list[np.ndarray]]) -> Iterator[Any]:
        """Decode batches one after the other, each while the caller uses the one before.

        Yields
        ------
        List of arrays and DALI tensors, None for an image that DALI could not decode.
        """
        pool = decode_pool()
        begun: list[Future[Any]] | None = None
        batch: list[np.ndarray] = []
        for following in chain(batches, [None]):
            submitted = [pool.submit(self._reduced, data) for data in following or ()]
            if begun is not None:
                yield self._finish(batch, [future.result() for future in begun])
            batch, begun = following or [], submitted

    def _finish(self, batch: list[np.ndarray], reduced: list[np.ndarray | None]) -> list[Any]:
        """Decode in full what could not be reduced."""
        others = [data for data, picture in zip(batch, reduced, strict=True) if picture is None]
        if not others:
            return reduced
        decoded = self._dali.decode_alone(others)
        in_full = iter([None] * len(others) if isinstance(decoded, Refused) else decoded)
        return [next(in_full) if picture is None else picture for picture in reduced]

    def _reduced(self, data: np.ndarray) -> np.ndarray | None:
        """A JPEG at the smallest scale that is no smaller than asked for; None where that fails."""
        encoded = data.data
        format, stored = measure(encoded)
        if format != "jpeg" or stored.channels not in (1, 3) or not stored.height:
            return None
        height, width = self._least_shape(stored.height, stored.width or 0, stored.orientation)
        if stored.height < _LEAST_FACTOR * height or (stored.width or 0) < _LEAST_FACTOR * width:
            return None
        try:
            picture = self._decode_jpeg(
                encoded,
                "GRAY" if self._decoding.mode == "L" else "RGB",
                min_height=height,
                min_width=width,
                min_factor=_LEAST_FACTOR,
            )
        except ValueError:
            return None
        return np.ascontiguousarray(upright(picture, stored.orientation))

    def _least_shape(self, height: int, width: int, orientation: int) -> tuple[int, int]:
        """What the resize makes of a stored picture, before it crops or pads it."""
        assert self._decoding.size is not None
        wanted_height, wanted_width = self._decoding.size
        if orientation in SWAPPED:
            wanted_height, wanted_width = wanted_width, wanted_height
        if self._decoding.resize == "stretch":
            return wanted_height, wanted_width
        pick = max if self._decoding.resize == "crop" else min
        scale = pick(wanted_height / height, wanted_width / width)
        return ceil(height * scale), ceil(width * scale)


def require_simplejpeg() -> Any:
    """The library that decodes at a reduced scale.

    Raises
    ------
    MissingDependencyError
    """
    try:
        import simplejpeg
    except ImportError as error:
        raise MissingDependencyError(
            "scaled_decode=True needs simplejpeg, which is not installed: "
            "pip install 'dask-image-ingest[scaled]'"
        ) from error
    return simplejpeg
