"""``map_batches``: columns in batches to a function, on a partition and as an expression."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_flag, whole_number
from dask_image_ingest.dataset import AppendsColumns, PreservesRows
from dask_image_ingest.errors import ArgumentError, FunctionError, MissingDependencyError
from dask_image_ingest.frames import IMAGE, Backend, backend_of
from dask_image_ingest.ops.batch_function import BatchFunction
from dask_image_ingest.ops.inputs import input_columns, rows_with_images
from dask_image_ingest.ops.outputs import (
    checked_images,
    checked_values,
    output_column,
    output_type,
    with_image_column,
)


class MapBatches(AppendsColumns, PreservesRows):
    """``map_batches`` of a lazy frame; columns and filters that need no outputs go below it."""

    _parameters: ClassVar = ["frame", "batch_map"]
    batch_map: BatchMap

    @staticmethod
    def operation(frame: Any, batch_map: BatchMap) -> Any:
        """Map one partition."""
        return batch_map(frame)

    @property
    def step(self) -> str:
        """The function's name."""
        function = self.batch_map.function.name.rpartition(".")[2]
        return "map" + "".join(filter(str.isalpha, function))

    @functools.cached_property
    def _meta(self) -> Any:
        return self.batch_map.meta(self.frame._meta)

    @property
    def added(self) -> frozenset[Any]:
        """The outputs of the function."""
        return frozenset(self.batch_map.outputs)

    def _simplify_down(self) -> dx.Expr | None:
        needed = self.batch_map.needed(self.frame.columns)
        if needed != list(self.frame.columns):
            return type(self)(self.frame[needed], self.batch_map)
        return None

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if wanted.isdisjoint(self.added):
            return type(parent)(self.frame, *parent.operands[1:])
        kept = tuple(name for name in self.batch_map.kept if name in wanted)
        if kept == self.batch_map.kept:
            return None
        narrower = type(self)(self.frame, replace(self.batch_map, kept=kept))
        return type(parent)(narrower, *parent.operands[1:])


@dataclass(frozen=True)
class BatchMap:
    """``map_batches`` for one partition."""

    function: BatchFunction
    outputs: Mapping[str, pa.DataType]
    batch_size: int
    inputs: tuple[str, ...]
    skip_missing: bool
    kept: tuple[str, ...]

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        outputs = [(name, str(type_)) for name, type_ in self.outputs.items()]
        asked = (outputs, self.batch_size, self.inputs, self.skip_missing, self.kept)
        return (self.function.token, *asked)

    def needed(self, columns: Sequence[str]) -> list[str]:
        """The columns, of these, that are read."""
        return [name for name in columns if name in self.kept or name in self.inputs]

    def __call__(self, frame: Any) -> Any:
        """The kept columns of a pandas or cuDF frame, and the outputs beside them."""
        backend = backend_of(frame)
        rows = list(range(len(frame)))
        if self.skip_missing:
            rows = rows_with_images(frame, self.inputs)
        columns = input_columns(frame, self.inputs, rows)
        results: dict[str, list[Any]] = {name: [] for name in self.outputs}
        function: Callable[..., Any] | None = None
        for start in range(0, len(rows), self.batch_size):
            places = slice(start, start + self.batch_size)
            batch = rows[places]
            arguments = [column.batch(places, backend) for column in columns]
            try:
                function = self.function.get() if function is None else function
                given = function(*arguments)
            except (FunctionError, MissingDependencyError):  # not for these images alone
                raise
            except Exception as error:
                raise self.function.failed(error, frame, batch) from error
            try:
                for name, values in self._checked(given, len(batch), backend):
                    results[name].append(values)
            except ArgumentError as error:
                raise self.function.misfit(error, frame, batch) from error
            except Exception as error:
                raise self.function.failed(error, frame, batch) from error
        return self._assembled(frame, results, rows)

    def meta(self, frame: Any) -> Any:
        """The empty output frame, made without calling the function."""
        return self._assembled(frame, {name: [] for name in self.outputs}, [])

    def _assembled(self, frame: Any, results: Mapping[str, list[Any]], rows: list[int]) -> Any:
        """The kept columns, and the outputs that batches of these rows gave."""
        backend = backend_of(frame)
        kept = frame[list(self.kept)]
        pictures = {name: parts for name, parts in results.items() if self.outputs[name] == IMAGE}
        columns = {
            name: output_column(name, parts, self.outputs[name], backend)
            for name, parts in results.items()
            if name not in pictures
        }
        made = backend.with_columns(kept, columns, rows) if columns else kept
        for name, parts in pictures.items():
            images = [image for part in parts for image in part]
            made = with_image_column(made, name, images, rows, backend)
        return made[[*self.kept, *self.outputs]]

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
            if self.outputs[name] == IMAGE:
                yield name, checked_images(name, values, count, backend)
            else:
                yield name, checked_values(name, values, self.outputs[name], count, backend)


def make_batch_map(
    function: Callable[..., Any],
    outputs: Mapping[str, Any],
    batch_size: int,
    inputs: Sequence[str],
    skip_missing: bool,
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
    check_flag("skip_missing", skip_missing)
    called = BatchFunction(function)
    return BatchMap(called, types, batch_size, tuple(inputs), skip_missing, tuple(columns))


def _makes_callables(kind: type) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)
