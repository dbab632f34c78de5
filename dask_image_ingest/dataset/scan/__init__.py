"""One task: a part of one shard becomes one dataframe.

In: a shard, and what is asked of it. Out: metadata and references, or pixels. ``task.py`` is where
to begin reading.
"""
