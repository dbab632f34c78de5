"""Fingerprint of a frame: a token of its rows and functions that is the same in every process.

Dask's token knows a function of a module by its name, and stays the same when the module is edited.
That is no matter within a process, and wrong for an export that goes on in another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dask.base import tokenize
from dask.delayed import Delayed, DelayedLeaf

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Dataset, KeepsResults
from dask_image_ingest.errors import FunctionError
from dask_image_ingest.user_functions import stable_token


def frame_fingerprint(frame: Any, columns: Sequence[str], *more: Any) -> str | None:
    """A token of some columns of a frame, and of whatever else decides what becomes of it.

    None where nothing can stand for them: for a frame that is persisted or holds delayed objects,
    and for functions that have no token which is the same in every process.
    """
    frame = frame[list(columns)]
    token = tokenize(frame, *more)
    if not isinstance(frame, FrameBase):
        return token
    try:
        return tokenize(token, [stable_token(value) for value in _operands(frame.expr)])
    except Exception:  # whatever keeps an object from being told, the export does not need it
        return None


def _operands(expr: Any) -> Iterator[Any]:
    """Operands of a query's steps, except those with a stable token of their own."""
    for step in expr.walk():
        if isinstance(step, dx.FromGraph):
            raise _known_by_name(step)
        if isinstance(step, KeepsResults):  # its own token names its files, each by a fingerprint
            continue
        for value in step.operands:
            if isinstance(value, DelayedLeaf):  # what ``isin`` is asked for
                yield dict(value.__dask_graph__())
            elif isinstance(value, Delayed):
                raise _known_by_name(step)
            elif isinstance(value, Dataset):
                yield value.options.decoding
            elif not isinstance(value, dx.Expr):
                yield value


def _known_by_name(step: Any) -> FunctionError:
    return FunctionError(f"{type(step).__name__} has names, which tell nothing of what it computes")
