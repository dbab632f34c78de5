"""Outputs of ``map_batches``: the function's results, checked against types, as columns.

Results are arrays of NumPy or CuPy, tensors, or lists. Numbers are cast if that is lossless.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
    parse_type,
    tensor_type,
    type_name,
)
from dask_image_ingest.ops.arrow_rows import (
    ResultError,
    arrow_rows,
    is_null,
    storable_values,
    with_none,
)


def output_type(name: str, given: Any) -> pa.DataType:
    """Parse the type of an output: a number, a string, bytes, a list, a struct, a tensor, an image.

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
    return _is_supported(type_.value_type) if is_list(type_) else _is_plain(type_)


def _is_plain(type_: pa.DataType) -> bool:
    return is_value(type_) or _is_text_or_bytes(type_)


def checked_values(name: str, values: Any, type_: pa.DataType, count: int, backend: Backend) -> Any:
    """Check a result for ``count`` images.

    Returns
    -------
    array, list or pyarrow.Array
        A rectangular array of the output's type on the backend's device; a list of strings or
        bytes; an Arrow array, if rows are None, or nested, or differ in length.

    Raises
    ------
    ResultError
        If there is not one value for each image, or the type cannot hold a value.
    """
    values = with_none(values)
    if isinstance(values, (list, tuple)):
        values = [with_none(value) for value in values]
    if _is_text_or_bytes(type_):
        values = _text_or_bytes(name, values, type_)
        _check_count(name, (len(values),), count)
        return values
    if _has_rows(values, type_):
        rows = list(values)
        _check_count(name, (len(rows),), count)
        return arrow_rows(name, rows, type_, functools.partial(_cast, name))
    dtype, shape = _item(type_)
    array = _numbers(name, values, dtype, backend)
    _check_count(name, array.shape, count)
    if not shape and array.shape[1:] == (1,):  # as a layer of one output gives
        array = array[:, 0]
    if array.ndim != 1 + len(shape) or any(
        wanted not in (None, got) for wanted, got in zip(shape, array.shape[1:], strict=True)
    ):
        item = (
            "a vector"
            if shape == (None,)
            else f"an array of shape {shape}"
            if shape
            else "a number"
        )
        given = f"{dtype}" if array.ndim == 1 else f"list<{dtype}>"
        advice = f": say outputs={{{name!r}: {given!r}}}" if array.ndim in (1, 2) else ""
        raise ResultError(
            f"{name!r} of shape {array.shape}",
            f", and outputs= says that it is {item} for each image{advice}",
        )
    _check_exact(name, array, dtype, backend, is_vector=bool(shape))
    return backend.numpy.asarray(array.astype(dtype, copy=False))


def value_array(name: str, value: Any, type_: pa.DataType) -> pa.Array:
    """Check the value of an output for one row: an Arrow array of length 1.

    Raises
    ------
    ResultError
        If the type cannot hold it.
    """
    host = get_backend("pandas")
    values = checked_values(name, [value], type_, 1, host)
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, list) or is_value(type_):
        return pa.array(values, type_, from_pandas=True)  # NaN is null
    return arrow_rows(name, list(values), type_, functools.partial(_cast, name))


def output_column(name: str, parts: list[Any], type_: pa.DataType, backend: Backend) -> NewColumn:
    """Concatenate the values of all batches of a partition; returned with their type."""
    if _is_text_or_bytes(type_):
        return [value for part in parts for value in part], type_
    if not parts:
        if not _is_rectangular(type_):
            return pa.array([], type_), type_
        dtype, shape = _item(type_)
        return np.empty((0, *(length or 0 for length in shape)), dtype), type_
    is_arrow = any(isinstance(part, pa.Array) for part in parts)
    if is_arrow or len({part.shape[1:] for part in parts}) > 1:
        cast = functools.partial(_cast, name)
        arrays = [
            part if isinstance(part, pa.Array) else arrow_rows(name, list(part), type_, cast)
            for part in parts
        ]
        return _concatenated(arrays), type_
    return backend.numpy.concatenate(parts), type_


# A chunk of an Arrow column holds no more bytes of strings, by its 32-bit offsets.
_MOST_BYTES = 2**31 - 1


def _concatenated(arrays: Sequence[pa.Array]) -> pa.Array | pa.ChunkedArray:
    chunks: list[list[pa.Array]] = [[]]
    nbytes = 0
    for array in arrays:
        nbytes += array.nbytes
        if chunks[-1] and nbytes > _MOST_BYTES:
            nbytes = array.nbytes
            chunks.append([])
        chunks[-1].append(array)
    whole = [pa.concat_arrays(chunk) for chunk in chunks]
    return whole[0] if len(whole) == 1 else pa.chunked_array(whole)


