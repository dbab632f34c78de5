"""The function that ``map_batches`` calls, or the class whose instances it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.ops.models import models
from dask_image_ingest.user_functions import code_digests, refuse_other_code, token_of


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
        """What errors call it."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def get(self) -> Callable[..., Any]:
        """What is to be called with a batch, in this process.

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
        """What to raise where it fails for these rows of a frame."""
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
    """Which images of a frame these rows have."""
    names = [name for name in ("__key__", "__url__") if name in frame.columns]
    if not names:
        return f"{len(rows)} images, of which the first is in row {rows[0]} of a partition"
    told = backend_of(frame).to_arrow(frame[names].iloc[[rows[0]]]).to_pylist()[0]
    first = " of ".join(
        f"sample {told[name]!r}" if name == "__key__" else f"{told[name]}" for name in names
    )
    return f"{len(rows)} images, of which the first is that of {first}"
