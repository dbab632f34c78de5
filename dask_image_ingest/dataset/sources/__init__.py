"""Images outside of tar shards: image files, and columns of parquet files.

In: paths and options of a decode. Out: the same kind of frame as from shards, a `Decode` of
references.
"""