def _is_rectangular(type_: pa.DataType) -> bool:
    """True if the values of a batch can be one array."""
    is_vector = pa.types.is_list(type_) and is_value(type_.value_type)
    return is_value(type_) or is_vector or tensor_type(type_) is not None


def _item(type_: pa.DataType) -> tuple[np.dtype, tuple[int | None, ...]]:
    """NumPy dtype and shape of each value; None for any length."""
    if (tensors := tensor_type(type_)) is not None:
        return np.dtype(tensors.value_type.to_pandas_dtype()), tuple(tensors.shape)
    if pa.types.is_list(type_):
        return np.dtype(type_.value_type.to_pandas_dtype()), (None,)
    return np.dtype(type_.to_pandas_dtype()), ()


def _has_rows(values: Any, type_: pa.DataType) -> bool:
    """True if the values are taken row by row: they can't be one array."""
    is_sequence = isinstance(values, (list, tuple))
    if not _is_rectangular(type_):
        if not is_sequence and not hasattr(values, "__array__"):
            raise _not_rows(values, type_)
        return True
    if not is_sequence and getattr(getattr(values, "dtype", None), "kind", "") != "O":
        return False
    if any(value is None for value in values):
        return not pa.types.is_floating(type_)
    if pa.types.is_list(type_) and any(_has_none(value) for value in values):
        return True
    return pa.types.is_list(type_) and len({_length(value) for value in values}) > 1


