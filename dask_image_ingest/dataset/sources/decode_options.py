"""The options that all reads of images share, and the frame that comes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_choice, check_flag, check_storage_options
from dask_image_ingest.dataset.late.headers import ReadHeaders
from dask_image_ingest.dataset.late.nodes import Decode
from dask_image_ingest.dataset.options import ErrorPolicy
from dask_image_ingest.dataset.read import NO_GPU_HERE, refuse_decoding
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode, kept_by
from dask_image_ingest.decode import Mode, Resize, make_decode_spec
from dask_image_ingest.frames import Backend, choose_backend, get_backend, gpus


def decode_options(
    backend: Literal["cudf", "pandas"] | None,
    *,
    size: int | tuple[int, int] | None,
    resize: Resize,
    transform: Callable[..., Any] | None,
    mode: Mode,
    errors: ErrorPolicy,
    max_pixels: int | None,
    storage_options: dict[str, Any] | None,
    decode: bool,
) -> tuple[Backend, ImageDecode]:
    """Check these arguments of a read, and bring them together.

    Raises
    ------
    ArgumentError
        For arguments that are unknown, or contradict each other.
    MissingDependencyError
        If the backend's library is not installed.
    """
    made = get_backend(choose_backend(backend))
    if made.device == "gpu" and not gpus():
        warnings.warn(NO_GPU_HERE, stacklevel=3)
    check_choice("errors", errors, ("null", "raise", "drop"))
    check_storage_options(storage_options)
    check_flag("decode", decode)
    decoding = make_decode_spec(
        device=made.device,
        size=size,
        resize=resize,
        mode=mode,
        transform=transform,
        max_pixels=max_pixels,
    )
    if not decode:
        refuse_decoding(decoding, errors)
    return made, ImageDecode("image", "error", decoding, errors, storage_options)


def with_images(
    references: dx.Expr, images: ImageDecode, headers: tuple[str, ...], decode: bool
) -> Any:
    """A lazy frame of rows with references: with header columns, and decoded if asked."""
    rows = references
    if headers:
        rows = ReadHeaders(rows, images.image, headers, images.decoding, images.storage_options)
    if decode:
        rows = Decode(rows, (images,), kept_by(images.errors))
    return dx.new_collection(rows)
