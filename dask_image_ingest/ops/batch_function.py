"""The user's function of ``map_batches``, and the cache of models: instances of a user's class."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.user_functions import refuse_other_code, token_and_code


def built(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function itself; for a class, this process's cached instance, as in ``map_batches``."""
    return BatchFunction(function).get()


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """A user's function, or a class whose instance, built once in each process, is called."""

    function: Callable[..., Any]
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
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__name__)

    def get(self) -> Callable[..., Any]:
        """The function, or this process's instance of the class.

        Raises
        ------
        FunctionError
            If this process has another version of the function's module.
        """
        refuse_other_code("map_batches()", self.code)
        factory = self.function
        while isinstance(factory, functools.partial):
            factory = factory.func
        if not isinstance(factory, type):
            return self.function
        return models.get(self.token, self.function)

    def failure(self, error: Exception, frame: Any, rows: Sequence[int]) -> FunctionError:
        """The error to raise if a call fails, naming the rows."""
        one_of = "one of " if len(rows) > 1 else ""
        return FunctionError(
            f"map_batches: {self.name} fails for {one_of}{_rows_text(frame, rows)}: "
            f"{type(error).__name__}: {error}"
        )

    def wrong_result(self, error: ArgumentError, frame: Any, rows: Sequence[int]) -> ArgumentError:
        """The error to raise if the result does not match ``outputs=``, naming the rows."""
        return ArgumentError(
            f"{error} (the function is {self.name}, called with {_rows_text(frame, rows)})"
        )


def _rows_text(frame: Any, rows: Sequence[int]) -> str:
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
    return texts[0] if len(rows) == 1 else f"{len(rows)} images, from {' to '.join(texts)}"


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
