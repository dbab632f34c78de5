"""Outputs of ``map_batches``: the function's results, checked against types, as columns.

Results are arrays of NumPy or CuPy, tensors, or lists. Numbers are cast if that is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.decode import VALUE_TYPES, pixels_of
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import IMAGE, Backend, NewColumn, is_text, parse_type


def output_type(name: str, given: Any) -> pa.DataType:
    """Parse the type of an output: a number, a string, bytes, a list of numbers, or an image.

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
    """Check a result for ``count`` images: an array of the output's type, or a list of texts.

    Raises
    ------
    ArgumentError
        If there is not one value for each image, or the type cannot hold a value.
    """
    if _is_text_or_bytes(type_):
        values = _text_or_bytes(name, values, type_)
        shape: tuple[int, ...] = (len(values),)
    else:
        if pa.types.is_list(type_) and isinstance(values, list) and any(v is None for v in values):
            raise _not_numbers(name, values)
        values = _numbers(name, values, np.dtype(_item_type(type_)), backend)
        shape = values.shape
    if not shape or shape[0] != count:
        raise ArgumentError(
            f"map_batches: the function gave {name!r} of shape {shape} for a batch of {count} "
            "images; the first axis must have one value for each"
        )
    vector = pa.types.is_list(type_)
    if len(shape) != 1 + vector:
        item = "a vector" if vector else "a number"
        instead = _type_name(type_.value_type) if vector else f"list<{_type_name(type_)}>"
        raise ArgumentError(
            f"map_batches: the function gave {name!r} of shape {shape}, and outputs= says that it "
            f"is {item} for each image"
            + (f": say outputs={{{name!r}: {instead!r}}}" if len(shape) in (1, 2) else "")
        )
    if _is_text_or_bytes(type_):
        return values
    dtype = np.dtype(_item_type(type_))
    lossy = first_lossy(values, dtype, backend.numpy)
    if lossy is not None:
        other = f"list<{values.dtype}>" if vector else values.dtype
        raise ArgumentError(
            f"map_batches: the function gave {lossy} in {name!r}, which {dtype} can't hold: say "
            f"outputs={{{name!r}: '{other}'}}, or give values that it can"
        )
    return backend.numpy.asarray(values.astype(dtype, copy=False))


def output_column(name: str, parts: list[Any], type_: pa.DataType, backend: Backend) -> NewColumn:
    """Concatenate the values of all batches of a partition; returned with their type."""
    if _is_text_or_bytes(type_):
        return [value for part in parts for value in part], type_
    if len({part.shape[1:] for part in parts}) > 1:
        raise ArgumentError(
            f"map_batches: the vectors of {name!r} differ in length from batch to batch"
        )
    empty = np.empty((0, 0) if pa.types.is_list(type_) else 0, _item_type(type_))
    return backend.numpy.concatenate(parts) if parts else empty, type_


def _text_or_bytes(name: str, values: Any, type_: pa.DataType) -> list[Any]:
    """Check a result of strings or bytes: a list, with None for null.

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
    if not _have_type(values, type_):
        other = next(value for value in values if not _have_type([value], type_))
        raise ArgumentError(
            f"map_batches: the function gave {shown(other)} in {name!r}: outputs= says {kind}; "
            "give these, or say another type"
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
    ArgumentError
    """
    if values is None or isinstance(values, (str, bytes)):
        raise _not_numbers(name, values)
    try:
        array = as_array(values, backend)
        if array.dtype == object:
            # Python numbers; for floats, None becomes NaN, which is stored as null.
            numbers = np.array(array.tolist(), np.float64 if dtype.kind == "f" else None)
            array = backend.numpy.asarray(numbers)
    except (ValueError, TypeError, OverflowError) as error:
        raise _not_numbers(name, values) from error
    if array.dtype.kind not in "biuf":
        raise _not_numbers(name, values)
    return array


def _not_numbers(name: str, values: Any) -> ArgumentError:
    return ArgumentError(
        f"map_batches: the function gave {shown(values)} as {name!r}, which is no array of "
        "numbers: give a number for each image, or for each a vector, all of one length"
    )


def _type_name(type_: pa.DataType) -> str:
    return str(np.dtype(type_.to_pandas_dtype()))


def _item_type(type_: pa.DataType) -> Any:
    return (type_.value_type if pa.types.is_list(type_) else type_).to_pandas_dtype()


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
    """Check a result of images: a list with an array (height, width, channels) for each.

    Raises
    ------
    ArgumentError
    """
    if isinstance(values, (list, tuple)):
        given, advice = f"a list of {len(values)}", ""
        images = [as_array(value, backend) for value in values]
        fits = len(values) == count
    else:
        batch = as_array(values, backend)
        given, advice = f"an array of shape {batch.shape}", _gray_advice(batch.ndim == 3)
        fits = batch.ndim == 4 and len(batch) == count
        images = list(batch) if fits else []
    if not fits:
        raise ArgumentError(
            f"map_batches: the function gave {given} as the images {name!r} of a batch of {count}: "
            "give an array (n, height, width, channels), or a list of arrays (height, width, "
            f"channels){advice}"
        )
    for image in images:
        is_value = image.dtype in VALUE_TYPES.values()
        if image.ndim != 3 or not is_value or not image.size:
            cast = "" if is_value else "; image.clip(0, 255).astype('uint8') makes them"
            raise ArgumentError(
                f"map_batches: the function gave an image of shape {image.shape} and type "
                f"{image.dtype} in {name!r}: images are (height, width, channels) of uint8, uint16 "
                f"or float32, with a pixel at least{cast}{_gray_advice(image.ndim == 2)}"
            )
    return images


def _gray_advice(is_gray: bool) -> str:
    return "; give gray images a channel, image[..., None]" if is_gray else ""


def with_image_column(
    frame: Any, name: str, images: Sequence[Any], rows: Sequence[int], backend: Backend
) -> Any:
    """Add a column of images for ``rows``, null in all other rows."""
    by_row = dict(zip(rows, images, strict=True))
    errors = [None if row in by_row else "missing" for row in range(len(frame))]
    # An empty frame may be the meta, which a client without a GPU builds: don't use CuPy.
    library = backend.numpy if len(frame) else np
    pixels = pixels_of([by_row.get(row) for row in range(len(frame))], errors, library)
    return backend.with_images(frame, pixels, name, None)
