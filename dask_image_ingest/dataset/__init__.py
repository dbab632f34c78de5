"""The lazy collection: from paths to a Dask dataframe, its optimiser rules, and its tasks.

In: paths and options. Out: a Dask dataframe, each task of which reads part of a shard. Start
reading at ``scan/task.py``.
"""

from dask_image_ingest.dataset import predicates
from dask_image_ingest.dataset.decode_images import Frame, decode_images
from dask_image_ingest.dataset.image_files import read_images
from dask_image_ingest.dataset.parquet_images import read_parquet_images
from dask_image_ingest.dataset.plan.alignment import install_alignment
from dask_image_ingest.dataset.plan.base_nodes import (
    ImageNode,
    KeepsResults,
    PreservesRows,
    Read,
)
from dask_image_ingest.dataset.plan.computed_columns import AppendsColumns, MapColumns
from dask_image_ingest.dataset.plan.lineage import (
    Change,
    backtrack,
    datasets_of,
    partition_sources,
    shard_of_partition,
    value_sources,
)
from dask_image_ingest.dataset.plan.scan_node import (
    Scan,
    ScanFiles,
    ScanShards,
    ScanTables,
)
from dask_image_ingest.dataset.read import filter_rows, read_webdataset_images
from dask_image_ingest.dataset.read_files import files_of_rows, files_read, searches_of_frame
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.references.ahead import EncodedAhead
from dask_image_ingest.dataset.references.chunks import (
    ChunkedMap,
    LastDecode,
    known_lengths,
    last_decode,
    persist_moves,
    reads_remote,
    unindexed_remote,
    with_bad_rows,
    with_draw,
)
from dask_image_ingest.dataset.references.decode_node import Decode, unfused
from dask_image_ingest.dataset.references.fetch import (
    decode_partition,
    fetch_encoded,
    field_of,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.references.fused_decode import SHAPE_IN_NAME
from dask_image_ingest.dataset.references.make_references import (
    LOCATION_COLUMNS,
    add_references,
    adds_references,
    encoded_by,
    point_to_images,
    references_of_locations,
)
from dask_image_ingest.dataset.scan.decode_rows import ColumnDecode, NoPixels
from dask_image_ingest.dataset.scan.partitioning import Partition, ShardSplit, unversioned
from dask_image_ingest.dataset.scan.samples import SampleRows, handed_over_index
from dask_image_ingest.dataset.schema.columns import (
    HEADERS,
    METADATA_COLUMNS,
    ImageColumn,
    ImageMember,
    image_field,
    image_member,
    parse_image_extensions,
)
from dask_image_ingest.dataset.warning import warn_user

__all__ = [
    "HEADERS",
    "LOCATION_COLUMNS",
    "METADATA_COLUMNS",
    "SHAPE_IN_NAME",
    "AppendsColumns",
    "Change",
    "ChunkedMap",
    "ColumnDecode",
    "Decode",
    "EncodedAhead",
    "Frame",
    "ImageColumn",
    "ImageMember",
    "ImageNode",
    "KeepsResults",
    "LastDecode",
    "MapColumns",
    "NoPixels",
    "Partition",
    "PreservesRows",
    "Read",
    "ReadOptions",
    "SampleRows",
    "Scan",
    "ScanFiles",
    "ScanShards",
    "ScanTables",
    "ShardSplit",
    "add_references",
    "adds_references",
    "backtrack",
    "datasets_of",
    "decode_images",
    "decode_partition",
    "encoded_by",
    "fetch_encoded",
    "field_of",
    "files_of_rows",
    "files_read",
    "filter_rows",
    "handed_over_index",
    "image_field",
    "image_member",
    "known_lengths",
    "last_decode",
    "parse_image_extensions",
    "partition_sources",
    "persist_moves",
    "point_to_images",
    "predicates",
    "read_images",
    "read_parquet_images",
    "read_webdataset_images",
    "reads_remote",
    "reference_rows",
    "references_of",
    "references_of_locations",
    "searches_of_frame",
    "shard_of_partition",
    "unfused",
    "unindexed_remote",
    "unversioned",
    "value_sources",
    "warn_user",
    "with_bad_rows",
    "with_draw",
]

install_alignment()
