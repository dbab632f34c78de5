"""Reports on shards, for the command line: their contents and health.

In: shards. Out: reports as plain data (JSON) and as text.
"""

from dask_image_ingest.report.check import check_summary, check_text, has_problems
from dask_image_ingest.report.describe import describe_text, is_bad, summarize
from dask_image_ingest.report.shard_report import inspect_shard, report_of_table
from dask_image_ingest.report.text import head_text, index_text, number, printable_text

__all__ = [
    "check_summary",
    "check_text",
    "describe_text",
    "has_problems",
    "head_text",
    "index_text",
    "inspect_shard",
    "is_bad",
    "number",
    "printable_text",
    "report_of_table",
    "summarize",
]
