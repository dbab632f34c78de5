"""Reports of shards, for the command line: what is in them, and their health.

In: shards. Out: the report, as plain data for machines and as text for
people.
"""

from dask_image_ingest.report.check import has_problems, in_total, in_words
from dask_image_ingest.report.describe import describe_text, is_bad, summarize
from dask_image_ingest.report.shard_report import look_at_shard, report_of_table
from dask_image_ingest.report.text import head_text, index_text, number, printable_text

__all__ = [
    "describe_text",
    "has_problems",
    "head_text",
    "in_total",
    "in_words",
    "index_text",
    "is_bad",
    "look_at_shard",
    "number",
    "printable_text",
    "report_of_table",
    "summarize",
]
