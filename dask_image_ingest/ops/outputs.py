"""Outputs of ``map_batches``: the function's results, checked against types, as columns.

Results are arrays of NumPy or CuPy, tensors, or lists; rows may be arrays, lists, dicts or None, in
any nesting that the type has. Numbers are cast if that is lossless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.decode import VALUE_TYPES, pixels_of
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    IMAGE,
    Backend,
    NewColumn,
    get_backend,
    is_list,
    is_text,
    is_value,
    list_array,
    parse_type,
    tensor_array,
    tensor_type,
    type_name,
)
from dask_image_ingest.typedefs import Array, ArrayModule, DataFrame, TypeLike
from dask_image_ingest.url_secrets import storable


class ResultError(ArgumentError):
    """A function's result does not fit its outputs.

    Parameters
    ----------
    gave
        The result, and what is wrong with it.
    advice
        The rest of the sentence, for functions whose outputs are the argument ``outputs=``.
    """

    def __init__(self, gave: str, advice: str = "") -> None:
        super().__init__(f"map_batches: the function gave {gave}{advice}")
        self.gave = gave


def is_null(value: object) -> bool:
    """True for None, and for the nulls of masked arrays and of pandas."""
    return value is None or value is np.ma.masked or value is pd.NA


def with_none(values: object) -> Any:
    """Values that NumPy, pandas or Arrow say are null as None; a list if there are any."""
    if is_null(values):
        return None
    if isinstance(values, np.ma.MaskedArray):
        return values.tolist() if np.ma.is_masked(values) else values.data
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        # NumPy has no nulls: an array of integers would become one of floats.
        has_nulls = values.null_count or pa.types.is_nested(values.type)
        return values.to_pylist() if has_nulls else values
    if isinstance(values, pa.Scalar):
        return values.as_py()
    if isinstance(values, (pd.Series, pd.Index, pd.api.extensions.ExtensionArray)):
        missing = values.isna()
        if missing.any():
            return [None if null else value for value, null in zip(values, missing, strict=True)]
    elif getattr(values, "has_nulls", False) and hasattr(values, "to_arrow"):
        return values.to_arrow().to_pylist()  # of cuDF
    return values


def output_type(name: str, given: TypeLike) -> pa.DataType:
    """Parse the type of an output."""
    if not isinstance(name, str):
        raise ArgumentError(f"outputs= names {name!r}: the names of columns are strings")
    if isinstance(given, str) and given == "image":
        return IMAGE
    try:
        type_ = parse_type(given)
    except (ValueError, TypeError, LookupError, RecursionError, pa.ArrowException):
        type_ = None
    if type_ is None or not _is_supported(type_):
        raise ArgumentError(
            f"outputs={{{name!r}: {given!r}}}: choose 'float32', 'int64', 'bool' or another "
            "number, 'string', 'binary', 'image', a list such as 'list<float32>', an array of one "
            "shape such as 'float16[4, 64, 64]', or a struct such as "
            "'struct<boxes: list<float32[4]>, name: string>'"
        )
    return tensor_type(type_) or type_


def _is_supported(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_):
        return all(_is_supported(field.type) for field in type_)
    if tensor_type(type_) is not None:
        return True
    if is_list(type_):
        return _is_supported(type_.value_type)
    return is_value(type_) or is_text(type_) or bool(pa.types.is_binary(type_))


def checked_values(name: str, values: Any, type_: pa.DataType, count: int, backend: Backend) -> Any:
    """Check a result for ``count`` images.

    Returns
    -------
    array or pyarrow.Array
        A rectangular array of the output's type on the backend's device; an Arrow array for
        strings and bytes, and if rows are None, or nested, or differ in length.
    """
    values = with_none(values)
    is_sequence = isinstance(values, (list, tuple))
    has_array = hasattr(values, "__array__") or _is_on_gpu(values)
    if not is_sequence and (not has_array or isinstance(values, (str, bytes, dict))):
        raise ResultError(
            f"{shown(values)} as {name!r}",
            f": give an array or a list with one value ({type_name(type_)}) for each image",
        )
    if is_sequence:
        values = [with_none(value) for value in values]
    if _are_rows(values, type_):
        rows = list(values)
        _check_count(name, (len(rows),), count)
        return arrow_rows(name, rows, type_)
    dtype, shape = _item(type_)
    array = _numbers(name, values, dtype, backend)
    _check_count(name, array.shape, count)
    if not shape and array.shape[1:] == (1,):  # as a layer of one output gives
        array = array[:, 0]
    if array.ndim != 1 + len(shape) or any(
        wanted not in (None, got) for wanted, got in zip(shape, array.shape[1:], strict=True)
    ):
        raise ResultError(
            f"{name!r} of shape {array.shape}",
            f", and outputs= says {type_name(type_)} for each image",
        )
    return backend.numpy.asarray(_cast(name, array, dtype, backend))


def value_array(name: str, value: object, type_: pa.DataType) -> pa.Array:
    """Check the value of an output for one row: an Arrow array of length 1."""
    values = checked_values(name, [value], type_, 1, get_backend("pandas"))
    if isinstance(values, pa.Array):
        return values
    if is_value(type_):
        return pa.array(values, type_, from_pandas=True)  # NaN is null
    return arrow_rows(name, list(values), type_)


# A chunk of an Arrow column holds no more bytes of strings, by its 32-bit offsets.
_MOST_BYTES = 2**31 - 1


def output_column(name: str, parts: list[Any], type_: pa.DataType, backend: Backend) -> NewColumn:
    """Concatenate the values of all batches of a partition; returned with their type."""
    if not parts:
        empty = pa.array([], type_) if tensor_type(type_) is None else arrow_rows(name, [], type_)
        return empty, type_
    is_arrow = any(isinstance(part, pa.Array) for part in parts)
    if not is_arrow and len({part.shape[1:] for part in parts}) == 1:
        return backend.numpy.concatenate(parts), type_
    arrays = [
        part if isinstance(part, pa.Array) else arrow_rows(name, list(part), type_)
        for part in parts
    ]
    chunked = pa.chunked_array(arrays)
    return (chunked if chunked.nbytes > _MOST_BYTES else pa.concat_arrays(arrays)), type_


def _item(type_: pa.DataType) -> tuple[np.dtype, tuple[int | None, ...]]:
    """NumPy dtype and shape of each value; None for any length."""
    if (tensors := tensor_type(type_)) is not None:
        return np.dtype(tensors.value_type.to_pandas_dtype()), tuple(tensors.shape)
    if pa.types.is_list(type_):
        return np.dtype(type_.value_type.to_pandas_dtype()), (None,)
    return np.dtype(type_.to_pandas_dtype()), ()


def _are_rows(values: Any, type_: pa.DataType) -> bool:
    """True if the values are taken row by row: they can't be one array."""
    is_vector = pa.types.is_list(type_) and is_value(type_.value_type)
    if not (is_value(type_) or is_vector or tensor_type(type_) is not None):
        return True
    if not isinstance(values, list) and getattr(values.dtype, "kind", "") != "O":
        return False
    if any(value is None for value in values):
        return not pa.types.is_floating(type_)
    return is_vector and (
        any(isinstance(value, (list, tuple)) and any(map(is_null, value)) for value in values)
        or len({len(value) if hasattr(value, "__len__") else None for value in values}) > 1
    )


