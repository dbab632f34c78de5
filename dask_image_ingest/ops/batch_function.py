"""The function that ``map_batches`` calls, and the cache of models: instances of its class."""

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
from dask_image_ingest.user_functions import code_digests, refuse_other_code, token_of


def built(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, or this process's instance of the class, as ``map_batches`` calls it."""
    return BatchFunction(function).get()


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """A user's function, or the class whose instances are called, built once in each process."""

    function: Callable[..., Any]
    token: str = field(init=False)
    code: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", token_of(self.function))
        object.__setattr__(self, "code", code_digests(self.function))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchFunction) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __dask_tokenize__(self) -> str:
        return self.token

    @property
    def name(self) -> str:
        """Name in errors."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def get(self) -> Callable[..., Any]:
        """The function, or this process's instance of the class.

        Raises
        ------
        FunctionError
            If this process has another version of the function's module.
        """
        refuse_other_code("map_batches()", self.function, self.code)
        made_by = self.function
        while isinstance(made_by, functools.partial):
            made_by = made_by.func
        if not isinstance(made_by, type):
            return self.function
        return models.get(self.token, self.function)

    def failed(self, error: Exception, frame: Any, rows: Sequence[int]) -> FunctionError:
        """Error for a call that failed for these rows of a frame."""
        return FunctionError(
            f"map_batches: {self.name} fails for {_told(frame, rows)}: "
            f"{type(error).__name__}: {error}"
        )

    def misfit(self, error: ArgumentError, frame: Any, rows: Sequence[int]) -> ArgumentError:
        """The same where what it gives for them is not what ``outputs=`` says."""
        return ArgumentError(
            f"{error} (the function is {self.name}, called with {_told(frame, rows)})"
        )


def _told(frame: Any, rows: Sequence[int]) -> str:
    """Describe the images of some rows, for errors."""
    names = [name for name in ("__key__", "__url__") if name in frame.columns]
    if not names:
        return f"{len(rows)} images, of which the first is in row {rows[0]} of a partition"
    told = backend_of(frame).to_arrow(frame[names].iloc[[rows[0]]]).to_pylist()[0]
    first = " of ".join(
        f"sample {told[name]!r}" if name == "__key__" else f"{told[name]}" for name in names
    )
    return f"{len(rows)} images, of which the first is that of {first}"


# More than queries have that one runs at a time. A class that is edited and run again and again
# leaves so many behind, each with its memory.
_MODELS = 8


class Models:
    """Least recently used cache of models."""

    def __init__(self) -> None:
        # Threads of one worker must not each build a model; of one may wait for another, which its
        # constructor uses.
        self._changing = threading.Lock()
        self._building: dict[str, threading.RLock] = {}
        self._models: OrderedDict[str, Callable[..., Any]] = OrderedDict()
        self._of_parent: tuple[Any, ...] = ()

    def get(self, token: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The model of this token, which ``make`` builds where there is none."""
        with self._changing:
            if token in self._models:
                self._models.move_to_end(token)
                return self._models[token]
            building = self._building.setdefault(token, threading.RLock())
        with building:
            with self._changing:
                if token in self._models:  # built by another thread meanwhile
                    return self._models[token]
                while len(self._models) >= _MODELS:  # before one is built that needs the memory
                    self._models.popitem(last=False)
            try:
                model = make()
                with self._changing:
                    self._models[token] = model
            finally:
                with self._changing:
                    self._building.pop(token, None)
            return model

    def forked(self) -> None:
        """Begin anew in a fork, where no thread will ever release the lock.

        The parent's models are kept and not used: they may have memory of a GPU, which a fork can
        neither use nor free.
        """
        parents = (self._models, self._of_parent)
        self.__init__()  # type: ignore[misc]
        self._of_parent = parents


models = Models()

os.register_at_fork(after_in_child=models.forked)
