"""What becomes of a batch that DALI refused for one of its images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dask_image_ingest.decode.dali import Decoder, Refused


def decode_in_parts(
    images: list[np.ndarray], failed_index: int | None, suspect: Decoder
) -> list[Any]:
    """Decode a batch that was refused in smaller parts; None for what DALI can't decode."""
    if failed_index is None or failed_index >= len(images):
        parts = list(_split(images, max(1, len(images) // 8)))
    else:
        step = max(1, len(images) // 4)
        before, after = images[:failed_index], images[failed_index + 1 :]
        parts = [*_split(before, step), [], *_split(after, step)]
    # All of them before the next step down, which runs on the same pipeline.
    outputs = list(suspect.run(parts))
    isolated: list[Any] = []
    for encoded, decoded in zip(parts, outputs, strict=True):
        if not encoded:
            isolated.append(None)  # the image that failed
        elif not isinstance(decoded, Refused):
            isolated.extend(decoded)
        else:
            alone = len(encoded) == 1
            isolated.extend(
                [None] if alone else decode_in_parts(encoded, decoded.failed_index, suspect)
            )
    return isolated


def _split(images: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    return (images[start : start + size] for start in range(0, len(images), size))
