"""The processes of a job: their group, the collectives between them, and what travels."""

from trainkit.distributed.gather import (
    Refusal,
    concatenate,
    gather_all,
    gather_samples,
    gather_tensors,
)
from trainkit.distributed.processes import Processes
from trainkit.distributed.together import (
    alone,
    apart,
    by_all_or_main,
    called_by_all,
    gather_together,
    on_main,
    together,
)
from trainkit.distributed.vote import Vote

__all__ = [
    "Processes",
    "Refusal",
    "Vote",
    "alone",
    "apart",
    "by_all_or_main",
    "called_by_all",
    "concatenate",
    "gather_all",
    "gather_samples",
    "gather_tensors",
    "gather_together",
    "on_main",
    "together",
]
