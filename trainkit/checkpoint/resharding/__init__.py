"""Sharded tensors: saved by shards, read back for other shards."""
