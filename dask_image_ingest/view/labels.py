"""Overlay of a mask's labels, in colours, on its image."""

from __future__ import annotations

import functools

import numpy as np

from dask_image_ingest.errors import ArgumentError


def overlay_labels(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Blend the colours of a mask's labels into an image, at 50 %; label 0 is transparent.

    Parameters
    ----------
    image
        uint8 (height, width, channels).
    labels
        uint8 (rows, columns, 1), the mask at any size; scaled by the nearest pixel.

    Returns
    -------
    array, shape (height, width, 3), uint8

    Raises
    ------
    ArgumentError
        If the mask has more than one channel, or is not of uint8.
    """
    if labels.shape[2] != 1 or labels.dtype != np.uint8:
        raise ArgumentError(
            f"mask= names a column of {labels.dtype} with {labels.shape[2]} channels: read it with "
            "ImageColumn(..., mode='labels')"
        )
    height, width = image.shape[:2]
    rows, columns = (
        (np.arange(length) * 2 + 1) * stored // (2 * length)
        for length, stored in zip((height, width), labels.shape[:2], strict=True)
    )
    label = labels[rows[:, None], columns[None], 0]
    rgb = image[:, :, :3] if image.shape[2] >= 3 else image[:, :, :1].repeat(3, axis=2)
    blended = (rgb.astype(np.uint16) + palette()[label]) // 2
    return np.where(label[:, :, None] > 0, blended, rgb).astype(np.uint8)


@functools.cache
def palette() -> np.ndarray:
    """Colours of labels 0 to 255, uint8 (256, 3), as in Pascal VOC.

    https://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html
    """
    colors = np.zeros((256, 3), np.uint8)
    for label in range(256):
        for bit in range(8):
            colors[label, bit % 3] |= (label >> bit & 1) << (7 - bit // 3)
    return colors
