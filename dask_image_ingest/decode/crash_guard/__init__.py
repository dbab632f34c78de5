"""Isolate images that kill the process that decodes them.

In: a partition during which a process died. Out: its pixels, decoded one image at a time in a
subprocess, and a log of the images that kill it.
"""

from dask_image_ingest.decode.crash_guard.guard import crashed, decode_guarded

__all__ = [
    "crashed",
    "decode_guarded",
]
