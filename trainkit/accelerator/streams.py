"""What of a state is each process's own: random streams, open gradients, and its position."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainkit import rng
from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.preparer import Registry
from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.exact import as_parameter
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.format.schema import Unfit
from trainkit.checkpoint.forms import blaming
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError, ConfigError
from trainkit.strategies import Strategy

__all__ = ["Streams", "saved_by"]


class Streams:
    """Saves and restores the random streams and the open gradients of this process.

    Args:
        parameters: Returns the parameters of the prepared models by name.
        registry: Has the loaders.
        strategy: Tells whether models are sharded.
        accumulation: Where the windows are.
        processes: The processes of the job.
        device: The device of this process.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        registry: Registry,
        strategy: Strategy,
        accumulation: Accumulation,
        *,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._registry = registry
        self._strategy = strategy
        self._accumulation = accumulation
        self._processes = processes
        self._device = device

    def save(self) -> dict[str, Any]:
        """Return what this process saves."""
        python, numpy, host = rng.save_host()
        return {
            "python": python,
            "numpy": numpy,
            "torch": host,
            "device": rng.save_device(self._device),
            "gradients": self._open_gradients(),
            "loaders": [loader.state_dict() for loader in self._registry.loaders],
            "accumulation": self._accumulation.state_dict(),
        }

    def read(self, checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], bool]:
        """Return what this process saved, or a new seed for it, and True.

        On another number of processes than trained then: what each that saved did save, and False.

        Raises:
            CheckpointError: Other processes saved it, inside a window.
        """
        writers, saved = checkpoint.manifest.world_size, saved_by(checkpoint)
        rank, names = self._processes.rank, checkpoint.names()
        with blaming(checkpoint, None):
            if not 0 < writers <= len(names) or process_part(writers - 1) not in names:
                raise Unfit(f"is {writers}, but there are not as many parts", "world_size")
        if saved == self._processes.size:
            if rank < writers:
                return [checkpoint.read(process_part(rank))], True
            digests = [info.xxh3_128 for _, info in sorted(checkpoint.manifest.files.items())]
            return [{"seed": rng.derive(rank, *digests), "gradients": {}}], True
        own = [checkpoint.read(process_part(index)) for index in range(writers)]
        if any(isinstance(one, Mapping) and one.get("gradients") for one in own):
            raise CheckpointError(
                f"The state `{checkpoint.path}` was saved inside a window by {saved} processes, "
                "which others cannot complete. Load it on as many.",
                path=checkpoint.path,
            )
        return own, False

    def restore(self, streams: Mapping[str, Any]) -> None:
        """Put back what `read` returned."""
        parameters = self._parameters()
        for parameter in parameters.values():
            parameter.grad = None
        for name, gradient in streams["gradients"].items():
            parameter = parameters[name]
            parameter.grad = as_parameter(gradient.to(parameter.device), parameter)
        if "seed" in streams:
            rng.seed_all(streams["seed"])
            return
        rng.restore_host((streams["python"], streams["numpy"], streams["torch"]))
        rng.restore_device(self._device, streams["device"])

    def _open_gradients(self) -> dict[str, torch.Tensor]:
        """Return what an incomplete window has accumulated on this process."""
        if not self._accumulation.is_open:
            return {}
        if self._strategy.sharded:
            raise ConfigError(
                "A state of a sharded model cannot be saved inside a window. Save it "
                "`if accelerator.sync_gradients:`."
            )
        return {
            name: parameter.grad
            for name, parameter in self._parameters().items()
            if parameter.grad is not None
        }


def saved_by(checkpoint: Checkpoint) -> int:
    """Return how many processes trained when a state was saved, perhaps by process 0 alone."""
    manifest = checkpoint.manifest
    saved = manifest.metadata.get("processes")
    return saved if type(saved) is int else manifest.world_size
