"""What a user's function gives, as an array: NumPy's, CuPy's, a tensor, a list of numbers."""

from __future__ import annotations

from typing import Any

from dask_image_ingest.frames import Backend

__all__ = ["given_array"]

# Types of floats that NumPy has no name for, torch's and those of JAX.
_SMALL_FLOATS = ("torch.bfloat16", "torch.float8", "bfloat16", "float8")


def given_array(values: Any, backend: Backend) -> Any:
    """An array of the backend's library; tensors need be neither detached nor on this device."""
    if isinstance(values, (list, tuple)):
        values = [_plain(value, backend) for value in values]
    return backend.numpy.asarray(_plain(values, backend))


def _plain(values: Any, backend: Backend) -> Any:
    """A tensor without what NumPy can't take from it; anything else as it is."""
    if hasattr(values, "detach"):
        values = values.detach()
        if backend.device == "cpu":
            values = values.cpu()
    if str(getattr(values, "dtype", "")).startswith(_SMALL_FLOATS):
        return values.float() if hasattr(values, "float") else values.astype("float32")
    return values