def _check_count(name: str, shape: tuple[int, ...], count: int) -> None:
    if not shape or shape[0] != count:
        raise ResultError(
            f"{name!r} of shape {shape} for a batch of {count}",
            "; the first axis must have one value for each",
        )


# --- rows ---------------------------------------------------------------------------------------


def arrow_rows(name: str, rows: Sequence[Any] | np.ndarray, type_: pa.DataType) -> pa.Array:
    """Arrow array of rows that are arrays, tensors, lists, dicts or None, as the type is nested.

    Raises
    ------
    ResultError
        Naming the output ``name``, if a row has not the type.
    """
    if not isinstance(rows, np.ndarray):  # of numbers that were cast already
        rows = [with_none(row) for row in rows]
    if (tensors := tensor_type(type_)) is not None:
        array = tensor_array([_tensor(name, row, tensors) for row in rows], tensors)
        return array if isinstance(type_, pa.BaseExtensionType) else array.storage.cast(type_)
    if is_value(type_):
        return _number_array(name, rows, type_)
    if not (is_list(type_) or pa.types.is_struct(type_)):
        texts = [storable(row) if isinstance(row, str) else row for row in rows]
        return _leaves(name, texts, type_)
    mask = pa.array([row is None for row in rows], pa.bool_())
    if is_list(type_):
        return _lists(name, list(rows), type_, mask)
    names = [field.name for field in type_]
    for row in rows:
        if row is not None and (not isinstance(row, Mapping) or not set(row) <= set(names)):
            raise _misfit(name, row, type_, f": give dicts of {', '.join(names)}")
    fields = [
        arrow_rows(name, [None if row is None else row.get(field.name) for row in rows], field.type)
        for field in type_
    ]
    return pa.StructArray.from_arrays(fields, fields=list(type_), mask=mask)


