"""``map_batches``: a function called with batches of columns; on a partition, and as a node."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_choice, check_flag, whole_number
from dask_image_ingest.dataset.plan import AppendsColumns, PreservesRows, is_badly_projected
from dask_image_ingest.errors import (
    ArgumentError,
    FunctionError,
    MissingDependencyError,
    portable_causes,
)
from dask_image_ingest.frames import (
    IMAGE,
    Backend,
    NullsError,
    backend_of,
    is_value,
    row_values,
    tensor_type,
)
from dask_image_ingest.ops.batch_function import (
    BatchFunction,
    may_be_of_a_row,
    rows_text,
    turn,
    waits,
)
from dask_image_ingest.ops.outputs import (
    ResultError,
    checked_images,
    checked_values,
    output_column,
    output_type,
    with_image_column,
    with_reasons,
)
from dask_image_ingest.typedefs import AnyFrame, Array, DataFrame, TypeLike

logger = logging.getLogger("dask_image_ingest")


class MapBatches(AppendsColumns, PreservesRows):
    """Node of ``map_batches``; projections and filters that need no outputs are pushed below it."""

    _parameters: ClassVar = ["frame", "batch_map"]
    batch_map: BatchMap

    @staticmethod
    def operation(frame: DataFrame, batch_map: BatchMap) -> DataFrame:
        """Map one partition."""
        return batch_map(frame)

    @property
    def step(self) -> str:
        """Name for dashboards: that of the function."""
        function = self.batch_map.function.name.rpartition(".")[2]
        return "map" + "".join(filter(str.isalpha, function))

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.batch_map.meta(self.frame._meta)

    @property
    def added(self) -> frozenset[Any]:
        """The outputs of the function, and `error` if it has the reasons of failures."""
        return frozenset({*self.batch_map.outputs, *self.batch_map.reasons})

    def _simplify_down(self) -> dx.Expr | None:
        needed = self.batch_map.needed(self.frame.columns)
        if needed != list(self.frame.columns) and not is_badly_projected(self.frame):
            return type(self)(dx.Projection(self.frame, needed), self.batch_map)
        return None

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        if wanted.isdisjoint(self.added):
            return type(parent)(self.frame, *parent.operands[1:])
        kept = tuple(name for name in self.batch_map.kept if name in wanted)
        if kept == self.batch_map.kept:
            return None
        narrower = type(self)(self.frame, replace(self.batch_map, kept=kept))
        return type(parent)(narrower, *parent.operands[1:])


# Columns that say which sample a row is, and why it has no image: no output replaces them.
_OF_ROWS = ("__key__", "__url__", "offset", "nbytes", "error")

#: What becomes of a row for which the function fails.
FunctionErrors: TypeAlias = Literal["raise", "null"]

# Outputs of a batch, by name; and what makes them for rows, by their positions.
_Outputs: TypeAlias = list[tuple[str, Any]]
_Call: TypeAlias = Callable[[range], _Outputs]


@dataclass(frozen=True)
class BatchMap:
    """``map_batches`` of one partition."""

    function: BatchFunction
    outputs: Mapping[str, pa.DataType]
    batch_size: int
    inputs: tuple[str, ...]  # columns that are the function's arguments
    skip_missing: bool  # rows without an image: their outputs are null
    kept: tuple[str, ...]  # columns of the result beside the outputs
    errors: FunctionErrors = "raise"

    def __repr__(self) -> str:
        return f"{self.function.name} -> {', '.join(self.outputs)}"  # Dask prints it with a frame

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        outputs = [(name, str(type_)) for name, type_ in self.outputs.items()]
        options = (outputs, self.batch_size, self.inputs, self.skip_missing, self.kept, self.errors)
        return (type(self).__name__, self.function.token, *options)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The column with the reasons of failures, if they are not raised."""
        return ("error",) if self.errors == "null" else ()

    def needed(self, columns: Sequence[str]) -> list[str]:
        """Those of ``columns`` that are inputs or kept."""
        return [name for name in columns if name in self.kept or name in self.inputs]

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Map a pandas or cuDF frame: its kept columns and the outputs."""
        rows, columns = self.arguments(frame)
        if not rows:
            return self.meta(frame)
        with portable_causes():
            results, done, failures = self._results(frame, rows, columns)
        self._log(failures, frame, len(rows))
        return self._assemble(frame, results, done, failures)

    def arguments(self, frame: DataFrame) -> tuple[list[int], list[InputColumn]]:
        """The rows that the function gets, and the columns of its arguments in these."""
        rows = list(range(len(frame)))
        if self.skip_missing:
            rows = rows_with_images(frame, self.inputs)
        return rows, input_columns(frame, self.inputs, rows) if rows else []

    def _results(
        self, frame: DataFrame, rows: Sequence[int], columns: Sequence[InputColumn]
    ) -> tuple[dict[str, list[Any]], list[int], dict[int, str]]:
        """Call the function with some rows: outputs, the rows that they belong to, and failures.

        Outputs are lists of batches by name; failures are reasons by row.
        """
        results: dict[str, list[Any]] = {name: [] for name in self.outputs}
        done: list[int] = []
        failures: dict[int, str] = {}
        call = functools.partial(self._call, self.function.get(), columns, rows, frame)
        attempts = _in_halves if self.errors == "null" else _until_failure
        for start in range(0, len(rows), self.batch_size):
            batch = range(start, min(start + self.batch_size, len(rows)))
            for positions, outcome in attempts(call, batch):
                found = [rows[position] for position in positions]
                if not isinstance(outcome, BaseException):
                    done += found
                    for name, values in outcome:
                        results[name].append(values)
                elif self.errors == "null":
                    failures[found[0]] = self.function.reason(outcome)
                else:
                    raise self.function.failure(outcome, frame, found) from outcome
            if not done and isinstance(outcome, ResultError):  # so the function is at fault
                raise self.function.failure(outcome, frame, found) from outcome
        return results, done, failures

    def _call(
        self,
        function: Callable[..., Any],
        columns: Sequence[InputColumn],
        rows: Sequence[int],
        frame: DataFrame,
        positions: range,
    ) -> _Outputs:
        """The outputs of one batch, by name."""
        backend = backend_of(frame)
        of_batch = slice(positions.start, positions.stop)
        arguments = [
            column.batch(of_batch, backend, copies=self.function.writes) for column in columns
        ]
        try:
            with turn(backend):
                result = function(*arguments)
                return list(self._check(result, len(positions), backend))
        except (FunctionError, MissingDependencyError, KeyboardInterrupt):  # not by these images
            raise
        except BaseException as error:
            if may_be_of_a_row(error):
                raise _RowFailedError from error
            batch = [rows[position] for position in positions]
            raise self.function.failure(error, frame, batch) from error

    def _log(self, failures: Mapping[int, str], frame: DataFrame, count: int) -> None:
        """Log how many rows failed."""
        if failures:
            row, reason = next(iter(failures.items()))
            first = rows_text(frame, [row], self.function.noun)
            logger.warning(
                "%s: %d of %d rows failed, first %s: %s",
                self.function.called_by, len(failures), count, first, reason,
            )  # fmt: skip

    def meta(self, frame: DataFrame) -> DataFrame:
        """The empty output frame, built without calling the function."""
        return self._assemble(frame, {name: [] for name in self.outputs}, [], {})

    def _assemble(
        self,
        frame: DataFrame,
        results: Mapping[str, list[Any]],
        rows: list[int],
        failures: Mapping[int, str],
    ) -> DataFrame:
        """The kept columns, with the outputs of all batches in the columns' ``rows``."""
        backend = backend_of(frame)
        mapped = frame[list(self.kept)]
        images = {name: parts for name, parts in results.items() if self.outputs[name] == IMAGE}
        columns = {
            name: output_column(name, parts, self.outputs[name], backend)
            for name, parts in results.items()
            if name not in images
        }
        if columns:
            mapped = backend.with_columns(mapped, columns, rows)
        for name, parts in images.items():
            arrays = [array for part in parts for array in part]
            mapped = with_image_column(mapped, name, arrays, rows, backend)
        for name in self.reasons:
            mapped = with_reasons(mapped, name, failures, backend)
        return mapped[list(dict.fromkeys([*self.kept, *self.outputs, *self.reasons]))]

    def _check(self, result: Any, count: int, backend: Backend) -> Iterator[tuple[str, Any]]:
        """The outputs of one call by name, checked."""
        if not isinstance(result, Mapping):
            if len(self.outputs) != 1:
                raise ResultError(
                    f"one {type(result).__name__} for the {len(self.outputs)} outputs "
                    f"{', '.join(self.outputs)}",
                    ": give a dict of arrays",
                )
            result = {next(iter(self.outputs)): result}
        if result.keys() != self.outputs.keys():
            raise ResultError(
                f"a dict of {', '.join(map(repr, result)) or 'nothing'}",
                f", and outputs= names {', '.join(map(repr, self.outputs))}",
            )
        for name, values in result.items():
            if self.outputs[name] == IMAGE:
                yield name, checked_images(name, values, count, backend)
            else:
                yield name, checked_values(name, values, self.outputs[name], count, backend)


