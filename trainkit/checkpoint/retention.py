"""Which checkpoints stay (rule 27); the store knows how to remove the others."""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainkit.basics.config import check_whole
from trainkit.checkpoint.checkpoint import verify
from trainkit.checkpoint.listing import Entry, in_order, on_the_way
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import CheckpointError, ConfigError

Best = tuple[str, Literal["min", "max"], int]
"""A metric, which end of it is good, and how many checkpoints to keep for it."""


class Retention(Protocol):
    """Chooses what stays; what `rotate` protects stays in any case."""

    def keep(self, entries: Sequence[Entry]) -> set[int]:
        """Return the steps to keep of `entries`, of which the last is the newest."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepPolicy:
    """Keeps the last, the best, and every so many steps; a checkpoint stays if one reason holds.

    Args:
        keep_last: How many of the newest steps stay, at least 1; None: all.
        keep_best: A metric as in `metadata["metrics"]`, `"min"` or `"max"`, and how many stay.
            NaN is never best; of equals the older stays.
        keep_every: Steps that are multiples of this stay.
    """

    keep_last: int | None = 1
    keep_best: Best | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value)
        if self.keep_best is not None:
            _check_best(self.keep_best)

    def keep(self, entries: Sequence[Entry]) -> set[int]:
        """Return the steps to keep."""
        steps = [*dict.fromkeys(entry.step for entry in entries)]
        kept = set(steps if self.keep_last is None else steps[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_best is not None:
            kept.update(entry.step for entry in ranked(on_the_way(entries), self.keep_best))
        return kept


def _check_best(best: Any) -> None:
    if type(best) is not tuple or len(best) != 3 or type(best[0]) is not str:
        wanted = '("eval/loss", "min", 1)'
        raise ConfigError(f"`keep_best` must be a tuple such as {wanted}, but is {best!r}.")
    if best[1] not in ("min", "max"):
        wanted = '"min" (lower is better) or "max" (higher is better)'
        raise ConfigError(f"`keep_best` must say {wanted}, but says {best[1]!r}.")
    if type(best[2]) is not int or best[2] < 1:
        raise ConfigError(f"`keep_best` must keep a number from 1 on, but keeps {best[2]!r}.")


def best_of(entries: Sequence[Entry], best: Any = None) -> tuple[str, list[Entry]]:
    """Return by which metric the best are chosen, and these, of the newest run, the best first.

    By `best`, else by what the newest says that has such a rule; the metric is empty where none
    does. A rule that makes no sense is a ConfigError.
    """
    told = [entry for entry in entries if best or "keep_best" in entry.manifest.metadata]
    if not told:
        return "", []
    newest = in_order(told)[-1].manifest
    best = best or newest.metadata["keep_best"]
    _check_best(best := tuple(best) if type(best) is list else best)
    own = [entry for entry in entries if entry.manifest.run_id == newest.run_id]
    return best[0], ranked(on_the_way(own), best)


def ranked(entries: Sequence[Entry], best: Best) -> list[Entry]:
    """Return those with the best values of a metric, the best first, as many as are to be kept.

    NaN is never best, nor what is not finite; of equals the older comes first. Of several of one
    step the last counts.
    """
    metric, mode, count = best
    sign = 1.0 if mode == "min" else -1.0
    of_step = {entry.step: entry for entry in entries if entry.manifest.is_finite}
    values = [(e.manifest.metrics.get(metric, math.nan), step) for step, e in of_step.items()]
    ranking = sorted((sign * value, step) for value, step in values if not math.isnan(value))
    return [of_step[step] for _, step in ranking[:count]]


def rotate(store: CheckpointStore, policy: Retention, more: Set[int] = frozenset()) -> list[Entry]:
    """Remove what `removable` returns, and return it; call it after a commit, on process 0."""
    entries = removable(store, policy, more)
    for entry in entries:
        store.remove(entry)
    return entries


def removable(
    store: CheckpointStore,
    policy: Retention,
    more: Set[int] = frozenset(),
    check: Callable[[Path], object] = verify,
) -> list[Entry]:
    """Return the checkpoints that nobody needs.

    Kept beside what `policy` keeps: `more` steps, what is pinned, the newest one that is valid,
    the newest one that is finite too, the one saved last, and those of other runs. What holds
    weights alone is not taken for the newest where a run can be resumed from another. `check`
    raises where one is not valid.
    """
    every = store.checkpoints()
    whole = [entry for entry in every if entry.manifest.is_resumable]
    newest = _newest_valid(store, whole or every, check)
    run = store.last_saved or newest
    if newest is None or run is None:
        return []  # where nothing is known to be good, nothing is given up
    entries = [entry for entry in every if entry.manifest.run_id == run.manifest.run_id]
    kept = policy.keep(entries) | more | store.pinned() | {newest.step, run.step}
    if not newest.manifest.is_finite:
        good = _newest_valid(store, [e for e in whole if e.manifest.is_finite], check)
        kept |= set() if good is None else {good.step}
    return [entry for entry in entries if entry.step not in kept]


def _newest_valid(
    store: CheckpointStore, entries: Sequence[Entry], check: Callable[[Path], object]
) -> Entry | None:
    """Return the newest of `entries` that is valid, or None.

    The one that was committed last through `store` is not read again.
    """
    for entry in reversed(entries):
        if store.last_saved is not None and entry.path == store.last_saved.path:
            return entry
        try:
            check(entry.path)
        except CheckpointError:
            continue
        return entry
    return None
