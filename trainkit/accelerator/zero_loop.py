"""DeepSpeed's ZeRO under a loop of the user's own."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.accelerator.deepspeed_plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler
from trainkit.errors import ConfigError
from trainkit.precision import Precision
from trainkit.strategies.deepspeed import DeepSpeed
from trainkit.strategies.deepspeed_config import check_settings, contradiction, read_config


class LoopDeepSpeed(DeepSpeed):
    """ZeRO for a loop that calls `backward` and `step` itself.

    A backward adds to what waits for its reduction; the first that needs the gradients of a
    window, a clip or the step, makes them final.

    Args:
        plugin: What the user said; its configuration may change until an optimizer is prepared.
    """

    def __init__(self, plugin: DeepSpeedPlugin) -> None:
        super().__init__(config=plugin.deepspeed_config)
        self.plugin = plugin
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._hook: RemovableHandle | None = None
        self._clipped = False
        self._norm: Tensor | None = None  # of the latest window that was clipped
        self._by_update: list[Any] = []

    def release(self) -> None:
        """Let go of the model and the optimizer, so that others can be prepared."""
        self._leave()
        if self._hook is not None:
            self._hook.remove()
        self._model = self._optimizer = self._hook = None

    def settle(self, objects: Sequence[Any], *, steps: int, split: bool) -> list[Any]:
        """Return what `prepare` is given, placeholders replaced by what the configuration asks for.

        Args:
            steps: Micro-batches of a window.
            split: Whether batch sizes are those of all processes together.
        """
        made, size = list(objects), self.processes.size
        for index, thing in enumerate(made):
            if isinstance(thing, DummyOptim):
                made[index] = self.plugin.optimizer(thing)
        optimizers = [one for one in made if isinstance(one, Optimizer)]
        optimizer = optimizers[0] if optimizers else self._optimizer
        for index, thing in enumerate(made):
            if isinstance(thing, DummyScheduler):
                if optimizer is None:
                    raise ConfigError("`DummyScheduler` needs its optimizer. Prepare both at once.")
                made[index] = self.plugin.schedule(thing, optimizer, 1 if split else size)
                self._by_update.append(made[index])
            elif isinstance(thing, schedules()):
                said, name = self.plugin.get_value("scheduler.type", "auto"), type(thing).__name__
                if said not in ("auto", name):
                    raise contradiction("scheduler.type", said, "the prepared schedule", name)
        sizes = [one.batch_size for one in made if isinstance(one, DataLoader) and one.batch_size]
        batch_size = self._batch_size([s // size if split else s for s in sizes], steps * size)
        if optimizers:
            self.config = read_config(self.plugin.deepspeed_config)
            made_of_it = {"scheduler", *(["optimizer"] if optimizer not in objects else [])}
            said = {key: value for key, value in self.config.items() if key not in made_of_it}
            known: dict[str, Any] = {"gradient_accumulation_steps": steps, "batch_size": batch_size}
            known |= {"max_grad_norm": self._limit(), "scheduler": None, "optimizer": optimizer}
            check_settings(said, known, size)
        return made

    def _batch_size(self, sizes: Sequence[int], factor: int) -> int | None:
        """Return the batch size of a process, which fills up what is "auto"."""
        said = self.plugin.get_value("train_micro_batch_size_per_gpu", "auto")
        total = self.plugin.get_value("train_batch_size", "auto")
        fitting = [s for s in sizes if said in ("auto", s) and total in ("auto", s * factor)]
        if not sizes and said == "auto":
            return None
        choose = min if self.plugin.is_train_batch_min else max
        size: int = choose(fitting or sizes) if sizes else said
        for key in ("train_micro_batch_size_per_gpu", "train_batch_size"):
            self.plugin.deepspeed_config.setdefault(key, "auto")
        self.plugin.deepspeed_config_process(
            must_match=False,
            train_micro_batch_size_per_gpu=size,
            train_batch_size=size * factor,
        )
        return size

    def by_update(self, schedule: Any) -> bool:
        """Return whether a schedule counts updates, and not those of all processes together."""
        known = any(one is schedule for one in self._by_update)
        return known or not isinstance(schedule, LRScheduler | ReduceLROnPlateau)

    def _limit(self) -> float | None:
        """Return the norm that the configuration clips to."""
        said: Any = self.plugin.get_value("gradient_clipping")
        return None if said in (None, "auto") else float(said) or None

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        if self._model is not None:
            raise ConfigError(
                "DeepSpeed trains one model with one optimizer, but another model is prepared that "
                "has trainable parameters. Freeze what is not trained before `prepare` "
                "(`requires_grad_(False)`), or make an `Accelerator(strategy="
                "trainkit.strategies.FSDP())`."
            )
        wrapped = super().wrap(model, precision, seed)
        self._model = model
        return wrapped

    @override
    def rebind_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        if module is not self._model:
            return  # of a frozen one
        if self._optimizer is not None:
            raise ConfigError(
                "DeepSpeed trains one model with one optimizer, but another optimizer is prepared. "
                "Give all parameters to one, in groups."
            )
        super().rebind_optimizer(optimizer, module)
        self._optimizer = optimizer
        self._hook = self.updated(optimizer).register_step_pre_hook(self._before_step)

    def check_bound(self) -> None:
        """Raise where gradients would not be reduced, or not by the optimizer that uses them."""
        if self._optimizer is None:
            raise ConfigError(
                "DeepSpeed needs the model and its optimizer, as it reduces the gradients of what "
                "that updates. Prepare the model before the optimizer, or both in one call."
            )

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        yield  # the next backward reduces what this one left

    def before_backward(self) -> None:
        """Reduce what an earlier backward has left, as stage 2 does in each micro-batch."""
        self.check_bound()
        self._reduce(last=False)

    def after_backward(self) -> None:
        """Leave gradients to the loop, which must not change them before their window ends."""
        if self._parts is not None:
            self._parts.leave()

    def complete(self) -> None:
        """Make the gradients of a window final, if there are any."""
        if self._parts is not None and self._parts.is_open:
            assert self._model is not None
            self._reduce(last=True)
            self.share_buffers(self._model)
        self._clipped = False

    def check_closed(self) -> None:
        """Raise where gradients wait that a state could not hold."""
        if self._parts is not None and (self._parts.is_open or self._parts.is_reduced):
            raise ConfigError(
                "DeepSpeed has gradients that no update has used, which a state cannot hold. Call "
                "`save_state` after `optimizer.step()`, `if accelerator.sync_gradients:`."
            )

    def _before_step(self, *_: Any) -> None:
        limit = self._limit()
        if limit is not None and not self._clipped and self._optimizer is not None:
            held = [p for group in self._optimizer.param_groups for p in group["params"]]
            self.clip_grad_norm(held, limit)
        self._clipped = False

    @override
    def finish_reduction(self, model: nn.Module, precision: Precision) -> nn.Module:
        self.complete()
        return model

    @override
    def clip_grad_norm(self, parameters: Iterable[Any], max_norm: float) -> Tensor:
        limit = self._limit()
        if limit not in (None, max_norm):
            raise contradiction("gradient_clipping", limit, "`max_norm` of the loop", max_norm)
        if self._parts is None or not self._parts.is_open:
            self._norm, self._clipped = super().clip_grad_norm(parameters, max_norm), True
        # Inside of a window nothing is clipped, as in Accelerate under DeepSpeed.
        return torch.zeros((), device=self.device) if self._norm is None else self._norm


def schedules() -> tuple[type, ...]:
    """Return the classes of schedules; those of DeepSpeed too, once it is imported."""
    theirs: Any = sys.modules.get("deepspeed.runtime.lr_schedules")
    names = () if theirs is None else theirs.VALID_LR_SCHEDULES
    return (LRScheduler, ReduceLROnPlateau, *(getattr(theirs, name) for name in names))
