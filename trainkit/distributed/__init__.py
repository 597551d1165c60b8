"""The processes of a job: their group, the collectives between them, and what travels."""

from trainkit.distributed.async_flags import AsyncFlags
from trainkit.distributed.collectives import (
    check_called_by_all,
    only_this_process,
    run_on_all,
    run_on_all_or_main,
    run_on_main,
    with_own_group,
)
from trainkit.distributed.gather import (
    Refusal,
    agreed_counts,
    concatenate,
    gather_all,
    gather_samples,
    gather_tensors,
)
from trainkit.distributed.processes import Processes

__all__ = [
    "AsyncFlags",
    "Processes",
    "Refusal",
    "agreed_counts",
    "check_called_by_all",
    "concatenate",
    "gather_all",
    "gather_samples",
    "gather_tensors",
    "only_this_process",
    "run_on_all",
    "run_on_all_or_main",
    "run_on_main",
    "with_own_group",
]
