"""A writer that is stopped for a while, and goes on when another has taken over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dask


class Sleeper:
    """Work in a thread that stops before a call, as on a laptop that was shut.

    Attributes
    ----------
    errors
        What the work raised.
    """

    def __init__(self, monkeypatch: Any, owner: Any, name: str, work: Callable[[], Any]) -> None:
        self.errors: list[Exception] = []
        self._asleep, self._awake = threading.Event(), threading.Event()
        call = getattr(owner, name)

        def sleeping(*args, **kwargs):
            if threading.current_thread() is self.thread and not self._asleep.is_set():
                self._asleep.set()
                assert self._awake.wait(60)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, sleeping)
        self.thread = threading.Thread(target=self._run, args=(work,))
        self.thread.start()
        assert self._asleep.wait(60)

    def _run(self, work: Callable[[], Any]) -> None:
        with dask.config.set(scheduler="synchronous"):
            try:
                work()
            except Exception as error:
                self.errors.append(error)

    def wake(self) -> None:
        """Let the work go on, to its end."""
        self._awake.set()
        self.thread.join()
