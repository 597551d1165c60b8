"""Machines that come and go: their launchers meet by torch's c10d rendezvous, after each change.

A launcher knows no other one; what they have in common is the state of the rendezvous, in a store.
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    api,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from typing_extensions import override

from trainkit.errors import DistributedError
from trainkit.launch.agent import Agent, run
from trainkit.launch.link import Link
from trainkit.launch.meeting import Meeting, to_compare
from trainkit.launch.network import addresses_of, is_own, job_interface, reach
from trainkit.launch.orphan_killer import OrphanKiller
from trainkit.launch.outcome import Outcome
from trainkit.launch.plan import Plan, port_of
from trainkit.launch.rendezvous import send_no_pickles
from trainkit.launch.settings import JobSettings
from trainkit.signals import CAUGHT, EXIT_LATER, exit_code
from trainkit.watch.listening import listen, ports
from trainkit.watch.member import Member

__all__ = ["find_way", "run_elastic"]

_LEFT_IN_ORDER = {exit_code(signum) for signum in CAUGHT} - {EXIT_LATER}


class _Way(Meeting):
    """What a launcher knows of an elastic job: itself, and the way to the store."""

    @property
    @override
    def interface(self) -> str | None:
        is_loopback = self.address.startswith("127.") or self.address == "::1"
        # On the machine with the store nobody knows yet from where the others come.
        return job_interface([self.address]) if self.own != self.address or is_loopback else None


def run_elastic(
    plan: Plan, meeting: Meeting, orphan_killer: OrphanKiller, *, shows_log: bool
) -> Outcome:
    """Do what `run` does, for a machine of an elastic job.

    Raises:
        DistributedError: The machines do not come together, or have ended the job.
    """
    ways: dict[str, Any] = {"meet_by": partial(_handler, to_compare(plan)), "kind": _ElasticAgent}
    try:
        return run(plan, meeting, orphan_killer, shows_log=shows_log, **ways)
    except RendezvousClosedError:
        raise DistributedError(
            "The other machines have ended this job, and it takes no others. To train on, start "
            "the launchers of all machines."
        ) from None
    except RendezvousError as error:
        raise DistributedError(
            f"The machines do not come together: {str(error) or type(error).__name__}. At least "
            "`--min_machines` of them must run, and reach the launcher or the store at "
            "`--main_process_ip`, which must live."
        ) from error


def find_way(job: JobSettings) -> Meeting:
    """Return the way from this machine to the store of an elastic job.

    Raises:
        DistributedError: There is none.
    """
    host, port = str(job.main_process_ip), port_of(job)
    try:
        address = next((each for each in addresses_of(host, port) if is_own(each)), "")
    except OSError:
        address = ""
    own = address
    if not address:
        address, own = reach(host, port, job.meeting_timeout)
    here, link = Member.this(), Link(0, 1, None)
    link.names[0] = here.host
    card = {"host": here.host, "who": str(here), "address": own}
    return _Way(machine=0, cards={0: card}, address=address, port=port, link=link)


def _handler(told: Mapping[str, str], config: LaunchConfig, meeting: Meeting) -> RendezvousHandler:
    send_no_pickles()
    # Or launchers would send all later processes to the store of the first machine, which may go.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    cast(Any, api).get_free_port = partial(_free_port, meeting.own)  # for the store of an attempt
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=meeting.own,
            **config.rdzv_configs,
        )
    )
    said = cast(Any, handler)._store.compare_set("trainkit/told", "", json.dumps(told))
    first = json.loads(said)  # what the first machine that came was told
    differs = [name for name in sorted({*told, *first}) if told.get(name) != first.get(name)]
    if differs:
        values = (f"{name}: {first.get(name)} there, {told.get(name)} here" for name in differs)
        raise DistributedError(
            f"This machine was told other things than those of the job: {'; '.join(values)}. Start "
            "it with what they have, or all launchers again, with a new store if it is your own"
        )
    return handler


def _free_port(host: str) -> int:
    with listen(host, ports(), 1) as found:
        return int(found.getsockname()[1])


class _ElasticAgent(Agent):
    """Starts again with the machines that are there; a machine that is asked to end only leaves."""

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group: Any = worker_group  # its fields are declared as None
        if group.group_rank == 0:
            group.store.set("trainkit/secret", self._link.secret)
        self._link.secret = group.store.get("trainkit/secret").decode()
        number = self._state().round  # alike on all machines, those that came later too
        self._attempt = number - 1
        self._link.come_to(number, lambda: None)
        remaining = self._remaining_restarts  # a machine that comes takes none of them
        started = super()._start_workers(worker_group)
        self._remaining_restarts = remaining
        return started

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if result.state == WorkerState.FAILED and codes <= _LEFT_IN_ORDER:
            self._remaining_restarts += 1  # torch takes one for what was no failure
        if result.state == WorkerState.HEALTHY and self._misses_machine(worker_group):
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    @override
    def _judge(self, codes: Any) -> None:
        # Any other signal lets a machine come or leave; only the end of the time ends the job.
        if EXIT_LATER in codes.values() or not set(codes.values()) <= _LEFT_IN_ORDER:
            super()._judge(codes)

    def _misses_machine(self, worker_group: WorkerGroup) -> bool:
        """Return whether a machine is gone whose processes may not have met the others yet.

        Those that have are missed by the watch, which is quicker; where one comes, torch starts all
        again.
        """
        if worker_group.spec.rdzv_handler.num_nodes_waiting():  # which reads the state
            return False
        state, group = self._state(), cast(Any, worker_group)  # fields declared as None
        return bool(not state.closed and len(state.participants) < group.group_world_size)

    def _state(self) -> Any:
        handler: Any = self._worker_group.spec.rdzv_handler
        return handler._state_holder.state
