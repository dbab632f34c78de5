"""Images in batches, and a function over them: ``map_batches``, one partition at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import whole_number
from dask_image_ingest.dataset import is_settled, looks_at
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.frames import Backend, NewColumn, backend_of, joined
from dask_image_ingest.ops.batch_function import BatchFunction


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
        function: Callable | None = None
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            images = joined([arrays[row] for row in batch], backend)
            try:
                function = self.function.get() if function is None else function
                given = function(images)
            except FunctionError:
                raise
            except Exception as error:
                raise self.function.failed(error, frame, batch) from error
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
    if not _makes_callables(function) if isinstance(function, type) else not callable(function):
        raise ArgumentError(
            f"map_batches needs a function, or a class with a method __call__, not {function!r}"
        )
    if not isinstance(outputs, Mapping) or not outputs:
        raise ArgumentError(
            "outputs= says which columns the function makes, and their types: "
            "outputs={'embedding': 'list<float32>', 'score': 'float32', 'label': 'string'}"
        )
    batch_size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
    types = {name: output_type(name, type_) for name, type_ in outputs.items()}
    twice = [name for name in types if name in columns]
    if twice:
        raise ArgumentError(
            f"outputs= names {', '.join(map(repr, twice))}, which the frame has already: take "
            "another name, or leave that column out with columns="
        )
    return BatchMap(BatchFunction(function), types, batch_size, image, tuple(columns))


def _makes_callables(kind: type) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)


def output_type(name: str, given: Any) -> pa.DataType:
    """The Arrow type of an output: a number, a string, bytes, or a list of numbers.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(name, str):
        raise ArgumentError(f"outputs= names {name!r}: the names of columns are strings")
    type_ = given
    try:
        if given is None:
            type_ = None  # which NumPy takes for float64
        elif isinstance(given, str):
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
