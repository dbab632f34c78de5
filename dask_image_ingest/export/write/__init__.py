"""Writing one shard: tar headers, layout, copied members, sidecar and index."""
