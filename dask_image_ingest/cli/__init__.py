"""The command line: look at shards without writing a program.

In: the words after ``dask-image-ingest``. Out: text or JSON on standard output, and the exit
status: 0, 1 when bad data was found, 2 for wrong arguments.
"""

from dask_image_ingest.cli.main import main

__all__ = [
    "main",
]
