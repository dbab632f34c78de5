"""Images in batches, and a function over them: ``map_batches``, one partition at a time."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from dask.base import tokenize
from dask.dataframe.dask_expr import _expr as dx

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.expr import is_settled
from dask_image_ingest.frames import Backend, NewColumn, backend_of
from dask_image_ingest.late_decode import looks_at

# Models that a worker process keeps: enough for a query that uses a few side by side.
_MODELS_KEPT = 4


def joined(arrays: Sequence[Any], backend: Backend) -> Any:
    """Images as one array (n, height, width, channels), or as a list where their shapes differ.

    Images that lie side by side in memory are not copied.
    """
    first = arrays[0]
    if any(array.shape != first.shape for array in arrays):
        return list(arrays)
    start, size = _address(first), first.nbytes
    if all(_address(array) == start + n * size for n, array in enumerate(arrays)):
        return backend.numpy.lib.stride_tricks.as_strided(
            first, (len(arrays), *first.shape), (size, *first.strides)
        )
    return backend.numpy.stack(arrays)


def _address(array: Any) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """A user's function, or the class whose instances are called, built once in each process."""

    function: Callable
    token: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", tokenize(self.function))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchFunction) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __dask_tokenize__(self) -> str:
        return self.token

    def get(self) -> Callable:
        """What is to be called with a batch, in this process."""
        made_by = self.function
        while isinstance(made_by, functools.partial):
            made_by = made_by.func
        if not isinstance(made_by, type):
            return self.function
        with _building:
            return _instance(self)


# Threads of one worker must not each build a model.
_building = threading.Lock()


@functools.lru_cache(_MODELS_KEPT)
def _instance(function: BatchFunction) -> Callable:
    return function.function()


@dataclass(frozen=True)
class BatchMap:
    """What ``map_batches`` does to every partition."""

    function: BatchFunction
    outputs: Mapping[str, pa.DataType]
    batch_size: int
    image: str
    kept: tuple[str, ...]

    def __dask_tokenize__(self) -> tuple:
        outputs = [(name, str(type_)) for name, type_ in self.outputs.items()]
        return (self.function.token, outputs, self.batch_size, self.image, self.kept)

    def needed(self, columns: Sequence[str]) -> list[str]:
        """The columns, of these, that are read."""
        return [name for name in columns if name in self.kept or name == self.image]

    def __call__(self, frame: Any) -> Any:
        """The kept columns of a pandas or cuDF frame, and the outputs beside them."""
        backend = backend_of(frame)
        arrays = backend.arrays(frame[self.image])
        rows = [row for row, array in enumerate(arrays) if array is not None]
        results: dict[str, list] = {name: [] for name in self.outputs}
        function = self.function.get() if rows else None
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            given = function(joined([arrays[row] for row in batch], backend))  # type: ignore[misc]
            for name, values in self._checked(given, len(batch), backend):
                results[name].append(values)
        columns = {name: self._column(name, parts, backend) for name, parts in results.items()}
        return backend.with_columns(frame[list(self.kept)], columns, rows)

    def meta(self, frame: Any) -> Any:
        """What becomes of an empty frame, without calling the function."""
        backend = backend_of(frame)
        columns = {name: self._column(name, [], backend) for name in self.outputs}
        return backend.with_columns(frame[list(self.kept)], columns, [])

    def _checked(self, given: Any, count: int, backend: Backend) -> Iterator[tuple[str, Any]]:
        if not isinstance(given, Mapping):
            if len(self.outputs) != 1:
                raise ArgumentError(
                    f"map_batches: the function gave one {type(given).__name__} for the "
                    f"{len(self.outputs)} outputs {', '.join(self.outputs)}: give a dict of arrays"
                )
            given = {next(iter(self.outputs)): given}
        if given.keys() != self.outputs.keys():
            raise ArgumentError(
                f"map_batches: the function gave {', '.join(map(repr, given)) or 'nothing'}, and "
                f"outputs= names {', '.join(map(repr, self.outputs))}"
            )
        for name, values in given.items():
            yield name, _checked_values(name, values, self.outputs[name], count, backend)

    def _column(self, name: str, parts: list, backend: Backend) -> NewColumn:
        type_ = self.outputs[name]
        if _is_text(type_):
            return [value for part in parts for value in part], type_
        if len({part.shape[1:] for part in parts}) > 1:
            raise ArgumentError(
                f"map_batches: the vectors of {name!r} differ in length from batch to batch"
            )
        empty = np.empty((0, 0) if pa.types.is_list(type_) else 0, _item(type_))
        return backend.numpy.concatenate(parts) if parts else empty, type_