class _RowFailedError(Exception):
    """A call failed, with the function's error as the cause."""

    @property
    def error(self) -> BaseException:
        """The function's error."""
        return self.__cause__  # type: ignore[return-value]


def _until_failure(call: _Call, rows: range) -> Iterator[tuple[range, _Outputs | BaseException]]:
    """Call with all rows; where that fails, yield the first row that fails alone, and its error.

    If no half of some rows fails, these rows are yielded; and all rows with a wrong result, which
    shows what is wrong.
    """
    try:
        yield rows, call(rows)
    except _RowFailedError as failed:
        all_rows: tuple[range, BaseException] = (rows, failed.error)
        if not isinstance(failed.error, ResultError) and len(rows) > 1:
            parts = _in_halves(call, rows, fails=True)
            yield next((part for part in parts if isinstance(part[1], BaseException)), all_rows)
        else:
            yield all_rows


def _in_halves(
    call: _Call, rows: range, fails: bool = False
) -> Iterator[tuple[range, _Outputs | BaseException]]:
    """Call with all rows; where that fails, with halves, down to the rows that fail alone.

    Yields rows, in order, with their result; or one row with its error. With ``fails`` the rows
    are known to fail together, so that they are not tried again.
    """
    if not fails or len(rows) == 1:
        try:
            yield rows, call(rows)
            return
        except _RowFailedError as failed:
            if len(rows) == 1:
                yield rows, failed.error
                return
    middle = len(rows) // 2
    first_failed = False
    for part, outcome in _in_halves(call, rows[:middle]):
        first_failed |= isinstance(outcome, BaseException)
        yield part, outcome
    yield from _in_halves(call, rows[middle:], fails=not first_failed)


