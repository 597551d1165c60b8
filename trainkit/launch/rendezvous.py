"""What torch's agent asks: who takes part in an attempt, and where the processes meet."""

import json
from datetime import datetime
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from typing_extensions import override

from trainkit.launch.meeting import Meeting

__all__ = ["Json", "Rendezvous", "send_no_pickles"]


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


def send_no_pickles() -> None:
    """Let torch write and read the state of its rendezvous as JSON, in this process."""
    module: Any = dynamic_rendezvous
    module.pickle = Json


class Json:
    """What torch uses of `pickle`."""

    PickleError = ValueError

    @staticmethod
    def dumps(state: _RendezvousState) -> bytes:
        """Return the bytes of a state."""
        told = {
            **{name: getattr(state, name) for name in ("round", "complete", "closed")},
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "participants": [[*_place(n), rank] for n, rank in state.participants.items()],
            "wait_list": [_place(node) for node in sorted(state.wait_list)],
            "redundancy_list": [_place(node) for node in sorted(state.redundancy_list)],
            "heard": [[*_place(n), at.isoformat()] for n, at in state.last_heartbeats.items()],
        }
        return json.dumps(told).encode()

    @staticmethod
    def loads(text: bytes) -> _RendezvousState:
        """Return the state that these bytes tell."""
        state = _RendezvousState()
        try:
            told = json.loads(text)
            state.round = int(told["round"])
            state.complete, state.closed = bool(told["complete"]), bool(told["closed"])
            state.deadline = told["deadline"] and datetime.fromisoformat(told["deadline"])
            state.participants = {_node(each): int(each[3]) for each in told["participants"]}
            state.wait_list = set(map(_node, told["wait_list"]))
            state.redundancy_list = set(map(_node, told["redundancy_list"]))
            state.last_heartbeats = {_node(e): datetime.fromisoformat(e[3]) for e in told["heard"]}
        except (LookupError, TypeError) as error:
            raise ValueError(str(error)) from error
        return state


def _place(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(place: list[Any]) -> _NodeDesc:
    return _NodeDesc(str(place[0]), int(place[1]), int(place[2]))
