"""The columns of a collection: what they are called, and how members become values of their types.

In: the first shard and its sidecar. Out: a `Schema`, and arrays of Arrow.
"""
