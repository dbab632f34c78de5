"""Images as a network takes them: float32, channels first, by mean and standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend

__all__ = ["Normalize", "parse_normalize"]


class Normalize(NamedTuple):
    """(value / 255 - mean) / std, as a product and a sum for each channel, or one for all."""

    scale: np.ndarray
    shift: np.ndarray

    def batch(self, images: Sequence[Any], backend: Backend) -> Any:
        """Images of one shape as an array (n, channels, height, width) of float32.

        Raises
        ------
        ArgumentError
        """
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            one, other = sorted(shapes)[:2]
            raise ArgumentError(
                f"normalize= needs images of one shape, and a batch has {one} and {other}: read "
                "with size= and resize='stretch', 'crop' or 'pad'"
            )
        (shape,) = shapes
        if len(self.scale) not in (1, shape[2]):
            raise ArgumentError(
                f"normalize= gives {len(self.scale)} means, and the images have {shape[2]} "
                "channels: pass one number, or one for each channel"
            )
        return backend.normalized(images, self.scale, self.shift)


def parse_normalize(normalize: Any) -> Normalize | None:
    """Check the argument ``normalize=`` of ``iter_batches``.

    Raises
    ------
    ArgumentError
    """
    if normalize is None:
        return None
    try:
        mean, std = (np.atleast_1d(np.asarray(part, np.float64)) for part in normalize)
        mean, std = np.broadcast_arrays(mean, std)
        valid = mean.ndim == 1 and mean.size and np.isfinite([mean, std]).all() and (std > 0).all()
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ArgumentError(
            f"normalize={shown(normalize)}: pass (mean, std) of values from 0 to 1, each a number "
            "or one for each channel, such as ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
        )
    if mean.max() > 1 or std.max() > 1:
        meant = tuple(tuple((part / 255).round(3).tolist()) for part in (mean, std))
        raise ArgumentError(
            f"normalize={shown(normalize)}: means and deviations are of values from 0 to 1, and "
            f"these are of values from 0 to 255, it seems: divide both by 255, {meant}"
        )
    return Normalize((1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32))
