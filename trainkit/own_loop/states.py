"""What `save_state` writes and `load_state` puts back (DESIGN 2.22, 2.28)."""

import platform
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainkit import rng
from trainkit.checkpoint import Checkpoint, CheckpointStore
from trainkit.checkpoint.opened import verify
from trainkit.distributed import Processes, together
from trainkit.errors import CheckpointError, ConfigError
from trainkit.own_loop.accumulation import Accumulation
from trainkit.own_loop.gradients import Gradients
from trainkit.own_loop.naming import Places
from trainkit.own_loop.optimizer_state import by_name, check_optimizer, load_by_name
from trainkit.own_loop.preparing import Registry
from trainkit.own_loop.settings import ProjectConfiguration
from trainkit.state import VERSION
from trainkit.strategies import Strategy
from trainkit.types import Stateful

__all__ = ["States"]

Hook = Callable[..., Any]


class States:
    """Saves and loads all that was prepared and registered.

    Args:
        registry: What that is.
        strategy: Tells whether models are sharded.
        gradients: Holds the loss scale.
        accumulation: Where the windows are.
        project: Where states go by themselves.
        processes: The processes of the job.
        device: The device of this process.
    """

    def __init__(
        self,
        registry: Registry,
        strategy: Strategy,
        gradients: Gradients,
        accumulation: Accumulation,
        *,
        project: ProjectConfiguration,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self.places = Places(project, processes)
        self._registry = registry
        self._strategy = strategy
        self._gradients = gradients
        self._accumulation = accumulation
        self._processes = processes
        self._device = device
        self._before_save: OrderedDict[int, Hook] = OrderedDict()
        self._before_load: OrderedDict[int, Hook] = OrderedDict()

    def register(self, objects: Sequence[Any]) -> None:
        """Save and load more objects with every state.

        Raises:
            ConfigError: One has no `state_dict` and `load_state_dict`.
        """
        for thing in objects:
            if not isinstance(thing, Stateful):
                raise ConfigError(
                    f"A `{type(thing).__name__}` cannot be registered for checkpointing: it has "
                    "no `state_dict` and `load_state_dict`. Give it both."
                )
        self._registry.objects.extend(objects)

    def before_save(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before each save, on every process."""
        return _register(self._before_save, hook)

    def before_load(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, folder)` before each load, on every process."""
        return _register(self._before_load, hook)

    def save(self, output_dir: Any) -> Path:
        """Save the state; return its folder. Every process must call it.

        Raises:
            ConfigError: There is no folder.
            CheckpointError: It failed on some process; an earlier state is untouched.
        """
        folder = self.places.for_saving(output_dir)
        models = [self._strategy.unwrap(model) for model in self._registry.models]
        weights: list[Any] = [model.state_dict() for model in models]
        for hook in self._before_save.values():
            hook(models, weights, str(folder))
        parts = self._common(weights)
        rank = self._processes.rank
        own = {_process_part(rank): self._streams()}
        if self._strategy.sharded:
            own |= self._split(parts, rank)
        elif self._processes.is_main:
            own |= parts
        self.places.commit(folder, own, _describe(self._registry))
        return folder

    def load(self, input_dir: Any, report: Callable[[str], None]) -> None:
        """Load a state. Every process must call it.

        Nothing changes before all of it is known to be good and to fit.

        Raises:
            CheckpointError: There is none, or it is broken, or does not fit; on all processes.
        """
        folder, path = self.places.for_loading(input_dir, report)
        models = list(map(self._strategy.unwrap, self._registry.models))
        left = list(models)
        if self._before_load:  # a hook may load what it finds
            together(self._processes, lambda: verify(path))
        for hook in self._before_load.values():
            hook(left, str(folder))
        found: dict[str, Any] = {}
        together(self._processes, lambda: found.update(self._read(path, models, left)))
        self._apply(found, left)
        self.places.continue_from(folder)

    def _common(self, weights: list[Any]) -> dict[str, Any]:
        """Return what all processes have alike, or hold together."""
        registry = self._registry
        names = self._parameter_names()
        parts: dict[str, Any] = {_part("model", i): state for i, state in enumerate(weights)}
        for index, optimizer in enumerate(registry.optimizers):
            parts[_part("optimizer", index)] = by_name(optimizer.optimizer, names)
        objects = [thing.state_dict() for thing in registry.objects]
        parts |= {f"custom_checkpoint_{index}": state for index, state in enumerate(objects)}
        parts["loop"] = {
            "schedulers": [scheduler.state_dict() for scheduler in registry.schedulers],
            "loaders": [loader.state_dict() for loader in registry.loaders],
            "scaler": self._gradients.scale_state(),
            "accumulation": self._accumulation.state_dict(),
        }
        return parts

    def _split(self, parts: dict[str, Any], rank: int) -> dict[str, Any]:
        from trainkit.checkpoint.sharding import split  # others need none of it

        mine, digest = split(parts, rank)
        if len(set(self._processes.all_gather_objects(digest))) > 1:
            raise CheckpointError(
                "The states to be saved hold other sharded tensors on other processes. "
                "`state_dict` of registered objects must return the same `DTensor`s on all."
            )
        return mine

    def _parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter of the prepared models, by its id."""
        return {id(parameter): name for name, parameter in self._parameters().items()}

    def _read(self, path: Path, models: list[nn.Module], wanted: list[nn.Module]) -> dict[str, Any]:
        """Return the parts of a checkpoint that are wanted, compared with what is prepared."""
        registry = self._registry
        checkpoint = CheckpointStore(path.parent).open_unverified(path)
        present = {_part("model", i): model.state_dict() for i, model in enumerate(models)}
        optimizers = {_part("optimizer", i): o for i, o in enumerate(registry.optimizers)}
        objects = {f"custom_checkpoint_{index}" for index in range(len(registry.objects))}
        left = {_part("model", i) for i, model in enumerate(models) if model not in wanted}
        names = set(filter(_is_state, checkpoint.names()))
        _check_parts(path, names, {*present, *optimizers, *objects}, left)
        like = {"state": self._parameters()} if self._strategy.sharded else None
        likes: dict[str, Any] = {name: model for name, model in present.items() if name not in left}
        likes |= dict.fromkeys(optimizers, like) | dict.fromkeys([*objects, "loop"])
        found = {name: checkpoint.read(name, like) for name, like in likes.items()}
        found["streams"] = self._read_streams(checkpoint)
        checkpoint.verify_rest()
        for name in present.keys() - left:
            _check_model(path, name, found[name], present[name])
        for name, optimizer in optimizers.items():
            check_optimizer(path, found[name], optimizer.optimizer, self._parameter_names())
        _check_counts(path, found["loop"], registry)
        return found

    def _read_streams(self, checkpoint: Checkpoint) -> Any:
        size = checkpoint.manifest.world_size
        if size == self._processes.size:
            return checkpoint.read(_process_part(self._processes.rank))
        if checkpoint.read(_process_part(0))["gradients"]:
            raise CheckpointError(
                f"The state `{checkpoint.path}` was saved inside a window by {size} processes, "
                "which others cannot complete. Load it on as many.",
                path=checkpoint.path,
            )
        return None  # other processes have other streams

    def _apply(self, found: Mapping[str, Any], wanted: list[nn.Module]) -> None:
        registry, loop = self._registry, found["loop"]
        for index, wrapped in enumerate(registry.models):
            model = self._strategy.unwrap(wrapped)
            if model in wanted:
                model.load_state_dict(found[_part("model", index)])
        for index, optimizer in enumerate(registry.optimizers):
            load_by_name(optimizer.optimizer, found[_part("optimizer", index)])
        stateful = [*registry.objects, *registry.schedulers]
        states = [found[f"custom_checkpoint_{index}"] for index in range(len(registry.objects))]
        states += loop["schedulers"]
        for thing, state in zip(stateful, states, strict=True):
            thing.load_state_dict(state)
        if self._gradients.scaler is not None and loop["scaler"]:
            self._gradients.scaler.load_state_dict(loop["scaler"])
        self._accumulation.load_state_dict(loop["accumulation"])
        self._gradients.forget()
        self._restore_position(loop["loaders"], found["streams"])

    def _restore_position(self, states: Sequence[Any], streams: Mapping[str, Any] | None) -> None:
        for loader, state in zip(self._registry.loaders, states, strict=True):
            if streams is None:  # the batches of other processes are others
                loader.set_epoch(state["epoch"] + state["has_ended"])
            else:
                loader.load_state_dict(state)
        if streams is not None:
            self._restore_streams(streams)

    def _restore_streams(self, streams: Mapping[str, Any]) -> None:
        parameters = self._parameters()
        for parameter in parameters.values():
            parameter.grad = None
        for name, gradient in streams["gradients"].items():
            parameters[name].grad = gradient.to(parameters[name].device)
        rng.restore_host((streams["python"], streams["numpy"], streams["torch"]))
        if streams["device"] is not None:
            getattr(torch, self._device.type).set_rng_state(streams["device"], self._device)

    def _streams(self) -> dict[str, Any]:
        python, numpy, host = rng.save_host()
        module = None if self._device.type == "cpu" else getattr(torch, self._device.type)
        device = None if module is None else module.get_rng_state(self._device)
        return {
            "python": python,
            "numpy": numpy,
            "torch": host,
            "device": device,
            "gradients": self._open_gradients(),
        }

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

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the prepared models under the names of `by_name`."""
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self._registry.models)
            for name, parameter in self._strategy.unwrap(model).named_parameters()
        }


