"""Machines that come and go: their launchers meet by torch's c10d rendezvous, after each change.

A launcher knows no other one; what they have in common is the state of the rendezvous, in a store.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from typing_extensions import override

from trainkit.basics.torch_internals import meet_without_pickles
from trainkit.errors import DistributedError
from trainkit.launch.link import Link
from trainkit.launch.meeting import Meeting, card_of, difference, to_compare
from trainkit.launch.network import addresses_of, is_own, job_interface, reach
from trainkit.launch.plan import Plan, port_of
from trainkit.launch.settings import JobSettings
from trainkit.launch.workers import Attempt
from trainkit.watch.listening import ports


class ElasticMeeting(Meeting):
    """What a launcher knows of an elastic job: itself, and the way to the store."""

    is_elastic = True

    def __init__(self, plan: Plan) -> None:
        job = plan.job
        host, port = str(job.main_process_ip), port_of(job)
        try:
            address = next((each for each in addresses_of(host, port) if is_own(each)), "")
        except OSError:
            address = ""
        own = address
        if not address:
            address, own = reach(host, port, job.meeting_timeout)
        card = card_of(job, machine=0, address=own)
        super().__init__(0, [card], address, ports(job.ports), Link(0, 1))
        meet_without_pickles()
        # Else torch opens a store that nobody uses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        parameters = rendezvous(job, own)
        with _in_words():
            self._backend, store = create_backend(parameters)
            self._attempts = store
            self._handler = create_handler(store, self._backend, parameters)
            told = to_compare(plan)
            first = json.loads(store.compare_set("trainkit/told", "", json.dumps(told)))
        if wrong := difference({"the job": first, "this machine": told}):
            raise DistributedError(
                f"This machine was told other things than those of the job: {wrong}. Start it with "
                "what they have, or all launchers again, with a new store if it is your own"
            )

    @property
    @override
    def interface(self) -> str | None:
        is_loopback = self.address.startswith("127.") or self.address == "::1"
        # On the machine with the store nobody knows yet from where the others come.
        return job_interface([self.address]) if self.own != self.address or is_loopback else None

    @override
    def begin(self) -> Attempt:
        """Wait for enough machines; one of them opens a store for the processes.

        Raises:
            DistributedError: They do not come together, or have ended the job.
        """
        with _in_words():
            info = self._handler.next_rendezvous()
            if info.rank == 0:
                number = self._attempts.add("trainkit/attempts", 1) - 1
                told = [number, self.own, self.open_store(), self.link.secret]
                info.store.set("trainkit/place", json.dumps(told))
            # The attempts are counted alike on all machines, those that came later too.
            number, host, port, self.link.secret = json.loads(info.store.get("trainkit/place"))
        self.link.come_to(number, lambda: 0)
        return Attempt(
            number=number, machine=info.rank, machines=info.world_size, address=host, port=port
        )

    @override
    def wants_restart(self, attempt: Attempt) -> bool:
        """Return whether a machine comes, or is gone before its processes have met the others.

        Those that have met are missed by the watch, which is quicker.
        """
        with _in_words():
            if self._handler.num_nodes_waiting():
                return True
            state = self._backend.get_state()
        here = json.loads(state[0]) if state is not None else {}
        return not here.get("closed") and len(here.get("participants", ())) < attempt.machines

    @override
    def shut(self) -> None:
        self._handler.shutdown()


def rendezvous(job: JobSettings, own: str) -> RendezvousParameters:
    """Return what torch's rendezvous is told, for a machine with this address."""
    pairs = [pair.partition("=") for pair in (job.rdzv_conf or "").split(",") if pair]
    # Torch waits 30 seconds for more machines than it needs.
    settings = {"last_call_timeout": "10", **{name: value for name, _, value in pairs}}
    return RendezvousParameters(
        backend="c10d",
        endpoint=f"{job.main_process_ip}:{port_of(job)}",
        run_id="trainkit",
        min_nodes=job.min_machines or job.num_machines,
        max_nodes=job.num_machines,
        local_addr=own,
        **settings,
    )


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
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
