"""Outputs of ``map_batches``: their types, and whether what a function gives is of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import IMAGE, Backend, NewColumn, is_text, parse_type
from dask_image_ingest.ops.given_array import given_array, given_exactly
from dask_image_ingest.ops.misfit import first_misfit

__all__ = ["checked_values", "output_column", "output_type"]


def output_type(name: str, given: Any) -> pa.DataType:
    """The Arrow type of an output: a number, a string, bytes, a list of numbers, or an image.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(name, str):
        raise ArgumentError(f"outputs= names {name!r}: the names of columns are strings")
    if isinstance(given, str) and given == "image":
        return IMAGE
    try:
        type_ = parse_type(given)
    except (ValueError, TypeError, LookupError, RecursionError, pa.ArrowException):
        type_ = None
    number = type_.value_type if type_ is not None and pa.types.is_list(type_) else type_
    is_number = number is not None and (
        pa.types.is_integer(number) or pa.types.is_floating(number) or pa.types.is_boolean(number)
    )
    if type_ is None or not (is_number or _is_text_or_bytes(type_)):
        raise ArgumentError(
            f"outputs={{{name!r}: {given!r}}}: choose 'float32', 'int64', 'bool' or another "
            "number, 'string', 'binary', 'image', or a vector of numbers such as 'list<float32>'"
        )
    return type_


def checked_values(name: str, values: Any, type_: pa.DataType, count: int, backend: Backend) -> Any:
    """What the function gave for ``count`` images, as an array of the output's type, or a list.

    Raises
    ------
    ArgumentError
        For another shape than that of one value for each image, and for values that the type can't
        hold.
    """
    if _is_text_or_bytes(type_):
        values = _text_or_bytes(name, values, type_)
        shape: tuple[int, ...] = (len(values),)
    else:
        values = _numbers(name, values, np.dtype(_item(type_)), backend)
        shape = values.shape
    if not shape or shape[0] != count:
        raise ArgumentError(
            f"map_batches: the function gave {name!r} of shape {shape} for a batch of {count} "
            "images; the first axis must have one value for each"
        )
    vector = pa.types.is_list(type_)
    if len(shape) != 1 + vector:
        item = "a vector" if vector else "a number"
        instead = _name(type_.value_type) if vector else f"list<{_name(type_)}>"
        raise ArgumentError(
            f"map_batches: the function gave {name!r} of shape {shape}, and outputs= says that it "
            f"is {item} for each image"
            + (f": say outputs={{{name!r}: {instead!r}}}" if len(shape) in (1, 2) else "")
        )
    if _is_text_or_bytes(type_):
        return values
    dtype = np.dtype(_item(type_))
    misfit = first_misfit(values, dtype, backend.numpy)
    if misfit is not None:
        other = f"list<{_type_of(values)}>" if vector else _type_of(values)
        raise ArgumentError(
            f"map_batches: the function gave {misfit} in {name!r}, which {dtype} can't hold: say "
            f"outputs={{{name!r}: {other!r}}}, or give values that it can"
        )
    return backend.numpy.asarray(values.astype(dtype, copy=False))


def output_column(name: str, parts: list[Any], type_: pa.DataType, backend: Backend) -> NewColumn:
    """The values of all batches of a partition, with their type."""
    if _is_text_or_bytes(type_):
        return [value for part in parts for value in part], type_
    if len({part.shape[1:] for part in parts}) > 1:
        raise ArgumentError(
            f"map_batches: the vectors of {name!r} differ in length from batch to batch"
        )
    empty = np.empty((0, 0) if pa.types.is_list(type_) else 0, _item(type_))
    return backend.numpy.concatenate(parts) if parts else empty, type_


def _text_or_bytes(name: str, values: Any, type_: pa.DataType) -> list[Any]:
    """A list of strings or bytes, of which None is a null.

    Raises
    ------
    ArgumentError
    """
    kind = "strings" if is_text(type_) else "bytes"
    if isinstance(values, (str, bytes, set, frozenset)) or not hasattr(values, "__iter__"):
        raise ArgumentError(
            f"map_batches: the function gave {shown(values)} as {name!r}: give a list of {kind}, "
            "one for each image"
        )
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if not _are(values, type_):
        other = next(value for value in values if not _are([value], type_))
        raise ArgumentError(
            f"map_batches: the function gave {shown(other)} in {name!r}: outputs= says {kind}; "
            "give these, or say another type"
        )
    return values


def _are(values: list[Any], type_: pa.DataType) -> bool:
    try:
        pa.array(values, type_)
    except (pa.ArrowException, TypeError, ValueError):
        return False
    return True


def _numbers(name: str, values: Any, dtype: np.dtype, backend: Backend) -> Any:
    """An array of numbers or truth values, which are exact where ``dtype`` has no fractions.

    Raises
    ------
    ArgumentError
    """
    if values is None or isinstance(values, (str, bytes)):
        raise _no_numbers(name, values)
    try:
        if dtype.kind != "f":
            array = given_exactly(values, backend)
        else:
            array = given_array(values, backend)
            if array.dtype == object:
                # None is as good as NaN.
                array = backend.numpy.asarray(array.astype(np.float64))
    except (ValueError, TypeError, OverflowError) as error:
        raise _no_numbers(name, values) from error
    if array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biufO"):
        raise _no_numbers(name, values)
    return array


def _no_numbers(name: str, values: Any) -> ArgumentError:
    return ArgumentError(
        f"map_batches: the function gave {shown(values)} as {name!r}, which is no array of "
        "numbers: give a number for each image, or for each a vector, all of one length"
    )


def _type_of(numbers: Any) -> str:
    """The name of a type that may have these."""
    dtype = np.array(numbers.tolist()).dtype if numbers.dtype == object else numbers.dtype
    return "float64" if dtype.kind == "O" else str(dtype)


def _name(type_: pa.DataType) -> str:
    return str(np.dtype(type_.to_pandas_dtype()))


def _item(type_: pa.DataType) -> Any:
    return (type_.value_type if pa.types.is_list(type_) else type_).to_pandas_dtype()


def _is_text_or_bytes(type_: pa.DataType) -> bool:
    return is_text(type_) or bool(pa.types.is_binary(type_))