def _part(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


def _process_part(rank: int) -> str:
    return f"process-{rank:05d}"


def _is_state(part: str) -> bool:
    """Return whether a part holds the state of something that was prepared or registered."""
    return not part.startswith("process-") and "-shard-" not in part and part != "loop"


def _register(hooks: "OrderedDict[int, Hook]", hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _describe(registry: Registry) -> dict[str, Any]:
    return {
        "models": len(registry.models),
        "versions": {
            "trainkit": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def _check_parts(path: Path, names: set[str], expected: set[str], unsaved: set[str]) -> None:
    missing, unknown = sorted(expected - names - unsaved), sorted(names - expected)
    if missing or unknown:
        raise CheckpointError(
            f"The state `{path}` does not fit: it lacks {missing or 'nothing'}, and has "
            f"{unknown or 'nothing'} that is not wanted. Prepare and register as many models, "
            "optimizers and objects as when it was saved.",
            path=path,
        )


def _check_model(
    path: Path, part: str, saved: Mapping[str, Any], present: Mapping[str, Any]
) -> None:
    problems = [f"lacks {name!r}" for name in present if name not in saved]
    problems += [f"has {name!r} too many" for name in saved if name not in present]
    problems += [
        f"has {name!r} of shape {list(saved[name].shape)}, not {list(value.shape)}"
        for name, value in present.items()
        if isinstance(value, torch.Tensor) and name in saved and saved[name].shape != value.shape
    ]
    if problems:
        raise CheckpointError(
            f"The state `{path}` does not fit: its {part} {'; '.join(problems[:5])}.", path=path
        )


def _check_counts(path: Path, loop: Mapping[str, Any], registry: Registry) -> None:
    for kind, things in (("schedulers", registry.schedulers), ("loaders", registry.loaders)):
        if len(loop[kind]) != len(things):
            raise CheckpointError(
                f"The state `{path}` does not fit: it has {len(loop[kind])} {kind}, but "
                f"{len(things)} are prepared. Prepare as many as when it was saved.",
                path=path,
            )
