"""The rows of the table: what is probed, and what the right answer is."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.behaviour.bench import Bench, Outcome

Probe = Callable[[Bench], Outcome]


@dataclass(frozen=True)
class Row:
    """A behaviour.

    Attributes:
        key: Its name on the command line.
        title: What is looked at.
        right: The right answer.
        probe: Tries it; its docstring says how.
        quick: It takes a second or two.
    """

    key: str
    title: str
    right: str
    probe: Probe
    quick: bool

    @property
    def how(self) -> str:
        """What the probe does, in a sentence or two."""
        return " ".join((self.probe.__doc__ or "").split())


ROWS: dict[str, Row] = {}


def row(key: str, title: str, right: str, *, quick: bool = False) -> Callable[[Probe], Probe]:
    """Enter a probe into the table."""

    def enter(probe: Probe) -> Probe:
        ROWS[key] = Row(key, title, right, probe, quick)
        return probe

    return enter


def load() -> dict[str, Row]:
    """Return all rows, in the order of the table."""
    families = ("updates", "samples", "evaluation", "processes", "resuming", "files", "failures")
    for family in families:
        import_module(f"benchmarks.behaviour.rows.{family}")
    return ROWS