class MapBatches(dx.Elemwise):
    """``map_batches`` of a lazy frame; columns and filters that need no outputs go below it."""

    _parameters: ClassVar = ["frame", "batch_map"]
    _filter_passthrough = True
    batch_map: BatchMap

    @staticmethod
    def operation(frame: Any, batch_map: BatchMap) -> Any:
        """Map one partition."""
        return batch_map(frame)

    @functools.cached_property
    def _meta(self):
        return self.batch_map.meta(self.frame._meta)

    def _filter_passthrough_available(self, parent, dependents) -> bool:
        return super()._filter_passthrough_available(parent, dependents) and not looks_at(
            parent.predicate, self, frozenset(self.batch_map.outputs)
        )

    def _simplify_down(self):
        needed = self.batch_map.needed(self.frame.columns)
        if needed != list(self.frame.columns):
            return type(self)(self.frame[needed], self.batch_map)
        return None

    def _simplify_up(self, parent, dependents):
        if is_settled(self, dependents):
            return None
        if not isinstance(parent, (dx.Projection, dx.Index)):
            return super()._simplify_up(parent, dependents)
        wanted = dx.determine_column_projection(self, parent, dependents)
        wanted = {wanted} if isinstance(wanted, str) else set(wanted)
        if wanted.isdisjoint(self.batch_map.outputs):
            return type(parent)(self.frame, *parent.operands[1:])
        kept = tuple(name for name in self.batch_map.kept if name in wanted)
        if kept == self.batch_map.kept:
            return None
        narrower = type(self)(self.frame, replace(self.batch_map, kept=kept))
        return type(parent)(narrower, *parent.operands[1:])


def make_batch_map(
    function: Callable,
    outputs: Mapping[str, Any],
    batch_size: int,
    image: str,
    columns: Sequence[str],
) -> BatchMap:
    """Check the arguments of ``map_batches`` and bring them together.

    Raises
    ------
    ArgumentError
    """
    if not callable(function):
        raise ArgumentError(f"map_batches needs a function or a class, not {function!r}")
    if not isinstance(outputs, Mapping) or not outputs:
        raise ArgumentError(
            "outputs= says which columns the function makes, and their types: "
            "outputs={'embedding': 'list<float32>', 'score': 'float32', 'label': 'string'}"
        )
    check_batch_size(batch_size)
    types = {name: output_type(name, type_) for name, type_ in outputs.items()}
    kept = tuple(name for name in columns if name not in types)
    return BatchMap(BatchFunction(function), types, batch_size, image, kept)


def check_batch_size(batch_size: int) -> None:
    """Refuse what is no positive number.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ArgumentError(f"batch_size={batch_size!r}; pass a positive number of images")


def output_type(name: str, given: Any) -> pa.DataType:
    """The Arrow type of an output: a number, a string, bytes, or a list of numbers.

    Raises
    ------
    ArgumentError
    """
    type_ = given
    try:
        if isinstance(given, str):
            inside = re.fullmatch(r"list<(?:item: )?(\w+)>", given)
            type_ = pa.list_(_alias(inside[1])) if inside else _alias(given)
        elif not isinstance(given, pa.DataType):
            type_ = pa.string() if given is str else pa.from_numpy_dtype(np.dtype(given))
    except (ValueError, TypeError, pa.ArrowNotImplementedError):
        type_ = None
    number = type_.value_type if type_ is not None and pa.types.is_list(type_) else type_
    is_number = number is not None and (
        pa.types.is_integer(number) or pa.types.is_floating(number) or pa.types.is_boolean(number)
    )
    if type_ is None or not (is_number or _is_text(type_)):
        raise ArgumentError(
            f"outputs={{{name!r}: {given!r}}}: choose 'float32', 'int64', 'bool' or another "
            "number, 'string', 'binary', or a vector of numbers such as 'list<float32>'"
        )
    return type_


def _alias(name: str) -> pa.DataType:
    return pa.string() if name == "str" else pa.type_for_alias(name)


def _checked_values(
    name: str, values: Any, type_: pa.DataType, count: int, backend: Backend
) -> Any:
    if _is_text(type_):
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        shape: tuple = (len(values),)
    else:
        values = backend.numpy.asarray(values)
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
    return values if _is_text(type_) else values.astype(_item(type_), copy=False)


def _name(type_: pa.DataType) -> str:
    return str(np.dtype(type_.to_pandas_dtype()))


def _item(type_: pa.DataType) -> Any:
    return (type_.value_type if pa.types.is_list(type_) else type_).to_pandas_dtype()


def _is_text(type_: pa.DataType) -> bool:
    return any(
        is_(type_)
        for is_ in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
        )
    )
