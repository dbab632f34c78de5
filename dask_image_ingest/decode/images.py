"""The images of a partition, decoded: whatever they are, and whatever a decoder dies of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from dask_image_ingest.decode.batches import decode_in_batches
from dask_image_ingest.decode.crash import crashed, decode_guarded, journal
from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.origin import Origin, unknown
from dask_image_ingest.decode.pixels import PixelBuffer, Pixels


def decode(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: Decoding,
    buffer: PixelBuffer,
    origin: Callable[[int], Origin] = unknown,
    meanwhile: Callable[[], Any] | None = None,
) -> Pixels:
    """Decode the images of a partition, in the order of its rows.

    Parameters
    ----------
    headers
        What each image's first bytes told; images with an error are not decoded.
    image_bytes
        Gives the encoded bytes of a row.
    decoding
        What the images should look like.
    buffer
        Takes the pixels.
    origin
        Gives the origin of a row, for the random operators of a transform, and to know a partition
        again: where a process has died in its midst, its images are decoded under guard.
    meanwhile
        Called at a moment when the decoder is busy, if there is one.

    Raises
    ------
    FunctionError
        If a transform fails.

    Notes
    -----
    DALI gets the images that are surely sound for it; while one batch is copied out, the next is
    decoded. What it should not see is decoded by Pillow meanwhile, and after it what it refuses.
    What both refuse becomes an error.
    """
    headers = _without_crashers(headers, image_bytes)
    with journal.underway(_name(decoding, len(headers), origin)) as died_before:
        if died_before:
            shapes, errors = decode_guarded(headers, image_bytes, decoding, buffer, origin)
            return Pixels(buffer.finish(), shapes, errors)
        return decode_in_batches(headers, image_bytes, decoding, buffer, origin, meanwhile)


def _name(decoding: Decoding, count: int, origin: Callable[[int], Origin]) -> str:
    """What tells a partition from others of the same options."""
    ends = repr([origin(row) for row in (0, count - 1)]) if count else ""
    return f"{decoding.token}-{zlib.crc32(ends.encode()):08x}-{count}"


def _without_crashers(
    headers: Sequence[Header], image_bytes: Callable[[int], Any]
) -> Sequence[Header]:
    """Give the images that are known to kill a process an error, so that they are left alone."""
    crashers = journal.crashers()
    if not crashers:
        return headers
    return [
        header
        if header.error is not None or (death := crashers.death(image_bytes(row))) is None
        else header._replace(error=str(crashed(death)), needs_pillow=True)
        for row, header in enumerate(headers)
    ]
