"""Start clusters, and prepare workers to decode.

In: the machine's cores and GPUs, or a client of any cluster. Out: workers with this package's
configuration, and DALI loaded.
"""

from dask_image_ingest.cluster.local import start_cluster
from dask_image_ingest.cluster.prepare import dask_setup, dask_teardown, prepare_cluster

__all__ = [
    "dask_setup",
    "dask_teardown",
    "prepare_cluster",
    "start_cluster",
]
