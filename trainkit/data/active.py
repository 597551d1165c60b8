"""Which batch is under way: what `gather_for_metrics` asks (DESIGN 2.19)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainkit.errors import ConfigError

__all__ = ["ActiveLoaders", "BatchInfo"]


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """How many samples of a batch are real.

    Args:
        counts: Real samples of each process, by rank.
        local_size: Samples in this process's batch: its count, or the size of the zero-weight
            repeat where that is 0.
    """

    counts: tuple[int, ...]
    local_size: int


class ActiveLoaders:
    """The loaders under way, each with the batch that it yielded last.

    After a loader has ended, its last batch stays the current one until another loader begins.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[Any, tuple[int, ...] | None, int]] = {}
        self._ended: tuple[Any, tuple[int, ...] | None, int] | None = None

    def began(self, loader: Any) -> None:
        """Note that `loader` starts a pass."""
        self._under_way[id(loader)] = (loader, None, 0)
        self._ended = None

    def yielded(self, loader: Any, counts: tuple[int, ...], local_size: int) -> None:
        """Note that `loader` hands out a batch with `counts` real samples on the processes."""
        self._under_way[id(loader)] = (loader, counts, local_size)

    def ended(self, loader: Any) -> None:
        """Note that the pass of `loader` is over, or was left."""
        entry = self._under_way.pop(id(loader), None)
        if entry is not None:
            self._ended = entry

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forget the loaders under way for a while, as in an evaluation inside training."""
        outer = self._under_way, self._ended
        self._under_way, self._ended = {}, None
        try:
            yield
        finally:
            self._under_way, self._ended = outer

    def marks(self) -> tuple[object, ...]:
        """Return what is another object after every batch; from any thread."""
        return (*self._under_way.values(), self._ended)

    def current(self, loader: Any = None) -> BatchInfo | None:
        """Return what is known of the batch yielded last; None where no loader ever was under way.

        Args:
            loader: The prepared loader, or the one that it was made from; needed where several
                are under way with different numbers of real samples.

        Raises:
            ConfigError: `loader` is needed, or has yielded nothing.
        """
        if loader is not None:
            return self._of(loader)
        entries = [entry for entry in self._under_way.values() if entry[1] is not None]
        if not entries and self._ended is not None and self._ended[1] is not None:
            entries = [self._ended]
        infos = {(counts, size) for _, counts, size in entries if counts is not None}
        if len(infos) > 1:
            raise ConfigError(
                f"{len(infos)} loaders are under way with different numbers of real samples "
                f"({', '.join(str(list(counts)) for counts, _ in sorted(infos))} by process), so "
                "the batch that is meant is not known. Say which by `loader=`."
            )
        for counts, size in infos:
            return BatchInfo(counts, size)
        return None

    def _of(self, loader: Any) -> BatchInfo:
        entries = list(self._under_way.values())
        if self._ended is not None:
            entries.append(self._ended)
        for known, counts, size in entries:
            same = known is loader or getattr(known, "source", None) is loader
            if same and counts is not None:
                return BatchInfo(counts, size)
        raise ConfigError(
            f"The given `loader`, a `{type(loader).__name__}`, has no batch under way. Give the "
            "loader whose batch is meant, while it is iterated."
        )
