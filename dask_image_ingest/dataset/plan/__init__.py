"""The scan node, and the optimiser's knowledge of Dask's operations above it.

In: a query. Out: a scan with columns, filters and limits; lineage of partitions and columns.
"""

from dask_image_ingest.dataset.plan.base_nodes import (
    ImageNode,
    KeepsResults,
    PreservesRows,
    Read,
    RowsAt,
    partition_sources,
    shard_of_partition,
)
from dask_image_ingest.dataset.plan.columns import (
    AppendsColumns,
    Change,
    MapColumns,
    assign_columns,
    backtrack,
    is_badly_projected,
    select_columns,
    value_sources,
)
from dask_image_ingest.dataset.plan.scan_node import (
    Scan,
    ScanFiles,
    ScanShards,
    ScanTables,
    datasets_of,
)

__all__ = [
    "AppendsColumns",
    "Change",
    "ImageNode",
    "KeepsResults",
    "MapColumns",
    "PreservesRows",
    "Read",
    "RowsAt",
    "Scan",
    "ScanFiles",
    "ScanShards",
    "ScanTables",
    "assign_columns",
    "backtrack",
    "datasets_of",
    "is_badly_projected",
    "partition_sources",
    "select_columns",
    "shard_of_partition",
    "value_sources",
]
