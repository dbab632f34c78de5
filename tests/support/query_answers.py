"""Whether two answers are the same, as a user sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd


def answer(value: Any) -> Any:
    """A result in plain Python: values, labels, names, dtypes, pixels."""
    if isinstance(value, pd.DataFrame):
        columns = [values(value.iloc[:, place]) for place in range(value.shape[1])]
        dtypes = [str(dtype) for dtype in value.dtypes]
        return "frame", list(value.columns), dtypes, columns, answer(value.index)
    if isinstance(value, pd.Series):
        return "series", value.name, str(value.dtype), values(value), answer(value.index)
    if isinstance(value, pd.Index):
        return "index", value.name, str(value.dtype), [scalar(item) for item in value]
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, [scalar(item) for item in value.ravel()]
    if isinstance(value, (list, tuple)):
        return [answer(item) for item in value]
    return scalar(value)


def unlabelled(given: Any) -> Any:
    """An answer without the labels of its rows."""
    if isinstance(given, tuple) and given[0] in ("frame", "series"):
        return given[:-1]
    return [unlabelled(item) for item in given] if isinstance(given, list) else given


def values(series: pd.Series) -> list:
    """The values of a column; pixels after the shape of their image."""
    if str(series.dtype) == "image":
        arrays = pd.DataFrame({"image": series}).images.arrays()
        return [None if image is None else [*image.shape, *image.ravel()] for image in arrays]
    return [scalar(item) for item in series.array]


def scalar(value: Any) -> Any:
    """A value that equals itself: nulls are None, NaN is a word."""
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, (list, np.ndarray)):
        return [scalar(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value


def outcome(ask: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The answer, or the error in its place."""
    try:
        return answer(ask()), None
    except Exception as error:
        return None, error


def difference(got: Any, want: Any, place: str = "") -> tuple[str, Any, Any]:
    """Where two answers differ first, and what stands there."""
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)) and len(got) == len(want):
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            if one != other:
                return difference(one, other, f"{place}[{number}]")
    return place, got, want
