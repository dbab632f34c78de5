"""The command line: inspect, index, curate and export shards without writing a program.

In: the arguments of ``dask-image-ingest``. Out: text or JSON on standard output, and the exit
status: 0; 1 if bad data was found; 2 for wrong arguments.
"""

from dask_image_ingest.cli.main import main

__all__ = [
    "main",
]