def _tensor(name: str, row: object, type_: pa.FixedShapeTensorType) -> np.ndarray | None:
    if row is None:
        return None
    array = _host_cast(name, row, type_.value_type)
    if array.shape != tuple(type_.shape):
        raise _misfit(name, row, type_)
    return array


def _number_array(name: str, rows: Sequence[Any] | np.ndarray, type_: pa.DataType) -> pa.Array:
    if isinstance(rows, np.ndarray):
        return pa.array(_host_cast(name, rows, type_), type_)
    missing = [row is None for row in rows]
    if all(missing):
        return pa.nulls(len(rows), type_)
    # In place of null one of the values: beside another number NumPy might round them all.
    instead = rows[missing.index(False)]
    values = _host_cast(name, [instead if row is None else row for row in rows], type_)
    if values.ndim != 1:
        raise _misfit(name, instead, type_)
    return pa.array(values, type_, mask=np.array(missing))


def _lists(name: str, rows: Sequence[Any], type_: pa.DataType, mask: pa.Array) -> pa.Array:
    lists = [_items(name, row, type_) for row in rows]
    item = type_.value_type
    if is_value(item) and all(isinstance(items, np.ndarray) for items in lists):
        items: Any = np.concatenate([np.empty(0, item.to_pandas_dtype()), *lists])
    else:
        items = list(chain.from_iterable(lists))
    lengths = np.array([len(items) for items in lists], np.int64)
    return list_array(type_, lengths, arrow_rows(name, items, item), mask)


def _items(name: str, row: Any, type_: pa.DataType) -> Any:
    """The items of one list: an array (k,) of numbers, or a sequence of anything."""
    has_values = is_value(type_.value_type)
    is_sequence = isinstance(row, (list, tuple))
    if row is None or (is_sequence and not row):
        return np.empty(0, type_.value_type.to_pandas_dtype()) if has_values else []
    is_array = hasattr(row, "__array__") and not isinstance(row, (str, bytes, np.generic))
    if not (is_sequence or (is_array and row.ndim)):
        raise _misfit(name, row, type_)
    if not has_values or (is_sequence and any(map(is_null, row))):
        return list(row)
    array = _host_cast(name, row, type_.value_type)
    if array.ndim != 1:
        raise _misfit(name, row, type_)
    return array