def _has_none(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(map(is_null, value))


def _length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") else None


def _not_rows(values: Any, type_: pa.DataType) -> ResultError:
    return ResultError(
        shown(values),
        f", and outputs= says {type_name(type_)}: give a list with one value for each image",
    )


def _check_count(name: str, shape: tuple[int, ...], count: int) -> None:
    if not shape or shape[0] != count:
        raise ResultError(
            f"{name!r} of shape {shape} for a batch of {count}",
            "; the first axis must have one value for each",
        )


def _check_exact(
    name: str, values: Any, dtype: np.dtype, backend: Backend, is_vector: bool = False
) -> None:
    lossy = first_lossy(values, dtype, backend.numpy)
    if lossy is not None:
        raise _lossy(name, lossy, dtype, values.dtype.name, is_vector)


def _lossy(
    name: str, value: Any, dtype: np.dtype, other: str | None, is_vector: bool
) -> ResultError:
    """The error for a value that a type can't hold; ``other`` can."""
    given = f"list<{other}>" if is_vector else other
    advice = f"say outputs={{{name!r}: '{given}'}}, or " if other else ""
    gave = f"{shown(value)} in {name!r}, which {dtype} can't hold"
    return ResultError(gave, f": {advice}give values that it can")


def _cast(name: str, values: Any, dtype: np.dtype) -> np.ndarray:
    """Numbers as an array of a dtype, on the host.

    Raises
    ------
    ResultError
    """
    host = get_backend("pandas")
    is_list = isinstance(values, (list, tuple))
    values = [_on_host(value) for value in values] if is_list else _on_host(values)
    array = _numbers(name, values, dtype, host)
    _check_exact(name, array, dtype, host)
    result: np.ndarray = array.astype(dtype, copy=False)
    return result


def _text_or_bytes(name: str, values: Any, type_: pa.DataType) -> list[Any]:
    """Check a result of strings or bytes: a list, with None for null.

    Raises
    ------
    ResultError
    """
    kind = "strings" if is_text(type_) else "bytes"
    if isinstance(values, (str, bytes, set, frozenset)) or not hasattr(values, "__iter__"):
        raise ResultError(
            f"{shown(values)} as {name!r}", f": give a list of {kind}, one for each image"
        )
    values = storable_values(values.tolist() if hasattr(values, "tolist") else list(values))
    if not _have_type(values, type_):
        other = next(value for value in values if not _have_type([value], type_))
        raise ResultError(
            f"{shown(other)} in {name!r}",
            f": outputs= says {kind}; give these, or say another type",
        )
    return values


def _have_type(values: list[Any], type_: pa.DataType) -> bool:
    try:
        pa.array(values, type_)
    except (pa.ArrowException, TypeError, ValueError):
        return False
    return True


def _numbers(name: str, values: Any, dtype: np.dtype, backend: Backend) -> Any:
    """Check a result of numbers or booleans: an array.

    Raises
    ------
    ResultError
    """
    if values is None or isinstance(values, (str, bytes)):
        raise _not_numbers(name, values, dtype)
    try:
        array = as_array(values, backend)
        if array.dtype == object or _may_be_rounded(values, array, dtype):
            is_list = isinstance(values, (list, tuple))
            rows = list(map(_as_python, values)) if is_list else array.tolist()
            array = backend.numpy.asarray(_exact_numbers(name, rows, dtype))
    except ResultError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise _not_numbers(name, values, dtype) from error
    if array.dtype.kind not in "biuf":
        raise _not_numbers(name, values, dtype)
    return array


def _may_be_rounded(values: Any, array: Any, dtype: np.dtype) -> bool:
    """True if NumPy may have made float64 of a list of integers."""
    if dtype.kind == "f" or array.dtype != np.float64 or not isinstance(values, (list, tuple)):
        return False
    return bool((abs(array) >= _MAX_EXACT).any())


def _as_python(value: Any) -> Any:
    return np.asarray(_on_host(value)).tolist() if hasattr(value, "__array__") else value


def _exact_numbers(name: str, rows: list[Any], dtype: np.dtype) -> np.ndarray:
    """Numbers as an array of a type; integers do not become floats on the way.

    Raises
    ------
    ResultError
        If the type can't hold one of them.
    TypeError, ValueError
        If one is no number.
    """
    objects = np.array(rows, object)
    numbers = [*objects.flat]
    for number in numbers:
        if not _holds(dtype, number):
            wider = (t for t in ("int64", "uint64") if all(_holds(np.dtype(t), n) for n in numbers))
            other = "float64" if isinstance(number, float) else next(wider, None)
            raise _lossy(name, number, dtype, other, objects.ndim > 1)
    # For floats, None becomes NaN, which is stored as null.
    return objects.astype(np.float64 if dtype.kind == "f" else dtype)


def _holds(dtype: np.dtype, number: Any) -> bool:
    """True if a type can hold a number of Python, floats rounded."""
    if dtype.kind == "f":
        try:
            if number is not None:
                math.isfinite(number)
        except OverflowError:  # an integer of 309 digits
            return False
        return True
    if not isinstance(number, (int, float, np.integer, np.floating, np.bool_)):
        raise TypeError
    if isinstance(number, (float, np.floating)):
        number = float(number)
        if not (abs(number) < _MAX_EXACT and number.is_integer()):
            return False
    if dtype.kind == "b":
        return number in (0, 1)
    return bool(np.iinfo(dtype).min <= int(number) <= np.iinfo(dtype).max)


def _not_numbers(name: str, values: Any, dtype: np.dtype) -> ResultError:
    return ResultError(
        f"{shown(values)} as {name!r}, which is no array of numbers ({dtype})",
        ": give a number for each image, or for each a vector, all of one length",
    )


def _is_text_or_bytes(type_: pa.DataType) -> bool:
    return is_text(type_) or bool(pa.types.is_binary(type_))


# Float types of torch and JAX that NumPy does not have, by the start of their names.
_SMALL_FLOATS = ("torch.bfloat16", "torch.float8", "bfloat16", "float8")

# From here on float64 does not represent all integers: NumPy converts lists of mixed numbers to it.
_MAX_EXACT = 2.0**53


def as_array(values: Any, backend: Backend) -> Any:
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


def _is_on_gpu(value: Any) -> bool:
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


def first_lossy(array: Any, dtype: np.dtype, numpy: Any) -> Any:
    """A value of an array that ``dtype`` cannot hold; None if it can hold all of them.

    Float types may round values within their range. Integers and booleans must be exact.

    Parameters
    ----------
    array
        Numbers, in NumPy or CuPy.
    dtype
        The type to cast to.
    numpy
        The array's library.
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


def _first(array: Any, mask: Any) -> Any:
    return array[mask][0].item() if mask.any() else None


def checked_images(name: str, values: Any, count: int, backend: Backend) -> list[Any]:
    """Check a result of images: a list with an array (height, width, channels) or None for each.

    Raises
    ------
    ResultError
    """
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
    frame: Any, name: str, images: Sequence[Any], rows: Sequence[int], backend: Backend
) -> Any:
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


def with_reasons(frame: Any, name: str, reasons: Mapping[int, str], backend: Backend) -> Any:
    """Write the reasons of failed rows to a column of strings, where it has none yet.

    The column is added if the frame has none of this name.

    Raises
    ------
    ArgumentError
        If the column has another type.
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
