"""The user's function of ``map_batches`` and ``map_rows``: called, kept, and its errors told.

Instances of a user's class, such as models, are kept between partitions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    FunctionError,
    MissingDependencyError,
)
from dask_image_ingest.frames import Backend, backend_of
from dask_image_ingest.ops.outputs import ResultError
from dask_image_ingest.typedefs import DataFrame
from dask_image_ingest.url_secrets import error_text, without_secrets
from dask_image_ingest.user_functions import refuse_other_code, token_and_code


def unwrapped(function: object) -> Any:
    """The function or class of a ``functools.partial``; anything else itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def call_once(
    function: Callable[..., Any], called_by: str, method: str, argument: Any, what: str
) -> Any:
    """Call a method of a function, or of this process's instance of a class, in this process.

    Errors name ``called_by``, the function of this package, and ``what`` its argument is.
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
    code: str = field(init=False, repr=False)

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
        refuse_other_code(f"{self.called_by}()", self.function, self.code)
        try:
            instance = self.function
            if isinstance(unwrapped(self.function), type):
                instance = _models[-1].get(self.token, self.function)
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
        self, error: BaseException, frame: DataFrame, rows: Sequence[int], tries: str = ""
    ) -> DaskImageIngestError:
        """The error to raise if a call fails, or has a wrong result, naming the rows."""
        which = rows_text(frame, rows, self.noun)
        if not isinstance(error, ResultError):
            one_of = "one of " if len(rows) > 1 else ""
            text = f"fails for {one_of}{which}: {error_text(error)}{tries}"
            return FunctionError(f"{self.called_by}: {self.name} {text}")
        if self.returns:
            return ArgumentError(
                f"{self.called_by}: {self.name} gave {error.gave}: it has to give {self.returns} "
                f"(called with {which})"
            )
        text = str(error).replace("map_batches: ", f"{self.called_by}: ", 1)
        return ArgumentError(f"{text} (the function is {self.name}, called with {which})")

    def reason(self, error: BaseException) -> str:
        """Reason in the column `error` of a row for which a call fails."""
        text = f"gave {error.gave}" if isinstance(error, ResultError) else error_text(error)
        return without_secrets(f"function-failed: {self.name}: {text}")


def rows_text(frame: DataFrame, rows: Sequence[int], noun: str) -> str:
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
        self._lock = threading.Lock()  # never held while a model is built
        # One for each model, not one for all: a constructor may need another model.
        self._building: dict[str, threading.RLock] = {}
        self._models: OrderedDict[str, Callable[..., Any]] = OrderedDict()

    def get(self, token: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The model of this token; ``make`` builds it if it is not cached."""
        with self._lock:
            building = self._building.setdefault(token, threading.RLock())
        with building:
            with self._lock:
                if token in self._models:
                    self._models.move_to_end(token)
                    return self._models[token]
                while len(self._models) >= _MAX_MODELS:  # first, to free the memory
                    self._models.popitem(last=False)
            model = make()
            with self._lock:
                self._models[token] = model
            return model


# The last are those of this process. In a fork those of its parent are kept, but not used: they may
# own GPU memory, which a fork can neither use nor free, and a lock that is held.
_models = [Models()]
os.register_at_fork(after_in_child=lambda: _models.append(Models()))


# Tasks share the memory of a GPU, and a model need not be thread-safe.
_ON_GPU = threading.RLock()


def turn(backend: Backend) -> AbstractContextManager[Any]:
    """Context of a call of a user's function: on a GPU, one at a time in this process."""
    return _ON_GPU if backend.device == "gpu" else nullcontext()


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
    for cause in causes(error):
        if isinstance(cause, (MemoryError, ImportError, FunctionError)):
            return False
        if any(text in error_text(cause) for text in _TEXTS):
            return False
        if not _GPU_ERRORS.isdisjoint(kind.__name__ for kind in type(cause).__mro__):
            return False
    return True


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, those that led to it, and those that they hold, as of clients that retry."""
    errors: list[Any] = [error]
    seen = set[int]()
    for cause in errors:  # which grows
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            held = (*cause.args, getattr(cause, "reason", None), *getattr(cause, "exceptions", ()))
            errors += [cause.__cause__, cause.__context__, *held]


def waits(function: object) -> bool:
    """True for an ``async def`` function, and for a class or object whose calls are such."""
    function = unwrapped(function)
    if isinstance(function, type) or not inspect.isroutine(function):
        kind = function if isinstance(function, type) else type(function)
        function = getattr(kind, "__call__", None)  # noqa: B004 - the method itself
    return inspect.iscoroutinefunction(function)
