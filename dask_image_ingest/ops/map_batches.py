"""``map_batches``: a function called with batches of columns; on a partition, and as a node.

Instances of a user's class, such as models, are kept between partitions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_choice, check_flag, whole_number
from dask_image_ingest.dataset.plan import AppendsColumns, PreservesRows, is_badly_projected
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    FunctionError,
    MissingDependencyError,
    portable_causes,
)
from dask_image_ingest.frames import IMAGE, Backend, backend_of
from dask_image_ingest.ops.arrow_rows import ResultError
from dask_image_ingest.ops.inputs import InputColumn, input_columns, rows_with_images
from dask_image_ingest.ops.outputs import (
    checked_images,
    checked_values,
    output_column,
    output_type,
    with_image_column,
    with_reasons,
)
from dask_image_ingest.url_secrets import error_text, without_secrets
from dask_image_ingest.user_functions import refuse_other_code, token_and_code

logger = logging.getLogger("dask_image_ingest")


def unwrapped(function: Any) -> Any:
    """The function or class of a ``functools.partial``; anything else itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def call_once(
    function: Callable[..., Any], called_by: str, method: str, argument: Any, what: str
) -> Any:
    """Call a method of a function, or of this process's instance of a class, in this process.

    Parameters
    ----------
    function
        As for ``map_batches``.
    called_by
        The function of this package that calls it, for errors.
    method
        The name of the method.
    argument
        Its argument.
    what
        The argument in errors.

    Raises
    ------
    FunctionError
        If it fails.
    """
    model = BatchFunction(function, called_by, method=method)
    call = model.get()
    try:
        return call(argument)
    except (FunctionError, MissingDependencyError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise FunctionError(
            f"{called_by}: {model.name} fails for {what}: {error_text(error)}"
        ) from error


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """A user's function, or a class whose instance, built once in each process, is called."""

    function: Callable[..., Any]
    called_by: str = "map_batches"  # the method, for errors
    returns: str = ""  # what the function has to return, if the method has no outputs=
    named: Callable[..., Any] | None = None  # what errors name, if it is in the function
    method: str = "__call__"  # of the function or instance, that is called with the batches
    noun: str = "images"  # what a batch has
    writes: bool = True  # to its arguments, perhaps
    token: str = field(init=False)
    code: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        token, code = token_and_code(self.function)
        object.__setattr__(self, "token", token)
        object.__setattr__(self, "code", code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchFunction) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __dask_tokenize__(self) -> str:
        return self.token

    @property
    def name(self) -> str:
        """Name in errors."""
        function = unwrapped(self.function if self.named is None else self.named)
        return getattr(function, "__qualname__", type(function).__name__)

    def get(self) -> Callable[..., Any]:
        """The function, or that of this process's instance of the class.

        Raises
        ------
        FunctionError
            If this process has another version of the function's module, or the class can't be
            instantiated.
        """
        refuse_other_code(f"{self.called_by}()", self.code)
        try:
            instance = self.function
            if isinstance(unwrapped(self.function), type):
                instance = models.get(self.token, self.function)
            # Not `__call__` of a function, which does not tell that it is `async def`.
            if self.method == "__call__":
                return instance
            called: Callable[..., Any] = getattr(instance, self.method)
            return called
        except (DaskImageIngestError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise FunctionError(
                f"{self.called_by}: {self.name} can't be instantiated: {error_text(error)}"
            ) from error

    def failure(
        self, error: BaseException, frame: Any, rows: Sequence[int], tries: str = ""
    ) -> FunctionError:
        """The error to raise if a call fails, naming the rows."""
        one_of = "one of " if len(rows) > 1 else ""
        which = f"{one_of}{_rows_text(frame, rows, self.noun)}"
        return FunctionError(
            f"{self.called_by}: {self.name} fails for {which}: {error_text(error)}{tries}"
        )

    def reason(self, error: BaseException) -> str:
        """Reason in the column `error` of a row for which a call fails."""
        text = f"gave {error.gave}" if isinstance(error, ResultError) else error_text(error)
        return without_secrets(f"function-failed: {self.name}: {text}")

    def told(self, frame: Any, row: int, reason: str) -> str:
        """The reason why a call failed for a row, in a text that names the row."""
        return f"{self.called_by}: {_rows_text(frame, [row], self.noun)}: {reason}"

    def wrong_result(self, error: ResultError, frame: Any, rows: Sequence[int]) -> ArgumentError:
        """The error to raise if the result does not match the outputs, naming the rows."""
        called = f"called with {_rows_text(frame, rows, self.noun)})"
        if self.returns:
            return ArgumentError(
                f"{self.called_by}: {self.name} gave {error.gave}: it has to give {self.returns} "
                f"({called}"
            )
        text = str(error).replace("map_batches: ", f"{self.called_by}: ", 1)
        return ArgumentError(f"{text} (the function is {self.name}, {called}")


def _rows_text(frame: Any, rows: Sequence[int], noun: str) -> str:
    """Describe a row, or the first and the last of some rows, for errors."""
    ends = list(dict.fromkeys([rows[0], rows[-1]]))
    names = [name for name in ("__key__", "__url__") if name in frame.columns]
    samples = backend_of(frame).to_arrow(frame[names].iloc[ends]).to_pylist() if names else []
    texts = [
        " of ".join(
            f"sample {sample[name]!r}" if name == "__key__" else f"{sample[name]}" for name in names
        )
        for sample in samples
    ] or [f"row {row} of a partition" for row in ends]
    return texts[0] if len(rows) == 1 else f"{len(rows)} {noun}, from {' to '.join(texts)}"


# More than the models of one query. In a notebook, each edit of a class adds another model with its
# memory.
_MAX_MODELS = 8


class Models:
    """Cache of models that drops the least recently used; each is built by one thread only."""

    def __init__(self) -> None:
        # Guards the attributes below; never held while a model is built.
        self._lock = threading.Lock()
        # A lock for each model being built, not one for all: a constructor may need another model.
        self._building: dict[str, threading.RLock] = {}
        self._models: OrderedDict[str, Callable[..., Any]] = OrderedDict()
        # Models of the parent process, in a fork.
        self._parents: tuple[Any, ...] = ()

    def get(self, token: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The model of this token; ``make`` builds it if it is not cached."""
        with self._lock:
            if token in self._models:
                self._models.move_to_end(token)
                return self._models[token]
            building = self._building.setdefault(token, threading.RLock())
        with building:
            with self._lock:
                if token in self._models:  # another thread has built it
                    return self._models[token]
                while len(self._models) >= _MAX_MODELS:  # first, to free the memory
                    self._models.popitem(last=False)
            try:
                model = make()
                with self._lock:
                    self._models[token] = model
            finally:
                with self._lock:
                    self._building.pop(token, None)
            return model

    def forked(self) -> None:
        """Reset the cache in a fork, where threads that held locks do not exist.

        The parent's models are kept, but not used: they may own GPU memory, which a fork can
        neither use nor free.
        """
        parents = (self._models, self._parents)
        self.__init__()  # type: ignore[misc]
        self._parents = parents


models = Models()

os.register_at_fork(after_in_child=models.forked)


class MapBatches(AppendsColumns, PreservesRows):
    """Node of ``map_batches``; projections and filters that need no outputs are pushed below it."""

    _parameters: ClassVar = ["frame", "batch_map"]
    batch_map: BatchMap

    @staticmethod
    def operation(frame: Any, batch_map: BatchMap) -> Any:
        """Map one partition."""
        return batch_map(frame)

    @property
    def step(self) -> str:
        """Name for dashboards: that of the function."""
        function = self.batch_map.function.name.rpartition(".")[2]
        return "map" + "".join(filter(str.isalpha, function))

    @functools.cached_property
    def _meta(self) -> Any:
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

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if wanted.isdisjoint(self.added):
            return type(parent)(self.frame, *parent.operands[1:])
        kept = tuple(name for name in self.batch_map.kept if name in wanted)
        if kept == self.batch_map.kept:
            return None
        narrower = type(self)(self.frame, replace(self.batch_map, kept=kept))
        return type(parent)(narrower, *parent.operands[1:])


# Columns that say which sample a row is, and why it has no image: no output replaces them.
_OF_ROWS = {
    "__key__": "which sample a row is",
    "__url__": "in which shard a row's sample is",
    "offset": "where a row's image is",
    "nbytes": "where a row's image is",
    "error": "why a row has no image",
}

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

    def __call__(self, frame: Any) -> Any:
        """Map a pandas or cuDF frame: its kept columns and the outputs."""
        rows, columns = self.arguments(frame)
        if not rows:
            return self.meta(frame)
        with portable_causes():
            results, done, failures = self._results(frame, rows, columns)
        self._log(failures, frame, len(rows))
        return self._assemble(frame, results, done, failures)

    def arguments(self, frame: Any) -> tuple[list[int], list[InputColumn]]:
        """The rows that the function gets, and the columns of its arguments in these."""
        rows = list(range(len(frame)))
        if self.skip_missing:
            rows = rows_with_images(frame, self.inputs)
        return rows, input_columns(frame, self.inputs, rows) if rows else []

    def _results(
        self, frame: Any, rows: Sequence[int], columns: Sequence[InputColumn]
    ) -> tuple[dict[str, list[Any]], list[int], dict[int, str]]:
        """Call the function with some rows: outputs, the rows that they belong to, and failures.

        Outputs are lists of batches by name; failures are reasons by row.
        """
        results: dict[str, list[Any]] = {name: [] for name in self.outputs}
        done: list[int] = []
        failures: dict[int, str] = {}
        right: list[int] = []
        call = functools.partial(self._call, self.function.get(), columns, rows, frame, right)
        for start in range(0, len(rows), self.batch_size):
            batch = range(start, min(start + self.batch_size, len(rows)))
            for positions, outcome in self._attempts(call, batch, rows, frame):
                if isinstance(outcome, BaseException):
                    failures[rows[positions[0]]] = self.function.reason(outcome)
                    continue
                done += [rows[position] for position in positions]
                for name, values in outcome:
                    results[name].append(values)
        return results, done, failures

    def _attempts(
        self, call: _Call, batch: range, rows: Sequence[int], frame: Any
    ) -> Iterator[tuple[range, _Outputs | BaseException]]:
        """Call with a batch: rows and their outputs, or a row and its error if it costs no more.

        Raises
        ------
        FunctionError
            If the function fails, with ``errors="raise"``, naming the row.
        """
        if self.errors == "null":
            yield from _in_halves(call, batch)
            return
        try:
            yield batch, call(batch)
        except _RowFailedError as failed:
            positions, error = _first_that_fails(call, batch, failed)
            found = [rows[position] for position in positions]
            raise self.function.failure(error, frame, found) from error

    def _call(
        self,
        function: Callable[..., Any],
        columns: Sequence[InputColumn],
        rows: Sequence[int],
        frame: Any,
        right: list[int],
        positions: range,
    ) -> _Outputs:
        """The outputs of one batch, by name.

        Appends to ``right`` if some outputs match ``outputs=``: then others that do not are the
        fault of their rows.

        Raises
        ------
        _RowFailedError
            If the function fails for it, and some of its rows may be the cause.
        """
        backend = backend_of(frame)
        batch = [rows[position] for position in positions]
        of_batch = slice(positions.start, positions.stop)
        arguments = [
            column.batch(of_batch, backend, copies=self.function.writes) for column in columns
        ]
        try:
            result = function(*arguments)
        except (FunctionError, MissingDependencyError, KeyboardInterrupt):  # not by these images
            raise
        except BaseException as error:
            raise self._failure(error, frame, batch) from error
        try:
            outputs = list(self._check(result, len(batch), backend))
        except ResultError as error:
            wrong = self._wrong_row(result, len(batch), backend)
            if wrong:
                right.append(positions.start)
            if right and self.errors == "null":
                raise _RowFailedError from error
            row, found = wrong or (slice(None), error)
            raise self.function.wrong_result(found, frame, batch[row]) from error
        except Exception as error:
            raise self._failure(error, frame, batch) from error
        right.append(positions.start)
        return outputs

    def _failure(self, error: BaseException, frame: Any, rows: Sequence[int]) -> Exception:
        """The exception for a failed call: looked into by halves, if a row may be the cause."""
        if may_be_of_a_row(error):
            return _RowFailedError()
        return self.function.failure(error, frame, rows)

    def _log(self, failures: Mapping[int, str], frame: Any, count: int) -> None:
        """Log how many rows failed."""
        if failures:
            row, reason = next(iter(failures.items()))
            first = _rows_text(frame, [row], self.function.noun)
            logger.warning(
                "%s: %d of %d rows failed, first %s: %s",
                self.function.called_by, len(failures), count, first, reason,
            )  # fmt: skip

    def meta(self, frame: Any) -> Any:
        """The empty output frame, built without calling the function."""
        return self._assemble(frame, {name: [] for name in self.outputs}, [], {})

    def _assemble(
        self,
        frame: Any,
        results: Mapping[str, list[Any]],
        rows: list[int],
        failures: Mapping[int, str],
    ) -> Any:
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

    def _wrong_row(
        self, result: Any, count: int, backend: Backend
    ) -> tuple[slice, ResultError] | None:
        """The first row with wrong outputs, and its error; None if all rows are wrong."""
        outputs = result if isinstance(result, Mapping) else {next(iter(self.outputs)): result}
        errors: list[ResultError | None] = []
        for row in range(count):
            one = slice(row, row + 1)
            try:
                if any(len(values) != count for values in outputs.values()):
                    return None
                of_row = {name: values[one] for name, values in outputs.items()}
                list(self._check(of_row, 1, backend))
                errors.append(None)
            except ResultError as error:
                errors.append(error)
            except Exception:  # a result that has no rows
                return None
        wrong = [(slice(row, row + 1), error) for row, error in enumerate(errors) if error]
        return wrong[0] if wrong and None in errors else None


class _RowFailedError(Exception):
    """A call failed, with the function's error as the cause."""

    @property
    def error(self) -> BaseException:
        """The function's error."""
        return self.__cause__  # type: ignore[return-value]


# By name, so that neither library is imported: torch's error is a RuntimeError.
_GPU_ERRORS = {"OutOfMemoryError", "CUDARuntimeError", "AcceleratorError"}

# Of the GPU; of pools and threads in a process that is ending.
_TEXTS = (
    "CUDA error",
    "cannot schedule new futures",
    "can't start new thread",
    "can't create new thread",
)


def may_be_of_a_row(error: BaseException) -> bool:
    """False for errors that other rows would have too: of memory, the GPU, an import, an exit."""
    if not isinstance(error, (Exception, asyncio.CancelledError)):
        return False
    for each in causes(error):
        if isinstance(each, (MemoryError, ImportError, FunctionError)):
            return False
        if any(text in error_text(each) for text in _TEXTS):
            return False
        if not _GPU_ERRORS.isdisjoint(kind.__name__ for kind in type(each).__mro__):
            return False
    return True


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, those that led to it, and those that they hold, as of clients that retry."""
    errors: list[Any] = [error]
    seen = set[int]()
    for each in errors:
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            held = (*each.args, getattr(each, "reason", None), *getattr(each, "exceptions", ()))
            errors += [each.__cause__, each.__context__, *held]


def _first_that_fails(
    call: _Call, rows: range, failed: _RowFailedError
) -> tuple[range, BaseException]:
    """The first row that fails alone, with its error; all rows if no half of them fails."""
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]) if middle else ():
        try:
            call(half)
        except _RowFailedError as failed_half:
            return _first_that_fails(call, half, failed_half)
    return rows, failed.error


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


def apply_batch_map(frame: Any, batch_map: BatchMap) -> Any:
    """The columns that a `BatchMap` keeps and makes of a frame; lazy if the frame is."""
    if isinstance(frame, dx.FrameBase):
        return dx.new_collection(MapBatches(frame.expr, batch_map))
    return batch_map(frame)


def make_batch_map(
    function: Callable[..., Any],
    outputs: Mapping[str, Any],
    batch_size: int,
    inputs: Sequence[str],
    skip_missing: bool,
    columns: Sequence[str],
    errors: FunctionErrors = "raise",
    **of_function: Any,
) -> BatchMap:
    """Check the arguments of ``map_batches``, and build a `BatchMap` that keeps ``columns``.

    ``of_function`` are fields of `BatchFunction`.

    Raises
    ------
    ArgumentError
    """
    batch_function = BatchFunction(function, **of_function)
    called_by = batch_function.called_by
    if not _makes_callables(function) if isinstance(function, type) else not callable(function):
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
            f"{called_by}: an output {replaced[0]!r} would replace the column that says "
            f"{_OF_ROWS[replaced[0]]}: "
            "choose another name, or drop the column first"
        )
    kept = tuple(name for name in columns if name not in types)
    return BatchMap(batch_function, types, batch_size, tuple(inputs), skip_missing, kept, errors)


def waits(function: Any) -> bool:
    """True for an ``async def`` function, and for a class or object whose calls are such."""
    function = unwrapped(function)
    if isinstance(function, type) or not inspect.isroutine(function):
        kind = function if isinstance(function, type) else type(function)
        function = getattr(kind, "__call__", None)  # noqa: B004 - the method itself
    return inspect.iscoroutinefunction(function)


def _makes_callables(class_: type) -> bool:
    return any("__call__" in vars(base) for base in class_.__mro__)
