"""Why a job stands still, by where its processes are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import MOST_NAMED

__all__ = ["Verdict", "examples", "judge"]

_UNUSED = (
    ". Perhaps parameters are frozen on some processes only, or a step uses other parameters on "
    "some processes than on others: then pass `strategy=DDP(find_unused_parameters=True)`"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a job stands still.

    Args:
        text: In a sentence.
        process: The first one that the others wait for; None where they wait for each other.
        frozen: The processes that do not answer.
    """

    text: str
    process: int | None = None
    frozen: tuple[int, ...] = ()


def judge(states: Mapping[int, Mapping[str, Any]], silent: Mapping[int, str]) -> Verdict:
    """Return why a job stands still.

    Args:
        states: Where processes are, as `whereabouts` says it, of those that answered.
        silent: Of those that did not, who they are and why not.
    """
    if silent:
        reasons = [f"process {rank} {why}" for rank, why in sorted(silent.items())]
        return Verdict(_listed(reasons), min(silent), tuple(sorted(silent)))
    free = [rank for rank, state in sorted(states.items()) if not state["inside"]]
    if free and len(free) < len(states):
        reasons = [f"process {rank} is at {states[rank]['line']}" for rank in free]
        return Verdict(f"{_listed(reasons)}, and the others wait for it", free[0])
    if free:
        text = "no process is in a collective"
    elif len({(state["inside"], state["step"]) for state in states.values()}) > 1:
        text = "the processes wait in different places"
    else:
        text = "all processes wait in the same place"
    shown = [f"process {rank} {states[rank]['text']}" for rank in examples(states)]
    more = f"; and {len(states) - len(shown)} more" if len(states) > len(shown) else ""
    # In a backward of the same step and line of the user's code, which others have left.
    if len({(state["line"], state["step"]) for state in states.values()}) == 1:
        more += _UNUSED if "backward" in {state["inside"] for state in states.values()} else ""
    return Verdict(f"{text}: {'; '.join(shown)}{more}")


def examples(states: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the processes to be shown: all if they are few, else the first in each place."""
    if len(states) <= MOST_NAMED:
        return sorted(states)
    first: dict[str, int] = {}
    for rank, state in sorted(states.items()):
        first.setdefault(state["text"], rank)
    return list(first.values())[:MOST_NAMED]


def _listed(reasons: list[str]) -> str:
    more = f"; and {len(reasons) - MOST_NAMED} more" if len(reasons) > MOST_NAMED else ""
    return "; ".join(reasons[:MOST_NAMED]) + more
