"""A DALI pipeline that is fed by hand: a batch goes in, a batch comes out."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any


class BatchPipeline:
    """A pipeline that is built when it is first needed, and again after a failure that ends it.

    For one caller at a time, who collects what was scheduled. A caller who does not get that far,
    for an error or an interrupt, must not leave a batch to the next one: see `clear`.

    Parameters
    ----------
    build
        Makes the pipeline, of one output.
    survives
        Whether a pipeline can go on after this error. DALI calls it invalid after any; but its
        executor (``exec2.cc``) has popped the batch by then, and runs the next one as any other.
    """

    def __init__(
        self, build: Callable[[], Any], survives: Callable[[str], bool] = lambda error: False
    ) -> None:
        self._build = build
        self._survives = survives
        self._pipeline: Any = None
        self._busy = False
        _all.add(self)

    def build(self) -> None:
        """Build the pipeline, if it is not there."""
        if self._pipeline is None:
            self._pipeline = self._build()

    def schedule(self, **inputs: Any) -> None:
        """Begin a batch, given by the names of the pipeline's external sources."""
        # Before all else: an interrupt may come anywhere.
        self._busy = True
        self.build()
        # Read where they lie, so they live as long as what reads them.
        self._pipeline.inputs_underway = inputs
        for name, batch in inputs.items():
            self._pipeline.feed_input(name, batch)
        self._pipeline.schedule_run()

    def collect(self) -> Any:
        """Wait for the batch, and give it as a tensor list.

        Raises
        ------
        RuntimeError
            Where an operator fails. Unless the pipeline survives, the next batch gets another.
        """
        try:
            (images,) = self._pipeline.share_outputs()
        except RuntimeError as error:
            if self._survives(str(error)):
                self._pipeline.inputs_underway = None
            else:
                self._pipeline = None
            self._busy = False
            raise
        # The outputs stay valid: in the default execution model they own their buffers.
        self._pipeline.release_outputs()
        self._pipeline.inputs_underway = None
        self._busy = False
        return images

    def clear(self) -> None:
        """Throw the pipeline away if a batch is in it that nobody has collected."""
        if self._busy:
            self._busy, self._pipeline = False, None

    def abandon(self) -> None:
        """Let go of a pipeline that another process has: nothing can be ended that does not run."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # Never freed, since that would wait for threads that are not there.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
            pipeline._pipe = None


_all: weakref.WeakSet[BatchPipeline] = weakref.WeakSet()


def _forked() -> None:
    for pipeline in list(_all):
        pipeline.abandon()


os.register_at_fork(after_in_child=_forked)
