"""Outputs of ``map_batches``: a function's results, checked against types, as columns.

Results come as arrays of NumPy or CuPy, tensors, or lists; numbers are cast if that is lossless.
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
    """Check a result for ``count`` images; gives an array of the output's type, or a list.

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
    misfit = first_lossy(values, dtype, backend.numpy)
    if misfit is not None:
        other = f"list<{values.dtype}>" if vector else values.dtype
        raise ArgumentError(
            f"map_batches: the function gave {misfit} in {name!r}, which {dtype} can't hold: say "
            f"outputs={{{name!r}: '{other}'}}, or give values that it can"
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
    """An array of numbers or truth values.

    Raises
    ------
    ArgumentError
    """
    if values is None or isinstance(values, (str, bytes)):
        raise _no_numbers(name, values)
    try:
        array = given_array(values, backend)
        if array.dtype == object:
            # Python's numbers; None is as good as NaN.
            numbers = np.array(array.tolist(), np.float64 if dtype.kind == "f" else None)
            array = backend.numpy.asarray(numbers)
    except (ValueError, TypeError, OverflowError) as error:
        raise _no_numbers(name, values) from error
    if array.dtype.kind not in "biuf":
        raise _no_numbers(name, values)
    return array


def _no_numbers(name: str, values: Any) -> ArgumentError:
    return ArgumentError(
        f"map_batches: the function gave {shown(values)} as {name!r}, which is no array of "
        "numbers: give a number for each image, or for each a vector, all of one length"
    )


def _name(type_: pa.DataType) -> str:
    return str(np.dtype(type_.to_pandas_dtype()))


def _item(type_: pa.DataType) -> Any:
    return (type_.value_type if pa.types.is_list(type_) else type_).to_pandas_dtype()


def _is_text_or_bytes(type_: pa.DataType) -> bool:
    return is_text(type_) or bool(pa.types.is_binary(type_))


# Types of floats that NumPy has no name for, torch's and those of JAX.
_SMALL_FLOATS = ("torch.bfloat16", "torch.float8", "bfloat16", "float8")

# From here on float64 leaves out whole numbers, as NumPy makes them of a list of mixed types.
_INEXACT = 2.0**53


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


def first_lossy(array: Any, dtype: np.dtype, numpy: Any) -> Any:
    """A value of an array of numbers that ``dtype`` can't hold; None where it holds all of them.

    A float type rounds what it gets, as wide as it reaches; whole numbers and truth values have to
    be there exactly.

    Parameters
    ----------
    array
        An array of NumPy or CuPy.
    dtype
        The type that is asked for.
    numpy
        The library of the array.
    """
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            made = array.astype(dtype)
        return _first(array, numpy.isfinite(array) & ~numpy.isfinite(made))
    if dtype.kind == "b":
        return _first(array, (array != 0) & (array != 1))
    if array.dtype.kind == "f":
        wrong = array != numpy.trunc(array)
        if array.dtype == np.float64:
            wrong |= numpy.abs(array) >= _INEXACT
        broken = _first(array, wrong)
        if broken is not None:
            return broken
    # As Python's numbers, which compare by value whatever their types are.
    least, most = array.min().item(), array.max().item()
    bounds = np.iinfo(dtype)
    if least < bounds.min:
        return least
    return most if most > bounds.max else None


def _first(array: Any, wrong: Any) -> Any:
    return array[wrong][0].item() if wrong.any() else None


def checked_images(name: str, values: Any, count: int, backend: Backend) -> list[Any]:
    """The images of a batch, one array (height, width, channels) for each.

    Raises
    ------
    ArgumentError
    """
    if isinstance(values, (list, tuple)):
        told = f"a list of {len(values)}"
        images = [given_array(value, backend) for value in values]
        fits = len(values) == count
    else:
        batch = given_array(values, backend)
        told, fits = f"an array of shape {batch.shape}", batch.ndim == 4 and len(batch) == count
        images = list(batch) if fits else []
    if not fits:
        raise ArgumentError(
            f"map_batches: the function gave {told} as the images {name!r} of a batch of {count}: "
            "give an array (n, height, width, channels), or a list of arrays (height, width, "
            "channels)"
        )
    for image in images:
        if image.ndim != 3 or image.dtype not in VALUE_TYPES.values() or not image.size:
            raise ArgumentError(
                f"map_batches: the function gave an image of shape {image.shape} and type "
                f"{image.dtype} in {name!r}: images are (height, width, channels) of uint8, uint16 "
                "or float32, with a pixel at least; .clip(0, 255).astype('uint8') makes them"
            )
    return images


def with_image_column(
    frame: Any, name: str, images: Sequence[Any], rows: Sequence[int], backend: Backend
) -> Any:
    """``frame`` with a column of images, which belong to ``rows`` of it; null in the others."""
    found = dict(zip(rows, images, strict=True))
    errors = [None if row in found else "missing" for row in range(len(frame))]
    # Of a frame of no rows no GPU is asked: a client plans with one, and may have none.
    library = backend.numpy if len(frame) else np
    pixels = pixels_of([found.get(row) for row in range(len(frame))], errors, library)
    return backend.with_images(frame, pixels, name, None)
