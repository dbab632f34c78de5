"""Arrow types by what users call them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["is_text", "parse_type"]

_PYTHON_TYPES = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


def parse_type(given: Any) -> pa.DataType:
    """An Arrow type from itself, its name, or the type of Python or NumPy that it stands for.

    Raises
    ------
    TypeError, ValueError, LookupError, pyarrow.ArrowException
        For what is no type.
    """
    if isinstance(given, pa.DataType):
        return given
    if isinstance(given, str):
        inside = re.fullmatch(r"list<(?:item: )?(.*)>", given)
        if inside:
            return pa.list_(parse_type(inside[1]))
        return pa.string() if given == "str" else pa.type_for_alias(given)
    if given in _PYTHON_TYPES:
        return _PYTHON_TYPES[given]
    if isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic)):
        return pa.from_numpy_dtype(given)
    raise TypeError(f"{given!r} is no type")


def is_text(type_: pa.DataType) -> bool:
    """Whether values of this type are strings."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))
