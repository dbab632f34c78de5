"""Reports of shards, for the command line: what is in them, and their health.

In: shards. Out: the report, as plain data for machines and as text for
people.
"""

from dask_image_ingest.report.check import check_shard, in_total, in_words
from dask_image_ingest.report.describe import describe_shard, describe_text, is_bad, summarize
from dask_image_ingest.report.shard_rows import options_of
from dask_image_ingest.report.text import head_text, index_text, number, printable_text

__all__ = [
    "check_shard",
    "describe_shard",
    "describe_text",
    "head_text",
    "in_total",
    "in_words",
    "index_text",
    "is_bad",
    "number",
    "options_of",
    "printable_text",
    "summarize",
]
