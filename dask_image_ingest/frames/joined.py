"""Images as one array: without a copy where they lie side by side in one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dask_image_ingest.frames.backend import Backend


def joined(arrays: Sequence[Any], backend: Backend) -> Any:
    """Images as one array (n, height, width, channels), or as a list where their shapes differ.

    Images that lie side by side in one buffer are not copied; the result keeps the buffer.
    """
    first = arrays[0]
    if any(array.shape != first.shape for array in arrays):
        return list(arrays)
    if _side_by_side(arrays):
        return backend.numpy.lib.stride_tricks.as_strided(
            first, (len(arrays), *first.shape), (first.nbytes, *first.strides)
        )
    return backend.numpy.stack(arrays)


def runs(arrays: Sequence[Any], backend: Backend) -> Iterator[Any]:
    """Images as few flat arrays: one of all that lie side by side in one buffer, without a copy."""
    start = 0
    for end in range(1, len(arrays) + 1):
        if end == len(arrays) or not _side_by_side(arrays[end - 1 : end + 1]):
            flat = arrays[start].reshape(-1)
            size = sum(array.size for array in arrays[start:end])
            yield backend.numpy.lib.stride_tricks.as_strided(flat, (size,), flat.strides)
            start = end


def _side_by_side(arrays: Sequence[Any]) -> bool:
    # Addresses alone prove nothing: two buffers may be neighbours, and one of them go.
    buffer = _buffer(arrays[0])
    if buffer is None or any(_buffer(array) is not buffer for array in arrays):
        return False
    end = _address(arrays[0])
    for array in arrays:
        if _address(array) != end:
            return False
        end += array.nbytes
    return True


def _buffer(array: Any) -> Any:
    """What keeps the memory of an array and of all other views of it; None where it is its own."""
    if hasattr(array, "__cuda_array_interface__"):
        return array.data.mem
    return array.base


def _address(array: Any) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
