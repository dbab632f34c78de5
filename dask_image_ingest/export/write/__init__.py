"""One new shard: its tar headers, its layout, the copy of its members, its sidecar and index."""
