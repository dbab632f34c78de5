"""Errors for tasks of which workers died, one after the other, until Dask gave it up."""

from __future__ import annotations

from distributed.scheduler import KilledWorker

from dask_image_ingest.errors import DaskImageIngestError


def killed_by(error: KilledWorker, what: str) -> DaskImageIngestError:
    """An error that names ``what`` the task has read, and what to do.

    The scheduler's journal of crashes knows the task from now on.
    """
    count = error.allowed_failures + 1
    workers = "workers that read" if count > 1 else "worker that read"
    return DaskImageIngestError(
        f"{count} {workers} {what} died, the last one at {error.last_worker.address}: an image of "
        "it crashes the decoder, or memory was too small. Run this again: its images are decoded "
        "one by one then, in a process that may die. If workers die of it all the same, give them "
        "more memory"
    )
