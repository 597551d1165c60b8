"""Gives a sharded model its values: those of process 0, of files, or of its own initialisation."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.checkpoint.resharding.sharding_spec import held_part, local_part
from trainkit.distributed import Processes, run_on_all
from trainkit.distributed.collectives import first_with
from trainkit.errors import ConfigError
from trainkit.strategies.meta_initializer import MetaInitializer
from trainkit.strategies.strategy import on_meta

__all__ = ["ParameterInitializer"]


class ParameterInitializer:
    """Remembers, before a model is sharded, where its values come from, and fills it after.

    No process ever holds more than one full tensor that it did not have before, or one block
    where the model initialises itself. Nothing but tensors travels.

    Args:
        model: Not yet sharded.
        blocks: The modules that are sharded on their own, by name.
        processes: Those that share the model.
        device: Where the shards live.
        weights: Folder to read a model on the meta device from.
        seed: That of the run.

    Raises:
        ConfigError: The processes have models that cannot be filled alike.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[str, nn.Module],
        processes: Processes,
        device: torch.device,
        weights: Path | None,
        seed: int,
    ) -> None:
        self._processes, self._device, self._weights = processes, device, weights
        self._empty = on_meta(model)
        real = first_with(processes, not self._empty)  # the first process that has values
        self._from_main = real == 0
        if self._from_main:
            self._values = {name: t.detach() for name, t in _tensors(model)}
            if weights is not None:
                raise ConfigError(
                    "`weights` is for a model on the meta device, but that of process 0 has "
                    'values. Build it under `torch.device("meta")`, or leave `weights` out.'
                )
        elif real is not None:
            raise ConfigError(
                "The model of process 0 is on the meta device, but not that of process "
                f"{real}. Build a real one on process 0, or none."
            )
        else:
            self._initializer = MetaInitializer(model, blocks, seed, processes.device)

    def fill(self, model: nn.Module) -> None:
        """Give every tensor its values; each process keeps its own rows."""
        if self._empty:
            model.to_empty(device=self._device)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self._processes.device))
        if self._from_main:
            self._send(model)
        elif self._weights is None:
            self._initialize(model, {name for name, _ in _tensors(model)})
        else:
            self._read(model, self._weights)

    def _send(self, model: nn.Module) -> None:
        """Send the values of process 0, one tensor at a time."""
        processes = self._processes
        if processes.size == 1:
            return
        for name, tensor in _tensors(model):
            if processes.is_main:
                processes.broadcast(self._values.pop(name).to(processes.device))
            else:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=processes.device)
                _put(processes.broadcast(empty), tensor)

    def _read(self, model: nn.Module, folder: Path) -> None:
        """Read this process's part of each tensor, and compute what is in no file."""
        from trainkit.export.loading import Loading  # rarely needed

        keys = run_on_all(self._processes, lambda: Loading(model).run(folder))
        if keys.missing_keys:
            raise ConfigError(
                f"`weights={str(folder)!r}` does not hold {', '.join(keys.missing_keys)}. Pass a "
                "folder that `save_model` or `save_pretrained` has written of such a model."
            )
        saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        self._initialize(model, {name for name, t in _tensors(model) if id(t) not in saved})

    def _initialize(self, model: nn.Module, wanted: set[str]) -> None:
        if wanted:
            tensors = dict(_tensors(model))
            for name, value in self._initializer.values(wanted):
                _put(value, tensors[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer once, with its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _put(full: Tensor, tensor: Tensor) -> None:
    """Copy this process's part of `full` into `tensor`."""
    with torch.no_grad():
        local_part(tensor).copy_(full[held_part(tensor)])
