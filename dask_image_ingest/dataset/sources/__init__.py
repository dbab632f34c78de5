"""Images that are not in shards: files of their own, and columns of parquet files.

In: paths and the options of a decode. Out: the frame that a read of shards gives, made of
references and the one decode above them.
"""
