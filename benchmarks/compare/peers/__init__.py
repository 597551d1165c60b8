"""One module for each peer; a function of it for each kind of workload."""

PEERS = (
    "raw", "trainkit", "accelerate", "lightning", "fabric", "transformers", "ignite",
    "pytorch_accelerated", "torchtnt", "composer",
)  # fmt: skip
"""Modules of this package, in the order of the table; "raw" is the loop written by hand."""
