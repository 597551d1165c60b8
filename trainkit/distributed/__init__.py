"""The processes of a job: their group, the collectives between them, and what travels."""

from trainkit.distributed.gather import concatenate, gather_samples, gather_tensors
from trainkit.distributed.processes import Processes
from trainkit.distributed.together import apart, on_main, together
from trainkit.distributed.vote import Vote

__all__ = [
    "Processes",
    "Vote",
    "apart",
    "concatenate",
    "gather_samples",
    "gather_tensors",
    "on_main",
    "together",
]
