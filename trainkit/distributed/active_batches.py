"""Which batch is under way: what `gather_for_metrics` asks (rule 19)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from trainkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """How many samples of a batch are real.

    Args:
        counts: Real samples of each process, by rank.
        local_size: Samples in this process's batch: its count, or the size of the zero-weight
            repeat where that is 0.
        full_size: Samples of a full batch of one process; None where that is not known.
        own: Rows that this process has for its real samples, where a collate function may make
            more or fewer of them, so that other processes do not know it (see `agreed_counts`).
        left: Batches of the pass that come after it; None where that is not known.
    """

    counts: tuple[int, ...]
    local_size: int
    full_size: int | None = None
    own: int | None = None
    left: int | None = None


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass over a loader that is under way.

    Attributes:
        key: What the pass is known by: the loader, or an object of its own where a loader may be
            passed over twice at once.
        loader: The prepared loader.
        latest: Number of its latest batch among all batches of all loaders; before the first, the
            number of batches when its iterator was made.
        earlier: What `latest` was before that.
        batch: Its latest batch; None before the first.
    """

    key: Any
    loader: Any
    latest: int
    earlier: int = 0
    batch: BatchInfo | None = None

    def is_over(self, loader: Any) -> bool:
        """Return whether a user who says `loader` means this pass."""
        source = getattr(loader, "source", None)  # of `skip_first_batches`
        return any(self.loader is one for one in (loader, source)) or (
            getattr(self.loader, "source", None) is loader
        )


class ActiveLoaders:
    """The passes over loaders that are under way, each with the batch that it yielded last."""

    def __init__(self) -> None:
        self._passes: list[_Pass] = []
        self._changes = 0
        self._interrupted: _Pass | None = None  # the pass that ended last, if others yielded since

    def began(self, key: Any, loader: Any = None, since: int | None = None) -> None:
        """Note that a pass begins.

        Args:
            key: Stands for the pass.
            loader: The prepared loader, where `key` is another object.
            since: What `changes` was when its iterator was made; by default now.
        """
        loader = key if loader is None else loader
        last, self._interrupted = self._interrupted, None
        if last is not None and last.loader is loader:  # begun anew while another goes on
            since = last.latest
        self._passes.append(_Pass(key, loader, self._changes if since is None else since))

    def yielded(
        self,
        key: Any,
        counts: tuple[int, ...],
        local_size: int,
        full_size: int | None = None,
        own: int | None = None,
        left: int | None = None,
    ) -> None:
        """Note that a pass hands out a batch; see `BatchInfo`."""
        entry = self._find(key)
        if entry is None:
            return  # it has read to its end before its batches are used
        self._changes += 1
        entry.batch = BatchInfo(counts, local_size, full_size, own, left)
        entry.earlier, entry.latest = entry.latest, self._changes

    def ended(self, key: Any) -> None:
        """Note that a pass is over, or was left."""
        entry = self._find(key)
        if entry is not None:
            self._passes.remove(entry)
            self._interrupted = entry if entry.latest < self._changes else None

    def forget(self) -> None:
        """Forget all passes."""
        self._passes.clear()
        self._interrupted = None

    def forget_loaders(self, loaders: Sequence[Any]) -> None:
        """Forget the passes over some loaders."""
        self._passes = [one for one in self._passes if all(one.loader is not x for x in loaders)]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forget the loaders under way for a while, as in an evaluation inside training."""
        outer, self._passes = self._passes, []
        try:
            yield
        finally:
            self._passes = outer

    def changes(self) -> int:
        """Return a number that grows with every batch; from any thread."""
        return self._changes

    def current(self, loader: Any = None) -> BatchInfo | None:
        """Return what is known of the batch yielded last; None where no loader is under way.

        Args:
            loader: The loader that is meant, as the user knows it; by default any.

        Raises:
            ConfigError: `loader` has no batch under way.
        """
        if loader is None:
            return self.latest()[1]
        meant = [one for one in self._with_batch() if one.is_over(loader)]
        if not meant:
            raise ConfigError(
                f"The given `loader`, a `{type(loader).__name__}`, has no batch under way. Give "
                "the loader whose batch is meant, while it is iterated."
            )
        return max(meant, key=attrgetter("latest")).batch

    def latest(self) -> tuple[Any, BatchInfo | None]:
        """Return the loader that yielded last, of those under way, and the batch; or None twice."""
        batch = self._latest() if self._with_batch() else None
        return (None, None) if batch is None else (batch.loader, batch.batch)

    def doubts(self) -> tuple[str, str]:
        """Return why the batch yielded last may not be meant, and what to say if a value misfits.

        Both are empty where there is no other. Two loaders that yield in turns, as under `zip`,
        may both be meant: that matters where a value can be of either batch, and is cut by one.
        """
        entries = self._with_batch()
        if len(entries) < 2:
            return "", ""
        last = self._latest()
        for other in entries:
            one, two = other.batch, last.batch
            assert one is not None
            assert two is not None
            # A value of one can be taken for one of the other, and is cut wrongly.
            may_be_either = one.local_size == two.local_size and one.counts != two.counts
            if last.earlier < other.latest < last.latest and may_be_either:
                return (
                    "Two loaders yield in turns, and their batches hold different numbers of "
                    "real samples. The value may belong to either: say to which by `loader=`."
                ), ""
        hint = f" {len(entries)} loaders are under way: `loader=` says whose batch is meant."
        return "", hint

    def _find(self, key: Any) -> _Pass | None:
        for one in reversed(self._passes):
            if one.key is key:
                return one
        return None

    def _with_batch(self) -> list[_Pass]:
        return [one for one in self._passes if one.batch is not None]

    def _latest(self) -> _Pass:
        return max(self._with_batch(), key=attrgetter("latest"))
