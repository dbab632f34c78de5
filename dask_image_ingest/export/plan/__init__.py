"""The plan of an export: its samples, where their members lie, and the shard of each."""
