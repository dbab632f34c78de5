"""One task: part of a shard becomes one dataframe.

In: a shard and a `ScanSpec`. Out: metadata and references, or pixels. Start reading at ``task.py``.
"""
