"""Gives a sharded model its values: those of process 0, of files, or of its own initialisation."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics import rng
from trainkit.basics.device import siblings
from trainkit.basics.torch_internals import buffers_of, parameters_of
from trainkit.checkpoint.resharding.sharding_spec import held_part, local_part
from trainkit.distributed import Processes, run_on_all
from trainkit.distributed.collectives import first_with
from trainkit.errors import ConfigError
from trainkit.strategies.strategy import on_meta


class ParameterInitializer:
    """Remembers, before a model is sharded, where its values come from, and fills it after.

    No process ever holds more than one full tensor that it did not have before, or one block
    where the model initialises itself. Nothing but tensors travels.

    Args:
        model: Not yet sharded.
        blocks: The modules that are sharded on their own, by name.
        device: Where the shards live.
        weights: Folder to read a model on the meta device from.

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
            self._initializer = _MetaInitializer(model, blocks, seed, processes.device)

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


class _MetaInitializer:
    """A copy of a model on the meta device, whose modules are made real one block at a time.

    Each module draws from a stream of its own, keyed by the seed and its name, so the values are
    the same on any number of processes.

    Args:
        model: On the meta device.
        device: Where values are computed.
    """

    def __init__(
        self, model: nn.Module, blocks: dict[str, nn.Module], seed: int, device: torch.device
    ) -> None:
        self._model = copy.deepcopy(model)
        self._seed = seed
        self._device = device
        self._units: dict[str, list[tuple[str, nn.Module]]] = {name: [] for name in [*blocks, ""]}
        for name, module in reversed([*self._model.named_modules()]):  # inner ones first
            holders = [b for b in blocks if name == b or name.startswith(f"{b}.")]
            self._units[max(holders, key=len, default="")].append((name, module))

    def values(self, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the initial value of each tensor that is wanted."""
        left = set(wanted)
        unknown: list[str] = []
        with torch.no_grad(), rng.preserved(*siblings(self._device)):
            for modules in self._units.values():
                own = {
                    f"{name}.{key}" if name else key
                    for name, module in modules
                    for key in (*parameters_of(module), *buffers_of(module))
                }
                if not own & left:
                    continue
                for name, value in self._values_of(modules):
                    if name in left:
                        left.discard(name)
                        if _is_untouched(value):
                            unknown.append(name)
                        yield name, value
        if unknown or left:
            raise ConfigError(
                "The model is on the meta device, and these tensors have no values: "
                f"{', '.join(f'`{name}`' for name in [*unknown, *sorted(left)])}. Give their "
                "modules a `reset_parameters()` that sets them, build the model with values on "
                "process 0, or pass `FSDP(weights=...)` for what a file can hold."
            )

    def _values_of(self, modules: list[tuple[str, nn.Module]]) -> list[tuple[str, Tensor]]:
        """Make modules real, let them initialise themselves, and return what they hold."""
        made: dict[int, Tensor] = {}
        before = [
            (module, dict(parameters_of(module)), dict(buffers_of(module))) for _, module in modules
        ]
        for module, parameters, buffers in before:
            for key, parameter in parameters.items():
                if parameter is not None:
                    parameters_of(module)[key] = self._make(parameter, made)  # type: ignore[assignment]
            for key, buffer in buffers.items():
                if buffer is not None:
                    buffers_of(module)[key] = self._make(buffer, made)
        for name, module in modules:
            rng.seed_all(rng.derive(self._seed, "init", name), self._device)
            self._initialize(name, module)
        values = [
            (f"{name}.{key}" if name else key, tensor.detach())
            for name, module in modules
            for key, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
            if tensor is not None
        ]
        for module, parameters, buffers in before:
            parameters_of(module).update(parameters)
            buffers_of(module).update(buffers)
        return values

    def _make(self, tensor: Tensor, made: dict[int, Tensor]) -> Tensor:
        """Return a real tensor in place of `tensor`, the same one wherever it is used."""
        if id(tensor) not in made:
            real = _untouched(tensor, self._device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
        return made[id(tensor)]

    def _initialize(self, name: str, module: nn.Module) -> None:
        """Initialise one module, as its own class does and as a transformers model would."""
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            reset = getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        path = name.split(".") if name else []
        for length in range(len(path), -1, -1):
            holder: Any = self._model.get_submodule(".".join(path[:length]))
            if callable(getattr(holder, "_init_weights", None)):
                holder._init_weights(module)
                return


def _untouched(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like `tensor` in which it shows whether it was set."""
    real = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if real.is_floating_point() or real.is_complex():
        return real.fill_(float("nan"))
    return real.zero_() if real.dtype is torch.bool else real.fill_(torch.iinfo(real.dtype).min)


def _is_untouched(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype is torch.bool:
        return not tensor.any()
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