def apply_batch_map(frame: AnyFrame, batch_map: BatchMap) -> AnyFrame:
    """The columns that a `BatchMap` keeps and makes of a frame; lazy if the frame is."""
    if isinstance(frame, dx.FrameBase):
        return dx.new_collection(MapBatches(frame.expr, batch_map))
    return batch_map(frame)


def make_batch_map(
    function: Callable[..., Any],
    outputs: Mapping[str, TypeLike],
    batch_size: int,
    inputs: Sequence[str],
    skip_missing: bool,
    columns: Sequence[str],
    errors: FunctionErrors = "raise",
    **of_function: Any,
) -> BatchMap:
    """Check the arguments of ``map_batches``, and build a `BatchMap` that keeps ``columns``.

    ``of_function`` are fields of `BatchFunction`.
    """
    batch_function = BatchFunction(function, **of_function)
    called_by = batch_function.called_by
    is_class = isinstance(function, type)
    if not callable(function) or (is_class and "__call__" not in dir(function)):
        raise ArgumentError(
            f"{called_by} needs a function, or a class with a method __call__, not {function!r}"
        )
    if waits(function) and called_by != "map_rows":
        raise ArgumentError(
            f"{called_by} calls a function with one batch after the other, which need not be "
            "async: map_rows waits for many calls at a time, each with one row"
        )
    if not isinstance(outputs, Mapping) or not outputs:
        raise ArgumentError(
            "outputs= says which columns the function makes, and their types: "
            "outputs={'embedding': 'list<float32>', 'score': 'float32', 'label': 'string'}"
        )
    batch_size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
    types = {name: output_type(name, type_) for name, type_ in outputs.items()}
    check_flag("skip_missing", skip_missing)
    check_choice("errors", errors, ("raise", "null"))
    if errors == "null" and "error" in types:
        raise ArgumentError(
            "errors='null' writes its reasons to the column 'error', which outputs= names too: "
            "choose another name for the output"
        )
    replaced = [name for name in types if name in _OF_ROWS and name in columns]
    if replaced:
        raise ArgumentError(
            f"{called_by}: an output {replaced[0]!r} would replace the column that says where a "
            "row comes from, or why it has no image: choose another name, or drop the column first"
        )
    kept = tuple(name for name in columns if name not in types)
    return BatchMap(batch_function, types, batch_size, tuple(inputs), skip_missing, kept, errors)


