"""Whether numbers of one type can be those of another one."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["first_misfit"]


def first_misfit(array: Any, dtype: np.dtype, numpy: Any) -> Any:
    """A value of an array of numbers that ``dtype`` can't hold; None where it holds all of them.

    A float type rounds what it gets, as wide as it reaches; whole numbers and truth values have to
    be there exactly.

    Parameters
    ----------
    array
        An array of NumPy or CuPy, or of Python's numbers.
    dtype
        The type that is asked for.
    numpy
        The library of the array.
    """
    if array.dtype == object:
        return next((value for value in array.flat if not _has(dtype, value)), None)
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            made = array.astype(dtype)
        return _first(array, numpy.isfinite(array) & ~numpy.isfinite(made))
    if dtype.kind == "b":
        return _first(array, (array != 0) & (array != 1))
    if array.dtype.kind == "f":
        broken = _first(array, array != numpy.trunc(array))
        if broken is not None:
            return broken
    # As Python's numbers, which compare by value whatever their types are.
    least, most = array.min().item(), array.max().item()
    bounds = np.iinfo(dtype)
    if least < bounds.min:
        return least
    return most if most > bounds.max else None


def _has(dtype: np.dtype, value: Any) -> bool:
    """Whether a type of whole numbers or truth values has this number of Python's."""
    if dtype.kind == "b":
        return value in (0, 1)
    bounds = np.iinfo(dtype)
    return isinstance(value, int) and bounds.min <= value <= bounds.max


def _first(array: Any, wrong: Any) -> Any:
    return array[wrong][0].item() if wrong.any() else None