def _leaves(name: str, values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Values as Arrow converts them."""
    try:
        return pa.array(values, type_)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if len(values) == 1:
            raise _misfit(name, values[0], type_) from error
        for value in values:
            _leaves(name, [value], type_)
        raise


def _misfit(name: str, value: object, type_: pa.DataType, why: str = "") -> ResultError:
    return ResultError(
        f"{shown(value)} in {name!r}", f", and outputs= says {type_name(type_)} for each image{why}"
    )


# --- numbers ------------------------------------------------------------------------------------


def _host_cast(name: str, values: Any, type_: pa.DataType) -> np.ndarray:
    """Numbers as an array of an Arrow type's values, on the host."""
    host, dtype = get_backend("pandas"), np.dtype(type_.to_pandas_dtype())
    is_sequence = isinstance(values, (list, tuple))
    values = [_on_host(value) for value in values] if is_sequence else _on_host(values)
    array: np.ndarray = _cast(name, _numbers(name, values, dtype, host), dtype, host)
    return array


def _cast(name: str, array: Array, dtype: np.dtype, backend: Backend) -> Array:
    lossy = first_lossy(array, dtype, backend.numpy)
    if lossy is not None:
        raise ResultError(f"{shown(lossy)} in {name!r}, which {dtype} can't hold")
    return array.astype(dtype, copy=False)


def _numbers(name: str, values: Any, dtype: np.dtype, backend: Backend) -> Array:
    """Check a result of numbers or booleans: an array, which `_cast` casts."""
    try:
        array = as_array(values, backend)
        # NumPy makes floats of a list of integers and floats, or of uint64 and int64.
        may_be_rounded = isinstance(values, list) and array.dtype.kind == "f"
        if array.dtype == object or (may_be_rounded and dtype.kind in "iu"):
            rows = values if isinstance(values, (list, tuple)) else array.tolist()
            objects = np.array([_as_python(row) for row in rows], object)
            if dtype.kind == "f":
                numbers = objects.astype(np.float64)  # None becomes NaN, which is stored as null
            else:
                integers = [int(number) for number in objects.flat]  # which Arrow would truncate
                for number, integer in zip(objects.flat, integers, strict=True):
                    if number != integer:
                        raise ResultError(f"{shown(number)} in {name!r}, which {dtype} can't hold")
                type_ = pa.int64() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
                leaves = _leaves(name, integers, type_)
                numbers = leaves.to_numpy(zero_copy_only=False).reshape(objects.shape)
            array = backend.numpy.asarray(numbers)
    except ResultError:
        raise
    except (ValueError, TypeError, OverflowError):
        array = None
    if array is None or array.dtype.kind not in "biuf":
        raise ResultError(
            f"{shown(values)} as {name!r}, which is no array of numbers ({dtype})",
            ": give a number for each image, or for each a vector, all of one length",
        )
    return array


def _as_python(value: object) -> Any:
    return np.asarray(_on_host(value)).tolist() if hasattr(value, "__array__") else value


# Float types of torch and JAX that NumPy does not have, by the start of their names.
_SMALL_FLOATS = ("torch.bfloat16", "torch.float8", "bfloat16", "float8")

# From here on float64 does not represent all integers.
_MAX_EXACT = 2.0**53


def as_array(values: Any, backend: Backend) -> Array:
    """Convert a result to an array of the backend; tensors may have gradients, on any device."""
    is_list = isinstance(values, (list, tuple))
    if is_list:
        values = [_convertible(value, backend) for value in values]
    else:
        values = _convertible(values, backend)
    if backend.device == "cpu":
        return np.asarray(values)
    if not is_list and _is_on_gpu(values):
        return backend.numpy.asarray(values)
    if is_list and values and all(map(_is_on_gpu, values)):
        return backend.numpy.stack([backend.numpy.asarray(value) for value in values])
    # Through NumPy: CuPy converts neither None among numbers, nor lists of other arrays.
    array = np.asarray([_on_host(value) for value in values] if is_list else values)
    return backend.numpy.asarray(array) if array.dtype.kind in "biuf" else array


def _is_on_gpu(value: object) -> bool:
    return hasattr(value, "__cuda_array_interface__")


def _on_host(value: Any) -> Any:
    if not _is_on_gpu(value):
        return value
    return value.cpu() if hasattr(value, "cpu") else value.get()


def _convertible(values: Any, backend: Backend) -> Any:
    """Detach a tensor, and cast it if NumPy lacks its dtype; return anything else unchanged."""
    if hasattr(values, "detach"):
        values = values.detach()
        if backend.device == "cpu":
            values = values.cpu()
    if str(getattr(values, "dtype", "")).startswith(_SMALL_FLOATS):
        return values.float() if hasattr(values, "float") else values.astype("float32")
    return values


def first_lossy(array: Array, dtype: np.dtype, numpy: ArrayModule) -> Any:
    """A value of an array that ``dtype`` cannot hold; None if it can hold all of them.

    Float types may round values within their range. Integers and booleans must be exact. ``numpy``
    is the array's library.
    """
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        return _first(array, numpy.isfinite(array) & ~numpy.isfinite(cast))
    if dtype.kind == "b":
        return _first(array, (array != 0) & (array != 1))
    if array.dtype.kind == "f":
        inexact = array != numpy.trunc(array)
        if array.dtype == np.float64:
            inexact |= numpy.abs(array) >= _MAX_EXACT
        value = _first(array, inexact)
        if value is not None:
            return value
    # Python's integers compare exactly; NumPy would cast uint64 to float64.
    least, most = array.min().item(), array.max().item()
    bounds = np.iinfo(dtype)
    if least < bounds.min:
        return least
    return most if most > bounds.max else None


def _first(array: Array, mask: Array) -> Any:
    return array[mask][0].item() if mask.any() else None


def checked_images(name: str, values: object, count: int, backend: Backend) -> list[Any]:
    """Check a result of images: a list with an array (height, width, channels) or None for each."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        values = list(values)
    if isinstance(values, (list, tuple)):
        given, advice = f"a list of {len(values)}", ""
        images = [None if is_null(value) else as_array(value, backend) for value in values]
        fits = len(values) == count
    else:
        batch = as_array(values, backend)
        given, advice = f"an array of shape {batch.shape}", _gray_advice(batch.ndim == 3)
        fits = batch.ndim == 4 and len(batch) == count
        images = list(batch) if fits else []
    if not fits:
        raise ResultError(
            f"{given} as the images {name!r} of a batch of {count}",
            ": give an array (n, height, width, channels), or a list of arrays (height, width, "
            f"channels){advice}",
        )
    for image in images:
        if image is None:
            continue
        has_values = image.dtype in VALUE_TYPES.values()
        if image.ndim != 3 or not has_values or not image.size:
            cast = "" if has_values else "; image.clip(0, 255).astype('uint8') makes them"
            raise ResultError(
                f"an image of shape {image.shape} and type {image.dtype} in {name!r}",
                ": images are (height, width, channels) of uint8, uint16 or float32, with a pixel "
                f"at least{cast}{_gray_advice(image.ndim == 2)}",
            )
    return images


def _gray_advice(is_gray: bool) -> str:
    return "; give gray images a channel, image[..., None]" if is_gray else ""


def with_image_column(
    frame: DataFrame,
    name: str,
    images: Sequence[Array | None],
    rows: Sequence[int],
    backend: Backend,
) -> DataFrame:
    """Add a column of images for ``rows``, null in all other rows."""
    by_row = {
        row: backend.numpy.asarray(image)  # on its device
        for row, image in zip(rows, images, strict=True)
        if image is not None
    }
    errors = [None if row in by_row else "missing" for row in range(len(frame))]
    # An empty frame may be the meta, which a client without a GPU builds: don't use CuPy.
    library = backend.numpy if len(frame) else np
    pixels = pixels_of([by_row.get(row) for row in range(len(frame))], errors, library)
    return backend.with_images(frame, pixels, name, None)


def with_reasons(
    frame: DataFrame, name: str, reasons: Mapping[int, str], backend: Backend
) -> DataFrame:
    """Write the reasons of failed rows to a column of strings, where it has none yet.

    The column is added if the frame has none of this name.
    """
    values: list[str | None] = [None] * len(frame)
    if name in frame.columns:
        column = backend.to_arrow(frame[[name]]).column(0)
        type_ = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (is_text(type_) or pa.types.is_null(type_)):
            raise ArgumentError(
                f"errors='null' writes its reasons to the column {name!r}, which is of "
                f"{type_}, not of strings: rename it first"
            )
        values = column.to_pylist()
    for row, reason in reasons.items():
        values[row] = values[row] or reason
    return backend.with_columns(frame, {name: (values, pa.string())}, range(len(frame)))
