"""The columns of a collection: their names and types, and the conversion of members to values.

In: the first shard and its sidecar. Out: a `Schema`, and Arrow arrays.
"""
