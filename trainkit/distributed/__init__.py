"""The processes of a job: their group, the collectives between them, and what travels."""

from trainkit.distributed.gather import concatenate, gather_samples, gather_tensors
from trainkit.distributed.processes import Processes
from trainkit.distributed.vote import Vote

__all__ = ["Processes", "Vote", "concatenate", "gather_samples", "gather_tensors"]
