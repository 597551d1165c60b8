"""What `save_state` writes and `load_state` puts back (rules 22, 28)."""

import platform
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.gradients import Gradients
from trainkit.accelerator.loadable import check_form, check_loop, check_model, check_parts
from trainkit.accelerator.optimizer_state import by_name, check_optimizer, load_by_name
from trainkit.accelerator.preparer import Registry
from trainkit.accelerator.registered import (
    check_registered,
    object_parts,
    objects_for,
    put_entries,
    take_own,
)
from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.accelerator.state_directory import Places
from trainkit.accelerator.streams import Streams, saved_by
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.checkpoint import verify
from trainkit.checkpoint.exact import load_model, load_state
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.forms import applying
from trainkit.distributed import (
    Processes,
    check_called_by_all,
    collective_guard,
    only_this_process,
    run_on_all,
    run_on_all_or_main,
)
from trainkit.errors import ConfigError
from trainkit.strategies import Strategy
from trainkit.training.replicas import check_replicas
from trainkit.training.state import VERSION

__all__ = ["States"]

Hook = Callable[..., Any]
_Parts = Callable[[Path], dict[str, Any]]
_WHEN = "in `save_state`"

_LACKING = (
    "it was saved by process 0 alone: the random streams of the other processes are new ones, "
    "derived from it."
)


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
        self._streams = Streams(
            self._parameters, registry, strategy, accumulation, processes=processes, device=device
        )
        self._before_save: OrderedDict[int, Hook] = OrderedDict()
        self._before_load: OrderedDict[int, Hook] = OrderedDict()
        self._was_alone = self._has_warned = False

    def register(self, objects: Sequence[Any]) -> None:
        """Save and load more objects with every state.

        Raises:
            ConfigError: One has no `state_dict` and `load_state_dict`.
        """
        check_registered(objects)
        self._registry.objects.extend(objects)

    def before_save(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before each save, on every process."""
        return _register(self._before_save, hook)

    def before_load(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, folder)` before each load, on every process."""
        return _register(self._before_load, hook)

    def save(self, output_dir: Any, checks: bool) -> Path:
        """Save the state; return its folder. For an exact resume every process must call it.

        Where process 0 calls it alone, the state lacks what only other processes know: their
        random streams. That is said once.

        Raises:
            ConfigError: There is no folder; or process 0 is alone, inside a window.
            CheckpointError: It failed on some process; an earlier state is untouched.
            DistributedError: The models are sharded, or process 0 is among those that do not call;
                or the processes do not hold the same, where that is to be looked at.
        """
        folder = run_on_all_or_main(
            self._processes,
            "save_state",
            lambda: self._save(output_dir, self._processes, self._parts_of_all, checks=checks),
            None if self._strategy.sharded else lambda: self._save_alone(output_dir),
            key="" if output_dir is None else str(output_dir),
        )
        self.places.saved(Path(folder))
        if self._was_alone and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "`save_state` was called by process 0 alone: the states lack the random streams "
                "of the other processes, and a resume gives them new ones. For an exact resume "
                "call it on every process, outside of `if accelerator.is_main_process:`.",
                stacklevel=3,
            )
        return Path(folder)

    def load(self, input_dir: Any, report: Callable[[str], None]) -> None:
        """Load a state. Every process must call it.

        Nothing changes before all of it is known to be good and to fit. Without `input_dir` the
        state before a broken one is taken; but not once a hook has seen it.

        Raises:
            DistributedError: Some process does not call it.
            CheckpointError: There is none, or it is broken, or does not fit; on all processes.
        """
        check_called_by_all(self._processes, "load_state")
        models = list(map(self._strategy.unwrap, self._registry.models))
        left, found = list(models), dict[str, Any]()

        def read(path: Path) -> None:
            found.update(self._read(path, models, left))

        look = verify if self._before_load else read  # a hook may load what it finds
        folder, path = self.places.for_loading(input_dir, look, report)
        if self._before_load:
            for hook in self._before_load.values():
                hook(left, str(folder))
            run_on_all(self._processes, lambda: read(path))
        self._apply(found, left, path)
        for line in filter(None, [*found["news"], found["lacking"] and _LACKING]):
            report(f"trainkit: `{path}`: {line}")
        self.places.continue_from(folder)

    def _save(
        self, output_dir: Any, processes: Processes, parts: _Parts, *, checks: bool = False
    ) -> str:
        """Save what `parts` returns on each of the processes that save."""
        if checks:
            check_replicas(self._strategy, self._parameters(), self._registry.optimizers, _WHEN)
        folder = self.places.for_saving(output_dir, processes)
        metadata = _describe(self._registry) | {"processes": self._processes.size}
        self.places.commit(folder, parts(folder), metadata, processes)
        return str(folder)

    def _save_alone(self, output_dir: Any) -> str:
        """Save on process 0 what it has; nothing here may wait for other processes."""
        if self._accumulation.is_open:
            raise ConfigError(
                "`save_state` was called by process 0 alone, inside a window: the gradients that "
                "other processes have accumulated would be lost. Call it on every process, or "
                "`if accelerator.sync_gradients:`."
            )
        self._was_alone = self._processes.size > 1
        return self._save(output_dir, only_this_process(self._processes), self._parts_of_main)

    def _parts_of_all(self, folder: Path) -> dict[str, Any]:
        """Return what this process writes where all of them save."""
        models, streams = self._weights(folder), self._streams.save()
        objects, own_states = take_own(self._registry.objects, models, self._processes)
        parts = self._common(models) | objects
        own = {process_part(self._processes.rank): streams | own_states}
        if self._strategy.sharded:
            from trainkit.checkpoint.resharding.sharding import split_alike  # on demand

            own |= split_alike(self._processes, parts)
        elif self._processes.is_main:
            own |= parts
        return own

    def _parts_of_main(self, folder: Path) -> dict[str, Any]:
        """Return what process 0 writes where it saves only_this_process."""
        with collective_guard.only("save_state"):  # also what hooks and objects call
            parts = self._common(self._weights(folder)) | {process_part(0): self._streams.save()}
            return parts | take_own(self._registry.objects, {}, None)[0]

    def _weights(self, folder: Path) -> dict[str, Any]:
        """Return the states of the models by their parts, as the hooks have left them."""
        models = [self._strategy.unwrap(model) for model in self._registry.models]
        weights: list[Any] = [model.state_dict() for model in models]
        for hook in self._before_save.values():
            hook(models, weights, str(folder))
        return {_part("model", index): state for index, state in enumerate(weights)}

    def _common(self, models: dict[str, Any]) -> dict[str, Any]:
        """Return what all processes have alike, or hold run_on_all."""
        registry = self._registry
        parameters = self._parameters()
        parts = dict(models)
        for index, optimizer in enumerate(registry.optimizers):
            parts[_part("optimizer", index)] = by_name(optimizer.optimizer, parameters)
        parts["loop"] = {
            "schedulers": [scheduler.state_dict() for scheduler in registry.schedulers],
            "loaders": [loader.state_dict() for loader in registry.loaders],
            "scaler": self._gradients.scale_state(),
            "accumulation": self._accumulation.state_dict(),
        }
        return parts

    def _read(self, path: Path, models: list[nn.Module], wanted: list[nn.Module]) -> dict[str, Any]:
        """Return the parts of a checkpoint that are wanted, compared with what is prepared."""
        registry = self._registry
        checkpoint = CheckpointStore(path.parent).open_unverified(path)
        present = {_part("model", i): model.state_dict() for i, model in enumerate(models)}
        optimizers = {_part("optimizer", i): o for i, o in enumerate(registry.optimizers)}
        objects = object_parts(checkpoint.names())
        left = {_part("model", i) for i, model in enumerate(models) if model not in wanted}
        names = set(filter(_is_state, checkpoint.names()))
        check_parts(path, names - objects, {*present, *optimizers}, left)
        parameters = self._parameters()
        like = {"state": parameters} if self._strategy.sharded else None
        likes: dict[str, Any] = {name: model for name, model in present.items() if name not in left}
        likes |= dict.fromkeys(optimizers, like) | dict.fromkeys([*objects, "loop"])
        found = {name: checkpoint.read(name, like) for name, like in likes.items()}
        own, same_size = self._streams.read(checkpoint)
        found["streams"] = own[0] if same_size else None  # other processes have other streams
        found["lacking"] = same_size and checkpoint.manifest.world_size < saved_by(checkpoint)
        checkpoint.verify_rest()
        check_form(
            checkpoint,
            found,
            [] if found["lacking"] and "seed" in own[0] else own,
            registry,
            {name: state for name, state in present.items() if name not in left},
            parameters,
            rank=self._processes.rank if same_size else None,
            has_scaler=self._gradients.scaler is not None,
        )
        found["news"] = put_entries(found, likes.keys() & present, own, same_size=same_size)
        found["objects"] = objects_for(
            registry.objects, found, own, path=path, rank=self._processes.rank, same_size=same_size
        )
        for index in [index for index, model in enumerate(models) if model in wanted]:
            check_model(path, _part("model", index), found[_part("model", index)], models[index])
        for name, optimizer in optimizers.items():
            check_optimizer(path, found[name], optimizer.optimizer, parameters)
        check_loop(path, found["loop"], registry, found["streams"])
        return found

    def _apply(self, found: Mapping[str, Any], wanted: list[nn.Module], path: Path) -> None:
        registry, loop = self._registry, found["loop"]
        for index, wrapped in enumerate(registry.models):
            model = self._strategy.unwrap(wrapped)
            if model in wanted:
                state = found[_part("model", index)]
                with applying("The model", path):
                    load_model(model, state, older=True)
        saved = {
            f"{index}.{name}": value
            for index in range(len(registry.models))
            for name, value in found.get(_part("model", index), {}).items()
        }
        for index, optimizer in enumerate(registry.optimizers):
            with applying("The optimizer", path):
                load_by_name(optimizer.optimizer, found[_part("optimizer", index)], saved)
        for thing, state in zip(registry.objects, found["objects"].values(), strict=True):
            with applying(f"The registered `{type(thing).__name__}`", path):
                load_state(thing, state)
        for scheduler, state in zip(registry.schedulers, loop["schedulers"], strict=True):
            with applying("The scheduler", path):
                scheduler.load_state_dict(state)
        if self._gradients.scaler is not None and loop["scaler"]:
            self._gradients.scaler.load_state_dict(loop["scaler"])
        own = loop | (found["streams"] or {})  # older states have these in `loop` alone
        self._accumulation.load_state_dict(own["accumulation"])
        self._gradients.forget()
        self._restore_position(own["loaders"], found["streams"])

    def _restore_position(self, states: Sequence[Any], streams: Mapping[str, Any] | None) -> None:
        for loader, state in zip(self._registry.loaders, states, strict=True):
            if streams is None:  # the batches of other processes are others
                loader.set_epoch(state["epoch"] + state["has_ended"])
            else:
                loader.load_state_dict(state)
        if streams is not None:
            self._streams.restore(streams)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the prepared models under the names of `by_name`."""
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self._registry.models)
            for name, parameter in self._strategy.unwrap(model).named_parameters()
        }


def _part(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


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
