"""Data parallelism by DeepSpeed's ZeRO."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.packages import require
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies import deepspeed_config
from trainkit.strategies.fsdp import check_dense
from trainkit.strategies.sharded import ShardedStrategy
from trainkit.strategies.strategy import Strategy
from trainkit.strategies.zero_parts import ZeroParts, copy_for_updates

BY_ELEMENT = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SGD", "RMSprop", "Adadelta", "Rprop")
"""Optimizers of torch that change an element by its own gradients alone."""


class DeepSpeed(ShardedStrategy):
    """Shares out the optimizer's state, and its gradients, as ZeRO does, by DeepSpeed.

    DeepSpeed lays parameters out, reduces gradients and spreads what was updated. Windows, loss
    scales, norms, clipping and the update itself are those of every strategy, and so are the
    results. A checkpoint holds the state of whole parameters, which process 0 gathers in the
    memory of its CPU; any strategy and any number of processes go on from it.

    Every trainable parameter must get a gradient in each window, and none may freeze or thaw
    during a training. Trained parameters are in fp32. On one process DeepSpeed is not used.

    Args:
        stage: 1: each process has a part of the optimizer's state; 2: of the gradients too. None:
            that of `config`, else 2.
        config: What DeepSpeed is given: a mapping, or the path of a JSON file with one. What it
            says of batches, clipping, precision, optimizer and schedule must be "auto" or what the
            training does. None: what the launcher says.
        device: Where the model runs; None: the accelerator of the local rank, else the CPU.
    """

    name = "deepspeed"
    sharded = False  # each process has the parameters whole

    @checked
    def __init__(
        self,
        *,
        stage: int | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device)
        self.config = deepspeed_config.read_config(
            deepspeed_config.told() if config is None else config
        )
        self.stage = self.config["zero_optimization"].setdefault("stage", stage or 2)
        if stage not in (None, self.stage):
            raise deepspeed_config.contradiction(
                "zero_optimization.stage", self.stage, "`stage`", stage
            )
        if self.stage not in (1, 2):
            raise ConfigError(
                f"`stage` of ZeRO must be 1 or 2, but is {self.stage!r}. For ZeRO-3 use "
                '`strategy="fsdp"`, and for ZeRO-0 "ddp".'
            )
        require("deepspeed", '`strategy="deepspeed"`', ', or pass `strategy="fsdp"`')
        self._parts: ZeroParts | None = None

    @override
    def check_settings(self, known: Mapping[str, Any]) -> None:
        deepspeed_config.check_settings(self.config, known, self.processes.size)

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        self.check_whole(model)
        deepspeed_config.check_precision(self.config, precision.name)
        check_dense(model)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if other := [n for n, p in trained.items() if p.dtype != torch.float32]:
            raise ConfigError(
                f"{len(other)} trainable parameters are not in fp32 ({quoted(other)}). Load the "
                'model in fp32, and pass `precision="bf16"`, which computes in it.'
            )
        self._leave()
        return self.to_device(model)

    @override
    def rebind_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        kind = type(optimizer)
        if self._parts is not None:
            raise ConfigError(
                '`strategy="deepspeed"` trains one model with one optimizer, but there are '
                'several. Use `strategy="fsdp"` or "ddp".'
            )
        known = any(kind is getattr(torch.optim, name) for name in BY_ELEMENT)
        if not (known or self.config.get("zero_allow_untested_optimizer")):
            raise ConfigError(
                f"ZeRO has no shapes, and it is not known whether `{kind.__name__}` changes each "
                f"element by its own gradients alone, as {quoted(BY_ELEMENT)} do. If so write "
                '`"zero_allow_untested_optimizer": true` into the DeepSpeed configuration; else '
                'use `strategy="fsdp"`.'
            )
        if any(optimizer.state.values()) or getattr(optimizer, "needs_closure", False):
            raise ConfigError(
                f"`{kind.__name__}` has a state before the parameters are shared out, or computes "
                "gradients again in its step. Pass one that does neither, such as "
                "`partial(AdamW, lr=3e-4)`, and go on from a checkpoint by `resume`."
            )
        if self.processes.size > 1:
            self._parts = self._start(module, optimizer)

    def _start(self, module: nn.Module, optimizer: Optimizer) -> ZeroParts:
        deepspeed = load(self.device)
        updating = copy_for_updates(optimizer)
        most = sum(p.numel() for group in updating.param_groups for p in group["params"])
        made = deepspeed_config.for_deepspeed(self.config, self.processes.size, most)
        engine, zero, *_ = deepspeed.initialize(model=module, optimizer=updating, config=made)
        self.processes.apply_timeout(engine.data_parallel_group)
        self.share_buffers(module)
        self.engines = (engine, zero)
        return ZeroParts(zero, updating, optimizer)

    def _leave(self) -> None:
        """Give back the optimizer and the model of an earlier training."""
        if self._parts is not None:
            self._parts.close()
        self._parts, self.engines = None, ()

    @override
    def updated(self, optimizer: Optimizer) -> Optimizer:
        return optimizer if self._parts is None else self._parts.updating

    @override
    def whole_state(self, optimizer: Optimizer) -> AbstractContextManager[object]:
        parts = self._parts
        return nullcontext() if parts is None else parts.whole_state(self.processes)

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        yield
        self._reduce(last=False)

    @override
    def begin_reduction(self, model: nn.Module) -> None:
        self._reduce(last=False)  # of a repeat

    @override
    def finish_reduction(self, model: nn.Module, precision: Precision) -> nn.Module:
        self._reduce(last=True)
        self.share_buffers(model)
        return model

    def _reduce(self, *, last: bool) -> None:
        if self._parts is not None:
            self._parts.reduce(last=last)

    @override
    def gradients_apart(self, model: nn.Module) -> AbstractContextManager[object]:
        return nullcontext() if self._parts is None else self._parts.gradients_apart()

    @override
    def local_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        parts = self._parts
        return (super().local_gradients if parts is None else parts.gradients)(parameters)

    # Parameters are whole, and all of them must get a gradient in each window.
    zero_gradients = Strategy.zero_gradients
    check_gradients = Strategy.check_gradients

    @override
    def close(self) -> None:
        self._leave()
        super().close()


def load(device: torch.device) -> Any:
    """Return the module `deepspeed`, which says nothing of itself."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for others, and says so
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; there is gloo
    return deepspeed
