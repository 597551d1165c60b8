"""Steps of each process alone, whose parameters are averaged now and then."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import nn

from trainkit.basics.config import check_whole
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator


class LocalSGD:
    """Inside of it processes do not reduce gradients; their parameters are averaged instead.

    `step` is called after each micro-batch. At the end they are averaged once more; states of
    optimizers and buffers never are, so `save_state` needs `check_replicas=False` from then on. On
    one process nothing changes.

    Args:
        accelerator: What prepared the model.
        model: As `prepare` returned it.
        local_sgd_steps: Calls of `step` between two averages, at least 1.
        enabled: False: gradients are reduced as ever.

    Raises:
        ConfigError: The model is sharded, or `local_sgd_steps` is none.
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        model: nn.Module,
        local_sgd_steps: int | None,
        enabled: bool = True,
    ) -> None:
        if enabled:
            check_whole("local_sgd_steps", local_sgd_steps)
        if enabled and accelerator.distributed_type == "FSDP":
            raise ConfigError(
                "`LocalSGD` averages whole models, but FSDP shards this one. Use DDP, or pass "
                "`enabled=False`."
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        """Calls of `step`."""
        self._every = local_sgd_steps or 1
        self._accelerator = accelerator
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            self._stack.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.enabled and error is None:  # else the others do not come here
            self._average()
        self._stack.close()

    def step(self) -> None:
        """Count a micro-batch; where enough were counted, average the parameters."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average()

    def _average(self) -> None:
        for parameter in self._model.parameters():
            self._accelerator.processes.all_reduce(parameter.data, "mean")
