"""The models of this process: instances of the classes that ``map_batches`` was given."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["models"]

# A class that is edited and run again and again leaves so many behind, each with its memory.
_KEPT = 4


class Models:
    """The models that were used last, and as many of them as turn out to take turns.

    A worker sees tasks and not the query, so it can't know that a model will be needed again: when
    one comes back that had to go, there is room for one more from then on. So n models that take
    turns are built 2 n - 4 times together, and not once for each partition.
    """

    def __init__(self) -> None:
        # Threads of one worker must not each build a model; of one may wait for another, which its
        # constructor uses.
        self._changing = threading.Lock()
        self._building: dict[str, threading.RLock] = {}
        self._kept: OrderedDict[str, Callable[..., Any]] = OrderedDict()
        self._gone: set[str] = set()
        self._room = _KEPT
        self._of_parent: tuple[Any, ...] = ()

    def get(self, token: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The model of this token, which ``make`` builds where there is none."""
        with self._changing:
            if token in self._kept:
                self._kept.move_to_end(token)
                return self._kept[token]
            building = self._building.setdefault(token, threading.RLock())
        with building:
            with self._changing:
                if token in self._kept:  # built by another thread meanwhile
                    return self._kept[token]
                self._make_room(token)
            try:
                model = make()
                with self._changing:
                    self._kept[token] = model
            finally:
                with self._changing:
                    self._building.pop(token, None)
            return model

    def forked(self) -> None:
        """Begin anew in a fork, where no thread will ever release the lock.

        The parent's models are kept and not used: they may have memory of a GPU, which a fork can
        neither use nor free.
        """
        parents = (self._kept, self._of_parent)
        self.__init__()  # type: ignore[misc]
        self._of_parent = parents

    def _make_room(self, token: str) -> None:
        # Before the model is built, which may need the memory.
        if token in self._gone:
            self._gone.remove(token)
            self._room += 1
        while len(self._kept) >= self._room:
            gone, _ = self._kept.popitem(last=False)
            self._gone.add(gone)


models = Models()

os.register_at_fork(after_in_child=models.forked)
