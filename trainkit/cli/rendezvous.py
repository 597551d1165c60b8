"""What torch's agent asks: who takes part in an attempt, and where the processes meet."""

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from typing_extensions import override

from trainkit.cli.meeting import Meeting

__all__ = ["Rendezvous"]


class Rendezvous(RendezvousHandler):
    """Tells torch's agent what the meeting has agreed on, for one attempt after the other."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._attempt = -1

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @override
    def get_backend(self) -> str:
        return "trainkit"

    @override
    def get_run_id(self) -> str:
        return "trainkit"

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        self._attempt += 1
        meeting = self._meeting
        meeting.begin(self._attempt)
        # The agent's own store holds nothing: the launchers talk over their link.
        place = RendezvousStoreInfo(meeting.address, meeting.port)
        return RendezvousInfo(HashStore(), meeting.machine, meeting.size, place)

    @override
    def num_nodes_waiting(self) -> int:
        return int(self._meeting.link.wanted > self._attempt)

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None: ...

    @override
    def shutdown(self) -> bool:
        return True
