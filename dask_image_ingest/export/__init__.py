"""Export of a frame's samples, with their original bytes.

In: a frame whose rows refer to samples. Out: WebDataset shards or parquet files. A frame is
computed once (``staging.py``), shards are planned from its keys and offsets (``shard_plan.py``),
then one task per shard copies byte ranges (``write_shards.py``). Start reading at `run_export` in
``to_webdataset.py``.
"""

from dask_image_ingest.export.members import Encode, json_texts
from dask_image_ingest.export.query import (
    QueryStep,
    digest_of,
    operation_name,
    query_steps,
    source_options_of,
)
from dask_image_ingest.export.shard_plan import RefusedRowsError
from dask_image_ingest.export.stored_images import image_origin
from dask_image_ingest.export.to_parquet_images import to_parquet_images
from dask_image_ingest.export.to_webdataset import to_webdataset

__all__ = [
    "Encode",
    "QueryStep",
    "RefusedRowsError",
    "digest_of",
    "image_origin",
    "json_texts",
    "operation_name",
    "query_steps",
    "source_options_of",
    "to_parquet_images",
    "to_webdataset",
]
