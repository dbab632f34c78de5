"""Which samples are exported, where their members are, and which shard each goes to."""
