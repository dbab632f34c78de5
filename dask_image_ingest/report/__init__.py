"""Reports on shards, for the command line: their contents and health.

In: shards. Out: reports as plain data (JSON) and as text.
"""

from dask_image_ingest.report.shard_report import (
    check_text,
    describe_text,
    head_text,
    index_text,
    inspect_shard,
    number,
    printable_text,
    report_of_table,
    summarize_shards,
)

__all__ = [
    "check_text",
    "describe_text",
    "head_text",
    "index_text",
    "inspect_shard",
    "number",
    "printable_text",
    "report_of_table",
    "summarize_shards",
]
