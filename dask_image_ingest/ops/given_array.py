"""What a user's function gives, as an array: NumPy's, CuPy's, a tensor, a list of numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dask_image_ingest.frames import Backend

__all__ = ["given_array", "given_exactly"]

# Types of floats that NumPy has no name for, torch's and those of JAX.
_SMALL_FLOATS = ("torch.bfloat16", "torch.float8", "bfloat16", "float8")

# Python makes numbers of them.
_NO_NUMBERS = (str, bytes, np.datetime64, np.timedelta64)


def given_array(values: Any, backend: Backend) -> Any:
    """An array of the backend's library; tensors need be neither detached nor on this device."""
    listed = isinstance(values, (list, tuple))
    values = [_plain(v, backend) for v in values] if listed else _plain(values, backend)
    if backend.device == "cpu":
        return np.asarray(values)
    # CuPy takes neither None among numbers nor a list of arrays that are not its own.
    if not listed and _is_on_gpu(values):
        return backend.numpy.asarray(values)
    if listed and values and all(map(_is_on_gpu, values)):
        return backend.numpy.stack([backend.numpy.asarray(value) for value in values])
    array = np.asarray([_on_host(value) for value in values] if listed else values)
    return backend.numpy.asarray(array) if array.dtype.kind in "biuf" else array


def given_exactly(values: Any, backend: Backend) -> Any:
    """An array of numbers none of which is rounded: of Python's, where no type has all of them.

    Raises
    ------
    TypeError, ValueError
        If some are no numbers.
    """
    array = given_array(values, backend)
    if array.dtype.kind not in "fO" or (array.dtype.kind == "f" and _has_one_type(values)):
        return array
    # NumPy makes floats of int64 and uint64 together, and of whole numbers beside floats.
    if isinstance(values, (list, tuple)):
        values = [_on_host(_plain(value, backend)) for value in values]
    objects = np.array(values, dtype=object)
    for place, value in enumerate(objects.flat):
        objects.flat[place] = _python_number(value)
    return objects


def _has_one_type(values: Any) -> bool:
    each = values if isinstance(values, (list, tuple)) else [values]
    types = {str(getattr(value, "dtype", "object")) for value in each}
    return len(types) == 1 and "object" not in types


def _python_number(value: Any) -> Any:
    """A number that compares with Python's, a whole one as such; None is NaN."""
    if value is None:
        return math.nan
    if isinstance(value, _NO_NUMBERS) or (hasattr(value, "ndim") and value.ndim):
        raise TypeError
    value = value.item() if hasattr(value, "item") else value
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return float(value)
    return whole if whole == value else value


def _is_on_gpu(value: Any) -> bool:
    return hasattr(value, "__cuda_array_interface__")


def _on_host(value: Any) -> Any:
    if not _is_on_gpu(value):
        return value
    return value.cpu() if hasattr(value, "cpu") else value.get()


def _plain(values: Any, backend: Backend) -> Any:
    """A tensor without what NumPy can't take from it; anything else as it is."""
    if hasattr(values, "detach"):
        values = values.detach()
        if backend.device == "cpu":
            values = values.cpu()
    if str(getattr(values, "dtype", "")).startswith(_SMALL_FLOATS):
        return values.float() if hasattr(values, "float") else values.astype("float32")
    return values