# --- inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputColumn:
    """The values of one column: an array of numbers, or a list with None for null."""

    values: Any
    has_images: bool = False

    def batch(self, rows: slice, backend: Backend, *, copies: bool = True) -> Any:
        """The values of some rows; as ``copies`` if the function may write to them.

        Read-only views would do for NumPy; CuPy and torch have none.
        """
        values = self.values[rows]
        if not isinstance(values, list):
            return values.copy() if copies else values
        if self.has_images and len({_shape_and_dtype(value) for value in values}) == 1:
            return values if values[0] is None else backend.numpy.stack(values)
        return [_copied(value) for value in values] if copies else values

    def on_host(self, backend: Backend) -> InputColumn:
        """The column in host memory."""
        if backend.device == "cpu":
            return self
        values = self.values
        on_host = _on_host(values, backend) if isinstance(values, list) else backend.host(values)
        return InputColumn(on_host, self.has_images)

    def row(self, number: int) -> Any:
        """The value of one row, as a copy: an array of NumPy, or Python's own types."""
        value = self.values[number]
        return value.item() if isinstance(value, np.generic) else _copied(value)


def _copied(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.copy() if hasattr(value, "copy") else value


def _on_host(value: object, backend: Backend) -> Any:
    """Values with their arrays in host memory, in any nesting."""
    if isinstance(value, dict):
        return {name: _on_host(item, backend) for name, item in value.items()}
    if isinstance(value, list):
        return [_on_host(item, backend) for item in value]
    return backend.host(value) if hasattr(value, "__cuda_array_interface__") else value


def _shape_and_dtype(image: Array | None) -> Any:
    return None if image is None else (image.shape, image.dtype)


def rows_with_images(frame: DataFrame, names: Sequence[Hashable]) -> list[int]:
    """Numbers of the rows that have an image in every image column among ``names``."""
    backend = backend_of(frame)
    columns = [
        backend.arrays(frame[name]) for name in names if backend.is_images(frame[name].dtype)
    ]
    return [row for row in range(len(frame)) if all(images[row] is not None for images in columns)]


def input_columns(
    frame: DataFrame, names: Sequence[Hashable], rows: Sequence[int]
) -> list[InputColumn]:
    """The values of columns in some rows of a pandas or cuDF frame."""
    return [_input_column(frame[[name]], name, rows) for name in names]


def _input_column(frame: DataFrame, name: Hashable, rows: Sequence[int]) -> InputColumn:
    backend = backend_of(frame)
    if backend.is_images(frame[name].dtype):
        images = backend.arrays(frame[name])
        return InputColumn([images[row] for row in rows], has_images=True)
    if len(rows) < len(frame):
        frame = frame.take(rows)
    try:
        column = backend.to_arrow(frame).column(0)  # one chunk may not hold all of it
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ArgumentError(f"inputs= names {name!r}, a column of mixed types: {error}") from error
    try:
        if is_value(column.type) or tensor_type(column.type):
            values = backend.values(frame[name])
            if values is None or (column.null_count and not pa.types.is_floating(column.type)):
                raise NullsError
            return InputColumn(values)
        values = [value for chunk in column.chunks for value in row_values(chunk)]
        return InputColumn([_on_device(value, backend) for value in values])
    except NullsError:
        raise ArgumentError(
            f"inputs= names {name!r}, which has nulls in a row that the function gets; an array of "
            f"{column.type} has no value for these: fill or drop them first, "
            f"ddf[ddf[{name!r}].notnull()]"
        ) from None


def _on_device(values: object, backend: Backend) -> Any:
    is_numeric = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
    return backend.numpy.asarray(values) if is_numeric else values
