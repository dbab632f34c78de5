"""Images that kill the process that decodes them.

In: partitions in whose midst a process has died. Out: the same, decoded image by image in a process
that may die, and a journal of the images that did it.
"""

from dask_image_ingest.decode.crash_guard.guard import crashed, decode_guarded

__all__ = [
    "crashed",
    "decode_guarded",
]
