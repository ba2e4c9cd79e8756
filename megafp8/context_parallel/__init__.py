"""Context parallelism: sequences sharded over ranks, and attention over all shards."""
