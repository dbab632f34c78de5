"""Workers that are ready to decode.

In: the machine's cores and GPUs. Out: a client of a dask cluster whose workers share them.
"""

from dask_image_ingest.cluster.local import start_cluster
from dask_image_ingest.cluster.prepare import dask_setup, dask_teardown, prepare

__all__ = [
    "dask_setup",
    "dask_teardown",
    "prepare",
    "start_cluster",
]
