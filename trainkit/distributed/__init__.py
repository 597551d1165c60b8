"""The processes of a job: their group, the collectives between them, and what travels."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.distributed.async_flags import AsyncFlags as AsyncFlags
    from trainkit.distributed.collectives import (
        check_called_by_all as check_called_by_all,
        only_this_process as only_this_process,
        run_on_all as run_on_all,
        run_on_all_or_main as run_on_all_or_main,
        run_on_main as run_on_main,
        with_own_group as with_own_group,
    )
    from trainkit.distributed.gather import (
        Refusal as Refusal,
        agreed_counts as agreed_counts,
        concatenate as concatenate,
        gather_all as gather_all,
        gather_samples as gather_samples,
        gather_tensors as gather_tensors,
    )
    from trainkit.distributed.processes import Processes as Processes

__all__, __getattr__, __dir__ = lazy_exports(__name__)
