"""Where the time of a run went: steps that count, and everything else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trainkit.inspect.report.records import RunLog, Session

PARTS = {
    "step": "steps that count",
    "data_wait": "waiting for data",
    "evaluate": "evaluation",
    "save": "checkpoints",
    "again": "work lost and trained again",
    "setup": "start-up and restart",
    "end": "finishing",
    "down": "between two sessions",
}
"""What time is spent on, in the order in which it is shown."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What a later session had to do again, or what was given up."""

    windows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The seconds of a run by what they were spent on.

    Attributes:
        seconds: By the names of `PARTS`.
        divided: Whether anything is known of the time spent waiting for data.
        lost: For each session, what others did again.
        down: For each session, the seconds before it in which nothing ran.
    """

    seconds: dict[str, float]
    divided: bool
    lost: list[Lost] = field(default_factory=list)
    down: list[float] = field(default_factory=list)

    @property
    def running(self) -> float:
        """Seconds in which the run existed, without the time between sessions."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of the running time: all but what lies between two sessions."""
        return {part: spent for part, spent in self.seconds.items() if part != "down"}

    @property
    def share(self) -> float:
        """Share of `running` that went into steps that count."""
        return self.seconds["step"] / self.running if self.running > 0 else 0.0


def goodput(run: RunLog) -> Goodput | None:
    """Return the split of a run's time; None where no events were written."""
    sessions = run.sessions
    if not sessions:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    lost, divided = [], False
    for session, kept in zip(sessions, _kept_windows(sessions), strict=True):
        cut = _seconds_at(session, kept)
        again = 0.0
        for phase, spent in session.last.seconds.items():
            # Coming up is no work that could be done again.
            counted = spent if phase in ("setup", "end") else min(spent, cut.get(phase, 0.0))
            name = "step" if phase == "train" else phase if phase in PARTS else "end"
            seconds[name] += counted
            again += spent - counted
        divided = divided or "data_wait" in session.last.seconds
        seconds["again"] += again
        lost.append(Lost(max(0, session.last.attempts - kept), again))
    down = [0.0, *(max(0.0, b.time[0] - a.time[1]) for a, b in pairwise(sessions))]
    seconds["down"] = sum(down)
    return Goodput(seconds=seconds, divided=divided, lost=lost, down=down)


def together(splits: Sequence[Goodput]) -> Goodput:
    """Return the time of several runs."""
    seconds = {part: sum(split.seconds[part] for split in splits) for part in PARTS}
    return Goodput(seconds=seconds, divided=all(split.divided for split in splits))


def _kept_windows(sessions: Sequence[Session]) -> list[int]:
    """Return up to which window the work of each session was not done again."""
    kept: list[int] = []
    limit = None
    for session in reversed(sessions):
        reached = session.last.attempts
        kept.append(reached if limit is None else min(reached, limit))
        start = session.start.attempts
        limit = start if limit is None else min(limit, start)
    return kept[::-1]


def _seconds_at(session: Session, window: int) -> dict[str, float]:
    """Return the seconds by phase when `window` was complete, in proportion between two events."""
    before = [event for event in session.events if event.attempts <= window]
    after = [event for event in session.events if event.attempts > window]
    if not after:
        return dict(session.last.seconds)
    if not before:
        return {}
    first, second = before[-1], after[0]
    share = (window - first.attempts) / (second.attempts - first.attempts)
    return {
        phase: (1 - share) * first.seconds.get(phase, 0.0) + share * spent
        for phase, spent in second.seconds.items()
    }


def progress(run: RunLog) -> list[tuple[int, float, float]]:
    """Return steps in their order, each with the samples and seconds of running time until then.

    Lost work is left out, but not the time that it took. Without events the clock of the metrics
    tells, which begins anew at each resume.
    """
    steps: dict[int, tuple[float, float]] = {}
    before = 0.0
    for session, kept in zip(run.sessions, _kept_windows(run.sessions), strict=True):
        for event in session.events:
            if event.attempts <= kept:
                steps.setdefault(event.step, (event.samples, before + event.total))
        before += session.last.total
    for at in run.progress if not steps else ():
        steps.setdefault(at.step, (at.samples, at.seconds))
    return [(step, *steps[step]) for step in sorted(steps)]


def throughput(run: RunLog) -> list[tuple[int, float]]:
    """Return samples a second of training at each log, from the clock of the events.

    Lost work is left out, as it is from the curves.
    """
    points = []
    for session, kept in zip(run.sessions, _kept_windows(run.sessions), strict=True):
        logs = [event for event in session.events if event.kind in ("start", "log")]
        for first, second in pairwise(logs):
            spent = second.trained - first.trained
            if spent > 0 and second.attempts <= kept and second.samples > first.samples:
                points.append((second.step, (second.samples - first.samples) / spent))
    return points
