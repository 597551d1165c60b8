"""When gradients are synchronised in a loop of the user's own, and by what a loss is divided."""

from dataclasses import replace
from typing import Any

from typing_extensions import override

from trainkit.accelerator.settings import GradientAccumulationPlugin
from trainkit.distributed.active_batches import ActiveLoaders


class Accumulation:
    """The windows of a loop of the user's own.

    The last window of a pass may be smaller. A loss is divided by the size of its own window, so
    the last update counts its samples as every other one does (rule 7). Where the length of
    a loader is not known, its last window turns out to be smaller only when it ends; then
    `correction` is what the gradients are still to be multiplied by.

    Args:
        active: Tells where the loaders under way are.
    """

    initialized, is_xla_gradients_synced = True, False

    def __init__(self, plugin: GradientAccumulationPlugin, active: ActiveLoaders) -> None:
        self.plugin = plugin
        self._active = active
        self.sync_gradients = True
        """Whether the present micro-batch is the last of its window."""
        self.correction = 1.0
        """Factor on the gradients of the present window, before they are used."""
        self.count = 0
        """Micro-batches since the last window that was ended by the end of a loader."""
        self.window = 0
        """Number of the present window."""
        self.divisor = plugin.num_steps
        """What the present loss is divided by."""
        self._in_window = 0

    @property
    def num_steps(self) -> int:
        """Micro-batches of a full window."""
        return self.plugin.num_steps

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings that are not the defaults, and `num_steps`."""
        return {"num_steps": self.num_steps, **self.plugin.to_kwargs()}

    @property
    def adjust_scheduler(self) -> bool:
        """Accepted; see `GradientAccumulationPlugin`."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a loader ends a window."""
        return self.plugin.sync_with_dataloader

    @property
    def is_open(self) -> bool:
        """Whether the present window has gradients and is not complete."""
        return self._in_window > 0

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loader that yielded last, of those under way, has yielded its last batch."""
        batch = self._active.current()
        return batch is not None and batch.left == 0

    @property
    def remainder(self) -> int:
        """Real samples of that loader's last batch if it was filled up, else -1."""
        batch = self._active.current()
        if batch is None or sum(batch.counts) == max(batch.counts) * len(batch.counts):
            return -1
        return sum(batch.counts)

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is under way."""
        return self._active.latest()[0] is not None

    @property
    def is_unpaired(self) -> bool:
        """Whether other processes have no batch beside the present one."""
        loader, batch = self._active.latest()
        # Of a loader of a `Trainer` all processes have a batch.
        may_lack = getattr(loader, "may_lack_batches", False)
        return batch is not None and 0 in batch.counts and bool(may_lack)

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that yielded last, of those under way; None where there is none."""
        return self._active.latest()[0]

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def pass_ended(self) -> None:
        """Note that a pass over a loader is over, or was left."""
        if self._in_window == 0:  # the last one may have been shorter
            self.divisor = self.num_steps

    def advance(self) -> bool:
        """Begin the next micro-batch; return whether it is the last of its window."""
        if self._in_window == 0:
            self.divisor = self.num_steps - self.count % self.num_steps
            batch = self._active.current()
            if batch is not None and batch.left is not None and self.sync_with_dataloader:
                self.divisor = min(self.divisor, batch.left + 1)
            self.correction = 1.0
            self.window += 1
        self._in_window += 1
        if self.plugin.sync_with_dataloader and self.end_of_dataloader:
            self.count = 0
            self.sync_gradients = True
        else:
            self.count += 1
            self.sync_gradients = self.count % self.num_steps == 0
        if self.sync_gradients:
            self.correction = self.divisor / self._in_window
            self._in_window = 0
        return self.sync_gradients

    def resize(self, num_steps: int) -> None:
        """Let windows be of another size from the next one on."""
        self.plugin = replace(self.plugin, num_steps=num_steps)
        if self._in_window == 0:
            self.divisor = num_steps

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "in_window": self._in_window, "divisor": self.divisor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self._in_window = state["count"], state["in_window"]
        self.divisor = state["divisor"]

    def reset(self) -> None:
        """Begin a new window."""
        self.count = self._in_window = 0
        self.sync_gradients, self.correction = True, 1.0

    @override
    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
